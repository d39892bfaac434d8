"""Facts about connections that only the kernel knows, and listening sockets with errors that tell what to do."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import select
import socket as socket_module
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from socket import AF_INET6, IPPROTO_TCP, SO_LINGER, SOL_SOCKET, create_server, socket
from typing import Any, Final

# A socket is `Any` here: uvloop has its own kind.

_OTHER_FILES: Final = 64
"""Descriptors for all else: the log, databases, probes of engines, operators, and connections that are refused."""
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
_BACKLOG: Final = 1024
_USER_TIMEOUT: Final = getattr(socket_module, "TCP_USER_TIMEOUT", None)
"""Linux's option of a TCP socket by which a peer that acknowledges nothing is given up; None elsewhere."""
_MAPPED: Final = "::ffff:"
ALL_FAMILIES: Final = "::"
"""The host that listens to both IPv6 and IPv4."""


def connections_allowed() -> int:
    """Return the number of clients that may connect, if each needs an engine's connection and all else has its
    files."""
    files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if files_max == resource.RLIM_INFINITY else max(2, (files_max - _OTHER_FILES) // 2)


@contextmanager
def listening(what: str, address: tuple[str, int], field: str, option: str) -> Iterator[None]:
    """Wrap code that begins to listen: raise OSError with a message that names the address and how to change it.

    Args:
        what: the listener's name in the message.
        address: where it listens.
        field, option: the config field and the option of `serve` that set the port.
    """
    try:
        yield
    except OSError as error:
        host, port = address
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        why = "another process listens there" if error.errno == errno.EADDRINUSE else str(error.strerror or error)
        message = f"{what} wants {place}: {why}. Give another port with {option}, or `{field}` in the file"
        raise OSError(message) from error


def listener(family: int, address: Any, *, is_shared: bool = False) -> socket:
    """Return a socket that listens at an address. `ALL_FAMILIES` includes IPv4, whatever the system's default.
    `is_shared`: other sockets may listen at the same port."""
    is_dual = address[0] == ALL_FAMILIES
    return create_server(address, family=family, backlog=_BACKLOG, reuse_port=is_shared, dualstack_ipv6=is_dual)


def listener_of_all_families(host: str, port: int) -> socket | None:
    """Return a listening socket if the host is `ALL_FAMILIES`, else None: asyncio's own would listen to IPv6 alone."""
    return listener(AF_INET6, (host, port)) if host == ALL_FAMILIES else None


def waiting_connections(listener: int) -> list[socket]:
    """Return the connections that the kernel has accepted on a listening descriptor. Closing the descriptor would reset
    them."""
    found = []
    with socket(fileno=os.dup(listener)) as own:
        own.setblocking(False)
        try:
            while True:
                found.append(own.accept()[0])
        except OSError:  # no more are there, or no more descriptors
            pass
    for each in found:
        each.setblocking(False)
    return found


def peer_of(transport: asyncio.BaseTransport) -> str:
    """Return the peer's address without its port. An IPv4 address is written as such, also on an IPv6 socket."""
    address = transport.get_extra_info("peername")
    host = str(address[0] if isinstance(address, tuple) else address)
    return host.removeprefix(_MAPPED) if "." in host else host


def abort_if_stalled(sock: Any, limit_s: float) -> None:
    """Have the kernel abort a connection whose peer takes nothing of what is sent for this time. The kernel holds
    megabytes for a slow one, so only the kernel knows."""
    if _USER_TIMEOUT is not None:
        sock.setsockopt(IPPROTO_TCP, _USER_TIMEOUT, max(1, round(limit_s * 1000)))


def is_hung_up(sock: Any) -> bool:
    """Return whether the peer has closed. While reading is paused the loop reports no EOF; the kernel sees it behind
    the unread bytes."""
    poll = select.poll()
    poll.register(sock.fileno(), getattr(select, "POLLRDHUP", 0))
    return bool(poll.poll(0))


def reset_on_close(sock: Any) -> None:
    """Make closing the socket a reset."""
    sock.setsockopt(SOL_SOCKET, SO_LINGER, _RESET_ON_CLOSE)
