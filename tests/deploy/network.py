"""A network of containers as Docker makes one: a bridge, an address for each, and names by 127.0.0.11."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import socket
import struct
import threading
from pathlib import Path

from tests.deploy.container import run

_RANGES = [f"198.18.{third}" for third in range(1, 255)]
"""Of the addresses that RFC 2544 keeps for tests."""
_RESOLVER = ("127.0.0.11", 53)
_CLONE_NEWNET = 0x40000000


class Network:
    """`async with Network() as network`: whatever it has made is gone afterwards. Needs root."""

    def __init__(self) -> None:
        self.names: dict[str, set[str]] = {}
        """Who answers to which name just now."""
        self._id = f"fg{os.getpid()}"
        self._range = ""
        self._hosts = itertools.count(2)
        self._joined: dict[str, tuple[str, asyncio.DatagramTransport]] = {}

    async def __aenter__(self) -> Network:
        routes = await run(["ip", "route"])
        self._range = next(each for each in _RANGES if each not in routes)
        await run(["ip", "link", "add", self._id, "type", "bridge"])
        try:
            await run(["ip", "address", "add", f"{self._range}.1/24", "dev", self._id])
            await run(["ip", "link", "set", self._id, "up"])
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        for namespace in list(self._joined):
            await self.leave(namespace)
        await run(["ip", "link", "delete", self._id])

    async def join(self) -> tuple[str, str]:
        """A new namespace on the bridge, and its address."""
        number = next(self._hosts)
        namespace, address = f"{self._id}-{number}", f"{self._range}.{number}"
        outer = f"{self._id}v{number}"
        await run(["ip", "netns", "add", namespace])
        try:
            await run(["ip", "-n", namespace, "link", "set", "lo", "up"])
            resolver = _socket_in(namespace)
        except BaseException:
            await run(["ip", "netns", "delete", namespace])
            raise
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: _Names(self), sock=resolver)
        self._joined[namespace] = outer, transport
        await run(["ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", namespace])
        await run(["ip", "link", "set", outer, "master", self._id, "up"])
        await run(["ip", "-n", namespace, "address", "add", f"{address}/24", "dev", "eth0"])
        await run(["ip", "-n", namespace, "link", "set", "eth0", "up"])
        return namespace, address

    async def leave(self, namespace: str) -> None:
        """Its address answers nobody any more."""
        outer, transport = self._joined.pop(namespace)
        transport.close()
        # First, since connections that nobody ends keep a namespace for minutes.
        await run(["ip", "link", "delete", outer])
        await run(["ip", "netns", "delete", namespace])


def _socket_in(namespace: str) -> socket.socket:
    """A socket of that namespace, which a thread enters for a moment."""
    found: list[socket.socket] = []
    faults: list[OSError] = []

    def enter() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with Path(f"/run/netns/{namespace}").open() as where:
            if libc.setns(where.fileno(), _CLONE_NEWNET):
                faults.append(OSError(ctypes.get_errno(), f"cannot enter {namespace}"))
                return
        resolver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        resolver.bind(_RESOLVER)
        resolver.setblocking(False)
        found.append(resolver)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if faults:
        raise faults[0]
    return found[0]


class _Names(asyncio.DatagramProtocol):
    """Answers who has a name: addresses of version 4, all of them."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        assert self._transport is not None
        self._transport.sendto(answer(data, self._network.names), addr)


def answer(query: bytes, names: dict[str, set[str]]) -> bytes:
    """To one question, by RFC 1035: NXDOMAIN for a name that nobody has."""
    labels, at = [], 12
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode())
        at += 1 + query[at]
    end = at + 5
    kind = struct.unpack_from("!H", query, at + 1)[0]
    known = names.get(".".join(labels).lower())
    addresses = sorted(known) if known and kind == 1 else []
    flags = 0x8180 if known else 0x8183
    head = query[:2] + struct.pack("!HHHHH", flags, 1, len(addresses), 0, 0)
    records = b"".join(struct.pack("!HHHIH", 0xC00C, 1, 1, 600, 4) + socket.inet_aton(each) for each in addresses)
    return head + query[12:end] + records
