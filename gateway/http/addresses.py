"""Where does a request come from? The peer's address, or the client's address as a trusted proxy reports it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

from gateway.http.headers import Header

_HOPS_MAX: Final = 32
_READ_MAX: Final = 1024
"""Parsed addresses that are cached: each request needs one."""
_LENGTH_MAX: Final = 64
"""Bound of an address. The longest one has 45 characters; with a port and brackets 53."""
_FOR: Final = re.compile(rb'(?:^|[;\s])for=(?:"([^"]*)"|([^;,\s"]*))', re.IGNORECASE)
_WITH_PORT: Final = re.compile(r"\[([^\]]*)\](?::[0-9]+)?|([0-9.]+):[0-9]+")


@lru_cache(maxsize=_READ_MAX)
def _read(text: str) -> IPv4Address | IPv6Address | None:
    ported = _WITH_PORT.fullmatch(text)
    try:
        address = ip_address((ported.group(1) or ported.group(2)) if ported is not None else text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address if mapped is None else mapped


def household(address: str) -> str:
    """Return the client network that limits count by: an IPv4 address, or the /64 of an IPv6 address, since each user
    has a whole /64."""
    return _network(address) if ":" in address else address


@lru_cache(maxsize=_READ_MAX)
def _network(address: str) -> str:
    read = _read(address.partition("%")[0])
    if isinstance(read, IPv6Address):
        return str(IPv6Network((int(read), 64), strict=False))
    return address if read is None else str(read)


class TrustedProxies:
    """The networks of proxies that are trusted to name their clients' addresses."""

    def __init__(self, networks: Sequence[str] = ()) -> None:
        self._networks = [ip_network(network) for network in networks]

    def trusts(self, address: str) -> bool:
        """Return whether this is the address of a trusted proxy."""
        if not self._networks:
            return False
        read = _read(address.partition("%")[0])
        return read is not None and any(read in network for network in self._networks)

    def client(self, peer: str, headers: Sequence[Header]) -> str:
        """Return the address of the client behind a trusted peer.

        That is the last hop in `forwarded`, or else in `x-forwarded-for`, that is not a trusted proxy. Anyone may have
        written the hops before it.
        """
        client = peer
        for hop in reversed(_hops(headers)[-_HOPS_MAX:]):
            read = _read(hop) if len(hop) <= _LENGTH_MAX else None
            if read is None:
                return client
            client = str(read)
            if not any(read in network for network in self._networks):
                return client
        return client


def _hops(headers: Sequence[Header]) -> list[str]:
    """Return the addresses that proxies have noted, the client's first."""
    forwarded = b",".join([value for name, value in headers if name == b"forwarded"])
    if forwarded:
        named = [_FOR.search(element) for element in forwarded.split(b",")]
        found = [b"" if each is None else each.group(1) or each.group(2) or b"" for each in named]
    else:
        found = b",".join([value for name, value in headers if name == b"x-forwarded-for"]).split(b",")
    return [hop.strip().decode("latin-1") for hop in found if hop.strip() or forwarded]
