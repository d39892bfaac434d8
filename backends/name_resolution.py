"""Which addresses stand behind a name, and how is one of them spoken to by that name?"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, cast

import aiohttp
from aiohttp.abc import ResolveResult

if TYPE_CHECKING:
    from aiohttp.abc import AbstractResolver

Resolver = Callable[[str], Awaitable[Sequence[str]]]
"""The addresses behind a name, now. OSError or UnicodeError: that cannot be said."""

_KEEPALIVE_S: Final = 3.0


class KnownAddresses:
    """Behind which addresses of one name is an engine? Pure: times are monotonic seconds given by the caller.

    One that appears counts at once, one that answers leave out counts for a time to live. So answers that name only
    some of the addresses each time, and addresses that come and go, change nothing. Only addresses of one family count:
    an engine that has one of both would be two. It is IPv4 where a name has both at first, and another one once none of
    the known is left.
    """

    def __init__(self) -> None:
        self.left_out = 0
        """So many addresses of the last answer are beyond the bound."""
        self._missed_s: dict[str, float | None] = {}
        """Since when answers leave it out; None: the last one had it."""

    def __iter__(self) -> Iterator[str]:
        """In the order in which they came."""
        return iter(self._missed_s)

    def __len__(self) -> int:
        return len(self._missed_s)

    def resolved(self, addresses: Sequence[str], now_s: float, *, ttl_s: float, addresses_max: int) -> bool:
        """A lookup had this answer. Are others known now?"""
        known = self._missed_s
        before = list(known)
        is_six = _is_six(before[0]) if before else all(map(_is_six, addresses))
        resolved = {address for address in addresses if _is_six(address) == is_six}
        for address in before:
            missed_s = known[address]
            if address in resolved:
                known[address] = None
            elif missed_s is None:
                known[address] = now_s
            elif now_s - missed_s >= ttl_s:
                del known[address]
        for address in sorted(resolved - known.keys()):
            known[address] = None
        for address in list(known)[addresses_max:]:
            del known[address]
        self.left_out = len(resolved - known.keys())
        return list(known) != before


def _is_six(address: str) -> bool:
    return ":" in address


async def resolve(host: str) -> list[str]:
    """By what the system is configured to ask."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(each[4][0]) for each in found]


def session_at(address: str) -> aiohttp.ClientSession:
    """Reaches this address by whatever name: a url, a Host header and a certificate keep theirs."""
    resolver = cast("AbstractResolver", _Fixed(address))
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S, resolver=resolver)
    return aiohttp.ClientSession(connector=connector)


class _Fixed:
    """What aiohttp asks of a resolver. Not its own class: a compiled one cannot follow an abstract one for certain."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        family = socket.AF_INET6 if _is_six(self._address) else socket.AF_INET
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [ResolveResult(hostname=host, host=self._address, port=port, family=family, proto=0, flags=flags)]
