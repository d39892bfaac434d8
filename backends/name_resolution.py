"""The addresses behind a name."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence

Resolver = Callable[[str], Awaitable[Sequence[str]]]
"""Look up the addresses of a name now. Raises OSError or UnicodeError if the lookup fails."""


class KnownAddresses:
    """The addresses of one name that are in use. Times are the caller's monotonic seconds.

    A new address counts at once. An address that answers omit stays for a time to live, so partial and rotating answers
    change nothing. Only one address family counts, since an engine with both would count as two: IPv4 where the first
    answer has both, until none of the known addresses is left.
    """

    def __init__(self) -> None:
        self.left_out = 0
        """Number of addresses of the last answer that are beyond the bound."""
        self._missed_s: dict[str, float | None] = {}
        """Start of the omission by answers, per address; None if the last answer had the address."""

    def __iter__(self) -> Iterator[str]:
        """Iterate in order of arrival."""
        return iter(self._missed_s)

    def __len__(self) -> int:
        return len(self._missed_s)

    def resolved(self, addresses: Sequence[str], now_s: float, *, ttl_s: float, addresses_max: int) -> bool:
        """Take a lookup's answer. Return whether the known addresses changed."""
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
    """Return whether an address is IPv6."""
    return ":" in address


async def resolve(host: str) -> list[str]:
    """Resolve a name as the system is configured to."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(each[4][0]) for each in found]
