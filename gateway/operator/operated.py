"""What does the admin listener need of a gateway? All that an operator sees and changes goes through this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gateway.operator.snapshots.snapshot import GatewayProcess, SnapshotSource

if TYPE_CHECKING:
    from gateway.keys.issued import KeyTable
    from gateway.operator.pool_metrics import PoolGauges
    from gateway.pool.replication.news import NewsChannel
    from gateway.pool.replication.ticker import Exchanges
    from gateway.pool.shared import Shared
    from gateway.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What came of it. `outcome`: changed, unchanged or refused; `why_not` says why it was refused, in lines."""

    outcome: str
    hash: str
    changes: Sequence[str] = ()
    why_not: Sequence[str] = ()


class Reloads(Protocol):
    """Who reads the config again."""

    async def run(self) -> Reloaded: ...


class Operated(GatewayProcess, Protocol):
    """A gateway, as its operator has it."""

    metrics: Metrics
    gauges: PoolGauges
    shared: Shared
    keys: KeyTable | None
    """Keys that are made while the gateway runs. None: there is no place for them."""

    @property
    def exchanges(self) -> Sequence[Exchanges]: ...

    @property
    def news(self) -> Sequence[NewsChannel]: ...

    @property
    def replicas(self) -> SnapshotSource | None:
        """All replicas together, if there are others."""

    @property
    def reloading(self) -> Reloads: ...

    def faults(self) -> list[str]:
        """What does not do its work, though traffic may come?"""
