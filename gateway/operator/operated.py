"""The interface by which an operator sees and changes a gateway, and the change of its config without a restart.

SIGHUP, `POST /reload` and `fairgate reload` all use the `Reloader`. The whole file is applied, or none of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from prometheus_client.metrics_core import Metric

from gateway.config.changes import changes, config_hash, needs_restart
from gateway.config.load import ConfigError
from gateway.operator.snapshots.snapshot import GatewayProcess, SnapshotSource
from gateway.pool.pools import CannotTakeOver
from gateway.telemetry.metric_families import family, single

if TYPE_CHECKING:
    from gateway.config.model import Config
    from gateway.pool.replication.ticker import SyncRounds
    from gateway.pool.shared import CrossPoolState
    from gateway.telemetry.metrics import RequestMetrics

logger = logging.getLogger("fairgate")

CHANGES_LOGGED_MAX = 20
CHANGES_LISTED_MAX = 1000


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """Result of a reload. `outcome`: changed, unchanged or refused. `why_not`: lines that say why it was refused."""

    outcome: str
    hash: str
    changes: Sequence[str] = ()
    why_not: Sequence[str] = ()


class OperatedGateway(GatewayProcess, Protocol):
    """A gateway as the admin listener sees it."""

    metrics: RequestMetrics
    shared: CrossPoolState
    reloading: Reloader

    @property
    def sync_rounds(self) -> Sequence[SyncRounds]: ...

    @property
    def replicas(self) -> SnapshotSource | None:
        """Source of snapshots of all replicas together; None without other replicas."""

    @property
    def is_running(self) -> bool: ...

    def faults(self) -> list[str]:
        """Return the faults that do not keep the gateway from serving."""

    def reopen_log(self, target: str) -> None: ...
    def reload_certificates(self) -> bool: ...
    async def take_over(self, config: Config) -> None: ...


class Reloader:
    """The reloader of one gateway's config, which exports the result of the last reload as metrics."""

    def __init__(self, gateway: OperatedGateway, load: Callable[[], Config] | None) -> None:
        """Create for a gateway; `load` reads the file anew or raises ConfigError, and is None without a file."""
        self._gateway = gateway
        self._load = load
        self._turn = asyncio.Lock()
        self.hash = config_hash(gateway.config)
        self.succeeded = True
        self.loaded_s = time.time()
        """Time in epoch seconds at which the config in force was read."""
        gateway.metrics.registry.register(self)

    async def run(self) -> ReloadResult:
        """Load, compare, and apply the changes. The access log and the certificate are opened anew in any case."""
        async with self._turn:
            parts: list[object] = []
            reloaded = await self._run(parts)
            await asyncio.to_thread(_free, parts)
        self.succeeded = reloaded.outcome != "refused"
        _log(reloaded)
        return reloaded

    async def _run(self, parts: list[object]) -> ReloadResult:
        """Reload, and add the parts of both configs to `parts`, so that the caller can free the config that is
        dropped."""
        gateway, before = self._gateway, self._gateway.config
        if not gateway.is_running:
            return self._refused([], ["the gateway is starting or ending: try again"])
        try:
            gateway.reopen_log(before.access_log)  # a log that was moved away continues in a new file
        except OSError as error:
            logger.error("the access log cannot be reopened, and its present file stays in use: %s", error)
        gateway.reload_certificates()
        if self._load is None:
            return ReloadResult("unchanged", self.hash, why_not=["there is no file: it was started with --backend"])
        try:
            config, found_hash, words, why_not = await asyncio.to_thread(_load, self._load, before, parts)
        except ConfigError as error:
            return self._refused([], [str(fault) for fault in error.faults])
        if not words:
            self.loaded_s = time.time()
            return ReloadResult("unchanged", self.hash)
        if why_not:
            return self._refused(words, why_not)
        try:
            await gateway.take_over(config)
        except CannotTakeOver as error:
            return self._refused(words, [str(error)])
        self.hash, self.loaded_s = found_hash, time.time()
        return ReloadResult("changed", self.hash, words)

    def _refused(self, found: Sequence[str], why_not: Sequence[str]) -> ReloadResult:
        return ReloadResult("refused", self.hash, found, why_not)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of reloads."""
        yield single("fairgate_config_reload_success", self.succeeded)
        yield single("fairgate_config_reload_timestamp_seconds", self.loaded_s)
        yield family("fairgate_config_info", [([self.hash], 1)])


def _load(load: Callable[[], Config], before: Config, parts: list[object]) -> tuple[Config, str, list[str], list[str]]:
    """Return the loaded config, its hash, its differences from the one in force, and those that need a restart.

    Call it in a thread, since many tenants take seconds.
    """
    config = load()
    for each in (before, config):
        parts += (*each.tenants, each.tenants)
    found = changes(before, config)
    words = [str(one) for one in found[:CHANGES_LISTED_MAX]]
    if len(found) > len(words):
        words.append(f"and {len(found) - len(words)} more")
    fixed = list(needs_restart(before, found, config).items())[:CHANGES_LISTED_MAX]
    return config, config_hash(config), words, [f"{path} {why}: it needs a restart" for path, why in fixed]


def _free(parts: list[object]) -> None:
    """Free the parts one by one. Freeing all at once would stall every thread."""
    while parts:
        parts.pop()


def _log(reloaded: ReloadResult) -> None:
    if reloaded.outcome == "refused":
        logger.error("the config is not reloaded, and the previous one stays in force: %s", "; ".join(reloaded.why_not))
        return
    if reloaded.outcome == "unchanged":
        logger.info("the config has not changed (%s)", reloaded.hash)
        return
    listed, more = reloaded.changes[:CHANGES_LOGGED_MAX], len(reloaded.changes) - CHANGES_LOGGED_MAX
    rest = f"; and {more} more" if more > 0 else ""
    logger.info("the config is reloaded (%s): %s%s", reloaded.hash, "; ".join(listed), rest)
