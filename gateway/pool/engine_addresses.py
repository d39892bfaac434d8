"""Engines behind the names of a configuration, followed by repeated look-ups."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Final

from prometheus_client.metrics_core import Metric

from gateway.config.model import Config, PoolConfig
from gateway.config.sections.backends import BackendConfig
from gateway.config.sections.limits import Limits
from gateway.telemetry.background import Tasks
from gateway.telemetry.metric_families import Row, family

logger = logging.getLogger("fairgate")

LOOKUP_S = 5.0
"""A longer look-up counts as failed for now, and goes on: a name has at most one at a time."""
_LISTED_MAX: Final = 10
Resolver = Callable[[str], Awaitable[Sequence[str]]]
"""Look up the addresses of a name now. Raises OSError or UnicodeError if the lookup fails."""


class FollowedName:
    """A host name that is looked up repeatedly, and its addresses in use. Times are the caller's monotonic seconds.

    A new address counts at once. An address that answers omit stays for a time to live, so partial and rotating answers
    change nothing. Only one address family counts, since an engine with both would count as two: IPv4 where the first
    answer has both, until none of the known addresses is left.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self.fault = ""
        """Cause of the last look-up's failure, or ""."""
        self.lookup: asyncio.Future[Sequence[str]] | None = None
        self.follower: asyncio.Task[None] | None = None
        self.left_out = 0
        """Number of addresses of the last answer that are beyond the bound."""
        self._missed_s: dict[str, float | None] = {}
        """Start of the omission by answers, per address; None if the last answer had the address."""

    def __iter__(self) -> Iterator[str]:
        """Iterate in order of arrival."""
        return iter(self._missed_s)

    def __len__(self) -> int:
        return len(self._missed_s)

    def resolved(self, addresses: Sequence[str], now_s: float, limits: Limits) -> bool:
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
            elif now_s - missed_s >= limits.upstream_addresses_s:
                del known[address]
        for address in sorted(resolved - known.keys()):
            known[address] = None
        for address in list(known)[limits.upstream_addresses_max :]:
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


class Addresses:
    """The addresses behind the names of all backends that have `each_address`."""

    def __init__(self, resolver: Resolver, background: Tasks) -> None:
        """Create an empty table. `background` collects the faults of look-ups."""
        self.changed = asyncio.Event()
        """Set when addresses have changed since the last call of `engines`."""
        self._resolver = resolver
        self._limits = Limits()
        self._names: dict[str, FollowedName] = {}
        self._background = Tasks(background)

    async def learn(self, config: Config) -> None:
        """Look up the new names of this configuration, within the time of one look-up."""
        for name in [name for name in self._names.values() if name.follower is None]:
            self._forget(self._names.pop(name.host))  # from a configuration that was not taken over
        new = [FollowedName(host) for host in sorted(_hosts(config.pools) - self._names.keys())]
        self._names |= {name.host: name for name in new}
        await asyncio.gather(*[self._look_up(name, config.limits) for name in new])

    def engines(self, pool: PoolConfig) -> list[BackendConfig]:
        """Return the backends of a pool, one per address of a name."""
        found: list[BackendConfig] = []
        for backend in pool.backends:
            if backend.each_address:
                found += [backend.at(address) for address in self._names[backend.host]]
            else:
                found.append(backend)
        return found

    def follow(self, config: Config) -> None:
        """Follow the names of this configuration, and no others."""
        self._limits = config.limits
        hosts = _hosts(config.pools)
        for host in self._names.keys() - hosts:
            self._forget(self._names.pop(host))
        for host in hosts:
            name = self._names[host]
            if name.follower is None:
                name.follower = self._background.repeat(partial(self._follow, name), "addresses", host)

    def faults(self, pool: PoolConfig) -> list[str]:
        """Return the names of this pool that cannot be looked up, with causes."""
        names = [self._names[host] for host in sorted(_hosts([pool])) if host in self._names]
        return [f"the name {name.host} cannot be looked up: {name.fault}" for name in names if name.fault]

    async def close(self) -> None:
        for name in self._names.values():
            self._forget(name)
        await self._background.stop()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of look-ups."""
        success: list[Row] = []
        counts: list[Row] = []
        for name in list(self._names.values()):
            success.append(([name.host], not name.fault))
            counts += [([name.host, "engine"], len(name)), ([name.host, "left_out"], name.left_out)]
        yield family("fairgate_name_lookup_success", success)
        yield family("fairgate_name_addresses", counts)

    async def _follow(self, name: FollowedName) -> None:
        await asyncio.sleep(self._limits.upstream_addresses_s / 2)
        if await self._look_up(name, self._limits):
            self.changed.set()

    async def _look_up(self, name: FollowedName, limits: Limits) -> bool:
        """Return whether the known addresses changed. A failed look-up keeps them."""
        lookup = name.lookup = name.lookup or asyncio.ensure_future(self._resolver(name.host))
        await asyncio.wait({lookup}, timeout=LOOKUP_S)
        if not lookup.done():
            self._log_fault(name, f"no answer within {LOOKUP_S:g} s")
            return False
        name.lookup = None
        try:
            found = lookup.result()
        except (OSError, UnicodeError) as error:
            self._log_fault(name, getattr(error, "strerror", None) or str(error))
            return False
        self._log_fault(name, "" if found else "it has no address")
        if not found:
            return False
        before, left_out = set(name), name.left_out
        is_changed = name.resolved(found, time.monotonic(), limits)
        if is_changed:
            after = set(name)
            logger.info(
                "addresses of the name %s: %d; new: %s; gone: %s",
                name.host, len(after), _listed(after - before), _listed(before - after),
            )  # fmt: skip
        if name.left_out and not left_out:
            logger.warning(
                "the name %s has more addresses than limits.upstream_addresses_max (%d): %d are left out",
                name.host, limits.upstream_addresses_max, name.left_out,
            )  # fmt: skip
        return is_changed

    def _log_fault(self, name: FollowedName, fault: str) -> None:
        """Log a new fault once."""
        if fault and not name.fault:
            logger.warning(
                "the name %s cannot be looked up (%s): its engines stay, %d in all", name.host, fault, len(name)
            )
        elif name.fault and not fault:
            logger.info("the name %s can be looked up again", name.host)
        name.fault = fault

    def _forget(self, name: FollowedName) -> None:
        for task in (name.follower, name.lookup):
            if task is not None:
                task.cancel()


def _hosts(pools: Sequence[PoolConfig]) -> set[str]:
    return {backend.host for pool in pools for backend in pool.backends if backend.each_address}


def _listed(addresses: set[str]) -> str:
    listed = sorted(addresses)[:_LISTED_MAX]
    more = len(addresses) - len(listed)
    return (", ".join(listed) or "none") + (f" and {more} more" if more else "")
