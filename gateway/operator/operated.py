"""What does the admin listener need of a gateway? The interface by which an operator sees and changes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gateway.operator.snapshots.snapshot import GatewayProcess, SnapshotSource

if TYPE_CHECKING:
    from gateway.pool.replication.ticker import SyncRounds
    from gateway.pool.shared import Shared
    from gateway.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """Result of a reload. `outcome`: changed, unchanged or refused. `why_not`: lines that say why it was refused."""

    outcome: str
    hash: str
    changes: Sequence[str] = ()
    why_not: Sequence[str] = ()


class Reloads(Protocol):
    """Runner of config reloads."""

    async def run(self) -> ReloadResult: ...


class OperatedGateway(GatewayProcess, Protocol):
    """A gateway as the admin listener sees it."""

    metrics: Metrics
    shared: Shared

    @property
    def sync_rounds(self) -> Sequence[SyncRounds]: ...

    @property
    def replicas(self) -> SnapshotSource | None:
        """Source of snapshots of all replicas together; None without other replicas."""

    @property
    def reloading(self) -> Reloads: ...

    def faults(self) -> list[str]:
        """Return the faults of parts that do not work, though traffic may come."""
