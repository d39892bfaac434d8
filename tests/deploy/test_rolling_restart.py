"""Two gateways behind a real nginx with the config that compose mounts: names by DNS, one killed, each restarted."""

from __future__ import annotations

import asyncio
import signal
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml

from tests.commands import Running, running
from tests.deploy.nginx import NGINX, nginx_config
from tests.deploy.requests import body, said_whole
from tests.ports import free_port
from tests.waiting import WAIT_S, until

ADDRESSES = ("127.0.1.1", "127.0.1.2")
"""Of the replicas: all of 127.0.0.0/8 is loopback on Linux."""
ASKED_AGAIN_S = 1
"""How soon nginx asks for the names again; 5 in the file."""
CLIENTS = 12


class Names(asyncio.DatagramProtocol):
    """Answer every question for addresses by RFC 1035, in the place of Docker's resolver."""

    def __init__(self) -> None:
        self.addresses: set[str] = set()
        self.answers = 0

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self.transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        end = data.index(0, 12) + 5
        records = b"".join(
            struct.pack("!HHHIH", 0xC00C, 1, 1, 600, 4) + socket.inet_aton(each) for each in sorted(self.addresses)
        )
        head = data[:2] + struct.pack("!HHHHH", 0x8180, 1, len(self.addresses), 0, 0)
        self.transport.sendto(head + data[12:end] + records, addr)
        self.answers += 1

    async def told(self) -> None:
        """Wait until nginx knows the addresses of this moment."""
        answered = self.answers
        await until(lambda: self.answers > answered)


class Replica:
    """One gateway, which has the name while it runs."""

    def __init__(self, address: str, config: Path, names: Names) -> None:
        self._address = address
        self._config = config
        self._names = names
        self._stack = AsyncExitStack()
        self.running: Running | None = None

    async def start(self) -> None:
        self.running = await self._stack.enter_async_context(running("serve", "-c", str(self._config)))
        await self.running.says("serving on")
        self._names.addresses.add(self._address)
        await self._names.told()

    async def end(self, by: signal.Signals) -> int:
        """End as Docker does: the name has the address until the process has ended."""
        assert self.running is not None
        self.running.signal(by)
        status = await self.running.ended()
        self._names.addresses.discard(self._address)
        return status

    async def aclose(self) -> None:
        await self._stack.aclose()


class Clients:
    """Clients that ask again as soon as they were answered, every second time for a stream."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url
        self.served = 0
        self.failed: list[str] = []

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        """Ask while the block runs, and let what is under way at its end be answered."""
        ended = asyncio.Event()
        tasks = [asyncio.create_task(self._ask_on(ended, number)) for number in range(CLIENTS)]
        try:
            yield
        finally:
            ended.set()
            await asyncio.gather(*tasks)

    async def _ask_on(self, ended: asyncio.Event, number: int) -> None:
        while not ended.is_set():
            number += 1
            try:
                fault = await self._ask(tokens=40 if number % 3 else 1, stream=number % 2 == 0)
            except aiohttp.ClientError as error:
                fault = f"{type(error).__name__}: {error}"
            if fault:
                self.failed.append(fault)
                await asyncio.sleep(0.05)
            else:
                self.served += 1

    async def _ask(self, tokens: int, *, stream: bool) -> str:
        """Return what went wrong; nothing, if it was answered whole."""
        headers = {"authorization": "Bearer sk-anybody"}
        async with self._http.post(self._url, json=body(tokens, stream=stream), headers=headers) as response:
            answer = await response.read()
        return "" if response.status == 200 and said_whole(answer, stream=stream) else f"{response.status}: {answer!r}"

    async def are_served(self, more: int) -> None:
        goal = self.served + more
        await until(lambda: self.served >= goal)


@asynccontextmanager
async def deployed(folder: Path) -> AsyncIterator[tuple[list[Replica], Clients]]:
    loop, port, front = asyncio.get_running_loop(), free_port(), free_port()
    async with AsyncExitStack() as stack:
        transport, names = await loop.create_datagram_endpoint(Names, local_addr=("127.0.0.1", 0))
        stack.callback(transport.close)
        resolver = "127.0.0.1:{}".format(transport.get_extra_info("sockname")[1])
        replicas = []
        for number, address in enumerate(ADDRESSES):
            config = folder / f"config-{number}.yaml"
            said = {"listen": f"{address}:{port}", "admin": f"{address}:{free_port()}", "open_access": True}
            said["access_log"] = str(folder / f"access-{number}.log")
            said["pools"] = [{"name": "p", "backends": [{"url": "sim:demo"}]}]
            config.write_text(yaml.safe_dump(said))
            replicas.append(Replica(address, config, names))
            stack.push_async_callback(replicas[-1].aclose)
        site = {
            "127.0.0.11 valid=5s": f"{resolver} valid={ASKED_AGAIN_S}s", "listen 8080": f"listen 127.0.0.1:{front}",
            "$replicas:8080": f"$replicas:{port}",
        }  # fmt: skip
        command = [str(NGINX), "-p", str(folder), "-c", str(nginx_config(folder, site)), "-g", "daemon off;"]
        proxy = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
        stack.push_async_callback(proxy.wait)
        stack.callback(proxy.terminate)
        timeout = aiohttp.ClientTimeout(total=WAIT_S)
        http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout)
        await stack.enter_async_context(http)
        clients = Clients(http, f"http://127.0.0.1:{front}/v1/chat/completions")
        async with clients.asking():
            await asyncio.gather(*(replica.start() for replica in replicas))
        clients.failed.clear()  # before the first replica there was nobody
        yield replicas, clients


@pytest.mark.slow
@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
async def test_who_is_killed_takes_what_it_had_and_who_is_restarted_takes_nothing(tmp_path: Path) -> None:
    async with deployed(tmp_path) as (replicas, clients), clients.asking():
        await clients.are_served(4 * CLIENTS)
        assert clients.failed == []

        killed, _ = replicas
        await killed.end(signal.SIGKILL)
        await clients.are_served(4 * CLIENTS)
        await killed.start()
        await clients.are_served(4 * CLIENTS)
        assert len(clients.failed) <= CLIENTS, clients.failed

        clients.failed.clear()
        for replica in replicas:
            assert await replica.end(signal.SIGTERM) == 0
            await replica.start()
            await clients.are_served(2 * CLIENTS)
        assert clients.failed == []
