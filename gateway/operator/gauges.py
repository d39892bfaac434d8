"""How does it stand at the pools and with other replicas? Gauges of the page of metrics, read whenever it is asked for.

Labels are bounded as the labels of the counters in `Metrics`: a tenant without a label there is under "other" here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import Gauge
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.telemetry.metrics import OTHERS, TENANTS_MAX, Metrics
from policies.interactions import Interactions

if TYPE_CHECKING:
    from gateway.pool.pool import Pool
    from gateway.pool.replication.news import NewsChannel
    from gateway.pool.replication.ticker import Exchanges
    from gateway.storage.contract import Store
    from gateway.storage.redis.store import RedisStore

__all__ = ["PoolGauges"]


class PoolGauges:
    """Of one gateway. What engines say is taken on the loop, since rendering happens beside it."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        registry = metrics.registry
        self.queued_bytes = Gauge("fairgate_queued_bytes", "Bytes of bodies waiting.", ["pool"], registry=registry)
        each = ["pool", "backend"]
        self.dispatched = Gauge("fairgate_dispatched_sequences", "Sequences dispatched.", each, registry=registry)
        self.starting = Gauge("fairgate_starting_requests", "Dispatched, no first token yet.", each, registry=registry)
        self.slots = Gauge("fairgate_backend_slots", "Sequences believed to run at once.", each, registry=registry)
        self.kv = Gauge("fairgate_kv_projected_ratio", "KV expected at most, of capacity.", each, registry=registry)
        self.overloaded = Gauge(
            "fairgate_overloaded", "1 while new interactions may be refused.", ["pool"], registry=registry
        )
        self.interactions = Gauge("fairgate_open_interactions", "Interactions under way.", registry=registry)
        self.up = Gauge("fairgate_backend_up", "1 if in service.", each, registry=registry)
        self.on_steps = Gauge("fairgate_backend_on_steps", "1 if on steps.", each, registry=registry)
        self.granted = Gauge(
            "fairgate_granted_sequences", "Of the backend, this replica's own.", each, registry=registry
        )
        self.alone = Gauge("fairgate_replica_alone", "1 while others cannot be heard.", ["about"], registry=registry)
        self.store: Store | None = None
        """What replicas share, if they do."""
        self.redis: RedisStore | None = None
        """The same, if it is in Redis."""
        self._waste: dict[str, int] = {}
        """As it was read last."""
        self._wasted: dict[str, int] = {}
        """By tenant, as it is shown."""
        self._queues: list[tuple[str, str, int]] = []
        self._contexts: list[tuple[str, str, int]] = []
        """Pool, tenant, and how much waited when it was read."""
        self._tenants: list[tuple[str, str, float, float]] = []
        self._preemptions: list[tuple[str, str, int]] = []
        self._exchanges: list[tuple[str, str, int]] = []
        self._news: list[tuple[str, str, int]] = []
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """As the registry asks for it. Runs beside the loop."""
        yield from self._as_read()
        if self.store is not None:
            shared = GaugeMetricFamily("fairgate_state_shared", "1 while shared with replicas, 0 while on its own.")
            shared.add_metric([], self.store.fault is None)
            yield shared
        if self.redis is not None:
            commands = CounterMetricFamily("fairgate_redis_commands", "Sent to Redis.", labels=["outcome"])
            commands.add_metric(["answered"], self.redis.answered)
            commands.add_metric(["failed"], self.redis.failed)
            yield commands

    def _as_read(self) -> Iterator[Metric]:
        queued = GaugeMetricFamily("fairgate_queued_requests", "Requests waiting.", labels=["pool", "tenant"])
        held = GaugeMetricFamily(
            "fairgate_working_set_tokens", "Contexts of interactions under way.", labels=["pool", "tenant"]
        )
        for family, counts in ((queued, self._queues), (held, self._contexts)):
            for pool, tenant, count in counts:
                family.add_metric([pool, tenant], count)
        received = GaugeMetricFamily(
            "fairgate_recent_service", "Service received within the last minute.", labels=["pool", "tenant"]
        )
        due = GaugeMetricFamily(
            "fairgate_recent_service_due", "What each was due of it, by weight.", labels=["pool", "tenant"]
        )
        for pool, tenant, service, service_due in self._tenants:
            received.add_metric([pool, tenant], service)
            due.add_metric([pool, tenant], service_due)
        preemptions = CounterMetricFamily(
            "fairgate_backend_preemptions", "Preemptions, as the engine says.", labels=["pool", "backend"]
        )
        for pool, backend, count in self._preemptions:
            preemptions.add_metric([pool, backend], count)
        wasted = CounterMetricFamily(
            "fairgate_wasted_tokens", "Tokens spent in interactions that were then cut.", labels=["tenant"]
        )
        for tenant, tokens in self._wasted.items():
            wasted.add_metric([tenant], tokens)
        exchanges = CounterMetricFamily(
            "fairgate_replica_exchanges", "Exchanges with other replicas.", labels=["about", "outcome"]
        )
        for about, outcome, count in self._exchanges:
            exchanges.add_metric([about, outcome], count)
        news = CounterMetricFamily(
            "fairgate_replica_news", "Messages about prompts that were sent.", labels=["pool", "outcome"]
        )
        for pool, outcome, count in self._news:
            news.add_metric([pool, outcome], count)
        yield from (queued, held, received, due, preemptions, wasted, exchanges, news)

    def read(self, pools: Iterable[Pool], interactions: Interactions | None) -> None:
        """Take the engines' state; on the loop, since rendering happens beside it."""
        if interactions is not None:
            self.interactions.set(len(interactions))
            self._read_waste(interactions)
        queues: dict[tuple[str, str], int] = dict.fromkeys(self._metrics.shown(), 0)
        preemptions = []
        contexts: dict[tuple[str, str], int] = {}
        for pool in pools:
            engine = pool.dispatcher.engine
            queues.setdefault((pool.name, OTHERS), 0)
            self.overloaded.labels(pool.name).set(engine.pressure(pool.dispatcher.clock()).overloaded)
            for tenant, waiting in engine.books.waiting.by_tenant().items():
                of = (
                    (pool.name, tenant)
                    if (pool.name, tenant) in queues or len(queues) < TENANTS_MAX
                    else (pool.name, OTHERS)
                )
                queues[of] = queues.get(of, 0) + waiting.requests
            for tenant, tokens in engine.working_set.tenants().items():
                of = (pool.name, tenant if (pool.name, tenant) in queues else OTHERS)
                contexts[of] = contexts.get(of, 0) + tokens
            self.queued_bytes.labels(pool.name).set(engine.queued_bytes)
            for name, ledger in engine.backends.items():
                self.dispatched.labels(pool.name, name).set(ledger.sequences)
                self.starting.labels(pool.name, name).set(len(ledger.starting))
                self.slots.labels(pool.name, name).set(ledger.slots.count)
                self.kv.labels(pool.name, name).set(ledger.kv_fraction())
                self.up.labels(pool.name, name).set(ledger.healthy)
                backend = pool.backends.get(name)
                self.on_steps.labels(pool.name, name).set(backend is not None and backend.read_by == "steps")
                if ledger.preemptions_total is not None:
                    preemptions.append((pool.name, name, ledger.preemptions_total))
                if ledger.allowance is not None:
                    self.granted.labels(pool.name, name).set(ledger.allowance.sequences)
        self._queues = [(pool_name, tenant, count) for (pool_name, tenant), count in queues.items()]
        self._preemptions, self._contexts = preemptions, [(*of, tokens) for of, tokens in contexts.items()]

    def read_tenants(self, present: Mapping[str, Any]) -> None:
        """Who received how much just now, and was due how much? As `/tenants` answers, of the busiest."""
        found: dict[tuple[str, str], tuple[float, float]] = {}
        shown = self._metrics.shown()
        for pool in present["pools"]:
            for one in pool["tenants"]:
                of = (pool["pool"], one["tenant"])
                if of not in shown and len(shown) >= TENANTS_MAX:
                    of = (of[0], OTHERS)
                shown.add(of)
                received, due = found.get(of, (0.0, 0.0))
                found[of] = (received + one["service_received"], due + one["service_due"])
        self._tenants = [(*of, *service) for of, service in found.items()]

    def forget_backend(self, pool: str, backend: str) -> None:
        """It is no longer there."""
        for gauge in (self.dispatched, self.starting, self.slots, self.kv, self.up, self.on_steps, self.granted):
            gauge.remove_by_labels({"pool": pool, "backend": backend})
        self._metrics.forget_backend(pool, backend)

    def read_exchanges(self, exchanges: Iterable[Exchanges]) -> None:
        """How is it with other replicas?"""
        found = []
        for each in exchanges:
            self.alone.labels(each.about).set(each.is_alone)
            found += [(each.about, "answered", each.answered), (each.about, "lost", each.lost)]
        self._exchanges = found

    def read_news(self, channels: Iterable[NewsChannel]) -> None:
        """What do gateways tell each other of the prompts that they sent?"""
        self._news = [
            (each.pool, outcome, count)
            for each in channels
            for outcome, count in (("told", each.sent), ("heard", each.received), ("ignored", each.ignored))
        ]

    def _read_waste(self, interactions: Interactions) -> None:
        """Also of tenants that wasted nothing: a zero that is shown is what one looks for."""
        wasted = {tenant: 0 for _, tenant in self._metrics.shown()} | self._wasted
        for tenant, waste in interactions.wasted.items():
            shown = tenant if tenant in wasted else OTHERS
            wasted[shown] = wasted.get(shown, 0) + waste.tokens - self._waste.get(tenant, 0)
            self._waste[tenant] = waste.tokens
        self._wasted = wasted
