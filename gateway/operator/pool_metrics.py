"""Gauges of the pools and of the synchronization with other replicas, read when the metrics page is.

Their labels are bounded as those of the counters in `RequestMetrics`: a tenant without a label there is "other" here.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from prometheus_client.metrics_core import Metric

from gateway.pool.parts import parts_of
from gateway.telemetry.metric_families import Row, family
from gateway.telemetry.metrics import OTHERS, TENANTS_MAX, RequestMetrics, label
from policies.limits.quotas import GROUP, Quotas

if TYPE_CHECKING:
    from gateway.config.model import Config
    from gateway.operator.operated import OperatedGateway
    from gateway.operator.snapshots.recent_sums import Sums
    from gateway.pool.backend import Backend
    from gateway.pool.pool import Pool
    from policies.capacity.ledger import BackendLedger

GROUPS_MAX: Final = 200
Rows = dict[str, list[Row]]


class PoolGauges:
    """Gauges of one gateway. Pools and engines are read on the loop; rendering runs in another thread."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics
        self._rows: Rows = {}
        """Rows of the last read. These tables are replaced as a whole, since `collect` runs in another thread."""
        self._of_tenants: Rows = {}
        self._of_groups: Rows = {}
        self._config: Config | None = None
        """Config from which the groups were read last."""
        self._around: Mapping[str, Sequence[str]] = {}
        """Groups of each tenant that have a label."""
        metrics.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for the registry. Runs in another thread than the loop."""
        for name, rows in (self._rows | self._of_tenants | self._of_groups).items():
            yield family(name, rows)

    def read(self, gateway: OperatedGateway) -> None:
        """Read the state of pools, engines, limits and replicas. Call it on the loop."""
        rows: Rows = defaultdict(list)
        interactions, quotas = gateway.shared.interactions, gateway.shared.quotas
        rows["fairgate_open_interactions"].append(([], 0 if interactions is None else len(interactions)))
        self._read_pools(rows, gateway.pools)
        rows["fairgate_quota_used_ratio"] = [] if quotas is None else self._read_quotas(quotas)
        for each in gateway.sync_rounds:
            rows["fairgate_replica_alone"].append(([each.about], each.schedule.is_alone))
        self._rows = rows
        if gateway.config is not self._config:
            self._read_groups(gateway.config)

    def _read_pools(self, rows: Rows, pools: Iterable[Pool]) -> None:
        labelled = self._metrics.labelled()
        queues, contexts = Counter(dict.fromkeys(labelled, 0)), Counter[tuple[str, ...]]()
        for pool in pools:
            engine, name = pool.dispatcher.engine, pool.name
            queues[name, OTHERS] += 0
            for tenant, waiting in engine.requests.waiting.by_tenant().items():
                queues[label(labelled, (name, tenant), TENANTS_MAX)] += waiting.requests
            for tenant, tokens in engine.working_set.tenants().items():
                contexts[label(labelled, (name, tenant), TENANTS_MAX)] += tokens
            for metric, value in _pool_values(pool).items():
                rows[metric].append(([name], value))
            for outcome, count in engine.requests.expected_waits.counts().items():
                rows["fairgate_expected_waits_total"].append(([name, outcome], count))
            for backend in pool.backends.values():
                of_engine = [name, backend.name]
                rows["fairgate_backend_info"].append(([*of_engine, backend.adapter.name], 1))
                counts = [([*of_engine, kind], tokens) for kind, tokens in backend.prompt_tokens.items()]
                rows["fairgate_backend_prompt_tokens_total"] += counts
                for metric, known in _engine_values(engine.backends[backend.name], backend).items():
                    if known is not None:
                        rows[metric].append((of_engine, known))
        rows["fairgate_queued_requests"] = [*queues.items()]
        rows["fairgate_working_set_tokens"] = [*contexts.items()]

    def _read_quotas(self, quotas: Quotas) -> list[Row]:
        """Return the used part of each limit, for tenants that have a label and for the groups around them."""
        used: dict[tuple[str, str], float] = {}
        for tenant in {tenant for _, tenant in self._metrics.labelled()}:
            for limit, part in quotas.used(tenant, time.monotonic()).items():
                name, _, group = limit.partition(" ")
                used[group[1:-1] or tenant, name] = part
        return [*used.items()]

    def _read_groups(self, config: Config) -> None:
        """Read the part that each group is entitled to if all tenants ask for more."""
        self._config, parts = config, parts_of(config)
        of_each = {group.name: parts[GROUP + group.name] for group in config.groups[:GROUPS_MAX]}
        self._of_groups = {
            "fairgate_group_share": [([name], of.part) for name, of in of_each.items()],
            "fairgate_group_floor": [([name], of.floor) for name, of in of_each.items()],
            "fairgate_group_ceiling": [([name], of.ceiling) for name, of in of_each.items()],
        }
        self._around = {tenant: [name for name in all_ if name in of_each] for tenant, all_ in config.around.items()}

    def read_tenants(self, pools: Mapping[str, Sums]) -> None:
        """Read the service that the tenants of each pool received lately and were due."""
        received, due, of_groups, due_to_groups = (defaultdict[tuple[str, ...], float](float) for _ in range(4))
        labelled = self._metrics.labelled()
        for pool, sums in pools.items():
            for tenant, one in sums.items():
                of = label(labelled, (pool, tenant), TENANTS_MAX)
                received[of] += one.received
                due[of] += one.due
                for group in self._around.get(tenant, ()):
                    of_groups[pool, group] += one.received
                    due_to_groups[pool, group] += one.due
        self._of_tenants = {
            "fairgate_recent_service": [*received.items()],
            "fairgate_recent_service_due": [*due.items()],
            "fairgate_group_service": [*of_groups.items()],
            "fairgate_group_service_due": [*due_to_groups.items()],
        }


def _pool_values(pool: Pool) -> dict[str, float]:
    """Return the value of each metric of a pool."""
    engine, config = pool.dispatcher.engine, pool.config
    requests = engine.requests
    start = {"fairgate_start_seconds": requests.cold_start.usual_s} if config.start_s_max else {}
    return {
        "fairgate_given_back_total": requests.preemption.preempted,
        "fairgate_faults_total": engine.faults,
        "fairgate_overloaded": engine.pressure(pool.dispatcher.clock()).overloaded,
        "fairgate_queued_bytes": engine.queued_bytes,
        "fairgate_wanted_requests": engine.queued + engine.dispatched,
        "fairgate_wanted_tokens": requests.wanted_tokens(),
        **start,
    }


def _engine_values(ledger: BackendLedger, backend: Backend) -> dict[str, float | None]:
    """Return an engine's value of each metric; None if the value is not known."""
    return {
        "fairgate_dispatched_sequences": ledger.sequences,
        "fairgate_backend_slots": ledger.slots.count,
        "fairgate_kv_projected_ratio": ledger.kv_fraction(),
        "fairgate_backend_up": ledger.healthy,
        "fairgate_backend_draining": backend.drained or backend.leaving,
        "fairgate_backend_on_steps": backend.read_by == "steps",
        "fairgate_backend_preemptions_total": ledger.preemptions_total,
    }
