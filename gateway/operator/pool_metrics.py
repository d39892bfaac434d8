"""Gauges of the pools and of the synchronization with other replicas, read when the metrics page is.

Their labels are bounded as the labels of the counters in `Metrics`: a tenant without a label there is "other" here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.metrics_core import Metric

from gateway.pool.parts import parts_of
from gateway.telemetry.metric_families import Row, family, single
from gateway.telemetry.metrics import OTHERS, TENANTS_MAX, Metrics
from policies.interactions import Interactions
from policies.limits.quotas import GROUP, Quotas
from policies.request import BATCH

if TYPE_CHECKING:
    from gateway.config.model import Config
    from gateway.pool.pool import Pool
    from gateway.pool.replication.news import NewsChannel
    from gateway.pool.replication.ticker import Exchanges
    from gateway.storage.redis.redis_store import RedisStore
    from gateway.storage.store import Store

GROUPS_MAX: Final = 200
"""Limit on groups with a label."""
Rows = dict[str, list[Row]]
"""Rows by the name of the metric."""


class PoolGauges:
    """Gauges of one gateway. Pools and engines are read on the loop; rendering runs in another thread."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.store: Store | None = None
        """Store that replicas share; None if there is none."""
        self.redis: RedisStore | None = None
        """The store if it is in Redis, else None."""
        self._of_pools: Rows = {}
        """Rows of the last read. These five tables are replaced as a whole, since `collect` runs in another thread."""
        self._of_replicas: Rows = {}
        self._of_tenants: Rows = {}
        self._of_quotas: Rows = {}
        self._of_groups: Rows = {}
        self._config: Config | None = None
        """Config from which the groups were read last."""
        self._around: Mapping[str, Sequence[str]] = {}
        """Groups of each tenant that have a label."""
        self._waste: dict[str, int] = {}
        """Wasted tokens by tenant, as of the last read."""
        self._wasted: dict[str, int] = {}
        """Wasted tokens by label."""
        metrics.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for the registry. Runs in another thread than the loop."""
        of_all = (self._of_pools, self._of_replicas, self._of_tenants, self._of_quotas, self._of_groups)
        for name, rows in chain.from_iterable([each.items() for each in of_all]):
            yield family(name, rows)
        if self.store is not None:
            yield single("fairgate_state_shared", self.store.fault is None)
        if self.redis is not None:
            commands = [(["answered"], self.redis.answered), (["failed"], self.redis.failed)]
            yield family("fairgate_redis_commands_total", commands)

    def read(self, pools: Iterable[Pool], interactions: Interactions | None) -> None:
        """Read the state of pools and engines. Call it on the loop."""
        rows: Rows = defaultdict(list)
        rows["fairgate_open_interactions"].append(([], 0 if interactions is None else len(interactions)))
        rows["fairgate_wasted_tokens_total"] = [] if interactions is None else self._read_waste(interactions)
        queues: dict[tuple[str, str], int] = dict.fromkeys(self._metrics.labelled(), 0)
        contexts: dict[tuple[str, str], int] = {}
        for pool in pools:
            engine = pool.dispatcher.engine
            queues.setdefault((pool.name, OTHERS), 0)
            for tenant, waiting in engine.requests.waiting.by_tenant().items():
                has_label = (pool.name, tenant) in queues or len(queues) < TENANTS_MAX
                of = (pool.name, tenant if has_label else OTHERS)
                queues[of] = queues.get(of, 0) + waiting.requests
            for tenant, tokens in engine.working_set.tenants().items():
                of = (pool.name, tenant if (pool.name, tenant) in queues else OTHERS)
                contexts[of] = contexts.get(of, 0) + tokens
            preemption = engine.requests.preemption
            rows["fairgate_given_back_total"].append(([pool.name], preemption.preempted))
            rows["fairgate_given_back_tokens_total"].append(([pool.name], preemption.wasted_tokens))
            rows["fairgate_faults_total"].append(([pool.name], engine.faults))
            for outcome, count in engine.requests.expected_waits.counts().items():
                rows["fairgate_expected_waits_total"].append(([pool.name, outcome], count))
            overloaded = engine.pressure(pool.dispatcher.clock()).overloaded
            rows["fairgate_overloaded"].append(([pool.name], overloaded))
            rows["fairgate_queued_bytes"].append(([pool.name], engine.queued_bytes))
            rows["fairgate_wanted_requests"].append(([pool.name], engine.queued + engine.dispatched))
            rows["fairgate_wanted_tokens"].append(([pool.name], engine.requests.wanted_tokens()))
            if pool.config.start_s_max:
                rows["fairgate_start_seconds"].append(([pool.name], engine.requests.engine_start.usual_s))
            for backend in pool.backends.values():
                rows["fairgate_backend_info"].append(([pool.name, backend.name, backend.adapter.name], 1))
            for engine_name, values in _of_engines(pool):
                for name, value in values.items():
                    if value is not None:
                        rows[name].append(([pool.name, engine_name], value))
        rows["fairgate_queued_requests"] = [*queues.items()]
        rows["fairgate_working_set_tokens"] = [*contexts.items()]
        self._of_pools = rows

    def read_quotas(self, quotas: Quotas | None, now: float) -> None:
        """Read the used part of each limit, for tenants that have a label and for the groups around them."""
        used: dict[tuple[str, str], float] = {}
        for tenant in {tenant for _, tenant in self._metrics.labelled()} if quotas is not None else ():
            for limit, part in quotas.used(tenant, now).items() if quotas is not None else ():
                name, _, group = limit.partition(" ")
                used[group[1:-1] or tenant, name] = part
        self._of_quotas = {"fairgate_quota_used_ratio": [*used.items()]}

    def read_groups(self, config: Config) -> None:
        """Read the part that each group is entitled to if all tenants ask for more."""
        if config is self._config:
            return
        self._config = config
        parts = parts_of(config)
        of_each = [(group.name, parts[GROUP + group.name]) for group in config.groups[:GROUPS_MAX]]
        rows: Rows = {
            "fairgate_group_share": [([name], of.part) for name, of in of_each],
            "fairgate_group_floor": [([name], of.floor) for name, of in of_each],
            "fairgate_group_ceiling": [([name], of.ceiling) for name, of in of_each],
        }
        self._of_groups = rows
        named = {group.name for group in config.groups[:GROUPS_MAX]}
        self._around = {tenant: [name for name in groups if name in named] for tenant, groups in config.around.items()}

    def read_tenants(self, present: Mapping[str, Any]) -> None:
        """Read the service that the busiest tenants received lately and were due, from the document of `/state`."""
        received: dict[tuple[str, str], float] = {}
        due: dict[tuple[str, str], float] = {}
        of_groups: dict[tuple[str, str], list[float]] = {}
        labelled = self._metrics.labelled()
        for pool in present["pools"]:
            for one in pool["tenants"]:
                of = (pool["pool"], one["tenant"])
                if of not in labelled and len(labelled) >= TENANTS_MAX:
                    of = (of[0], OTHERS)
                labelled.add(of)
                for group in self._around.get(one["tenant"].removesuffix(BATCH), ()):
                    sums = of_groups.setdefault((pool["pool"], group), [0.0, 0.0])
                    sums[0] += one["service_received"]
                    sums[1] += one["service_due"]
                received[of] = received.get(of, 0.0) + one["service_received"]
                due[of] = due.get(of, 0.0) + one["service_due"]
        self._of_tenants = {
            "fairgate_recent_service": [*received.items()],
            "fairgate_recent_service_due": [*due.items()],
            "fairgate_group_service": [(of, sums[0]) for of, sums in of_groups.items()],
            "fairgate_group_service_due": [(of, sums[1]) for of, sums in of_groups.items()],
        }

    def read_exchanges(self, exchanges: Iterable[Exchanges], channels: Iterable[NewsChannel]) -> None:
        """Read the counts of sync rounds and of messages about prompts, to and from other replicas."""
        rows: Rows = defaultdict(list)
        for each in exchanges:
            rows["fairgate_replica_alone"].append(([each.about], each.is_alone))
            for outcome, count in (("answered", each.answered), ("lost", each.lost)):
                rows["fairgate_replica_exchanges_total"].append(([each.about, outcome], count))
        for channel in channels:
            for outcome in ("sent", "received", "ignored"):
                rows["fairgate_replica_news_total"].append(([channel.pool, outcome], getattr(channel, outcome)))
        self._of_replicas = rows

    def _read_waste(self, interactions: Interactions) -> list[Row]:
        """Return the wasted tokens by label, with a zero for each labelled tenant that wasted nothing."""
        wasted = {tenant: 0 for _, tenant in self._metrics.labelled()} | self._wasted
        for tenant, waste in interactions.wasted.items():
            labelled = tenant if tenant in wasted else OTHERS
            wasted[labelled] = wasted.get(labelled, 0) + waste.tokens - self._waste.get(tenant, 0)
            self._waste[tenant] = waste.tokens
        self._wasted = wasted
        return [([tenant], tokens) for tenant, tokens in wasted.items()]


def _of_engines(pool: Pool) -> Iterator[tuple[str, dict[str, float | None]]]:
    """Yield each engine's name and its value of each metric; None if the value is not known."""
    for name, ledger in pool.dispatcher.engine.backends.items():
        backend, granted = pool.backends.get(name), ledger.allowance
        yield (
            name,
            {
                "fairgate_dispatched_sequences": ledger.sequences,
                "fairgate_starting_requests": len(ledger.starting),
                "fairgate_backend_slots": ledger.slots.count,
                "fairgate_kv_projected_ratio": ledger.kv_fraction(),
                "fairgate_backend_up": ledger.healthy,
                "fairgate_backend_on_steps": backend is not None and backend.read_by == "steps",
                "fairgate_granted_sequences": None if granted is None else granted.sequences,
                "fairgate_backend_preemptions_total": ledger.preemptions_total,
            },
        )
