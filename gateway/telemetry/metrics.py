"""What do operators see over time? Prometheus metrics whose labels are bounded.

Tenants are labels of counters only, and only so many of them; histograms are by pool and outcome. Truth about a single
request is in the access log.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from gateway.telemetry.record import Record
from policies.interactions import Interactions

if TYPE_CHECKING:
    from gateway.pool import Pool

__all__ = ["Metrics"]

TENANTS_MAX = 1000
OTHERS = "other"
_WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOTAL_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class _TenantCounters:
    """Children held for one (pool, tenant): looking labels up costs more than counting."""

    __slots__ = ("cached", "input", "output", "requests")

    def __init__(self, metrics: Metrics, pool: str, tenant: str) -> None:
        self.input = metrics.tokens.labels(pool, tenant, "input")
        self.output = metrics.tokens.labels(pool, tenant, "output")
        self.cached = metrics.tokens.labels(pool, tenant, "cached")
        self.requests = {}  # type: dict[str, Counter]


class Metrics:
    """Counted at settle, gauges read when asked for."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.tokens = Counter(
            "fairgate_tokens",
            "Tokens settled, by kind (cached is part of input).",
            ["pool", "tenant", "kind"],
            registry=registry,
        )
        self.requests = Counter(
            "fairgate_requests", "Requests ended.", ["pool", "tenant", "outcome"], registry=registry
        )
        self.reasons = Counter(
            "fairgate_not_completed",
            "Requests that did not complete, by reason.",
            ["pool", "reason"],
            registry=registry,
        )
        self.queue_s = Histogram(
            "fairgate_queue_seconds",
            "Wait before dispatch.",
            ["pool", "outcome"],
            buckets=_WAIT_BUCKETS,
            registry=registry,
        )
        self.first_token_s = Histogram(
            "fairgate_first_token_seconds",
            "Arrival to first token.",
            ["pool"],
            buckets=_WAIT_BUCKETS,
            registry=registry,
        )
        self.total_s = Histogram(
            "fairgate_request_seconds",
            "Arrival to end.",
            ["pool", "outcome"],
            buckets=_TOTAL_BUCKETS,
            registry=registry,
        )
        self.queued = Gauge("fairgate_queued_requests", "Requests waiting.", ["pool"], registry=registry)
        self.queued_bytes = Gauge("fairgate_queued_bytes", "Bytes of bodies waiting.", ["pool"], registry=registry)
        self.dispatched = Gauge(
            "fairgate_dispatched_sequences", "Sequences dispatched.", ["pool", "backend"], registry=registry
        )
        self.starting = Gauge(
            "fairgate_starting_requests", "Dispatched, no first token yet.", ["pool", "backend"], registry=registry
        )
        self.slots = Gauge(
            "fairgate_backend_slots", "Sequences believed to run at once.", ["pool", "backend"], registry=registry
        )
        self.kv = Gauge(
            "fairgate_kv_projected_ratio", "KV expected at most, of capacity.", ["pool", "backend"], registry=registry
        )
        self.overloaded = Gauge(
            "fairgate_overloaded", "1 while new interactions may be refused.", ["pool"], registry=registry
        )
        self.interactions = Gauge("fairgate_open_interactions", "Interactions under way.", registry=registry)
        self.wasted = Counter(
            "fairgate_wasted_tokens", "Tokens spent in interactions that were then cut.", ["tenant"], registry=registry
        )
        self.up = Gauge("fairgate_backend_up", "1 if in service.", ["pool", "backend"], registry=registry)
        self._tenants: dict[tuple[str, str], _TenantCounters] = {}
        self._waste: dict[str, int] = {}
        self._observers: dict[tuple[str, str], tuple[Histogram, Histogram]] = {}

    def ended(self, record: Record) -> None:
        pool, outcome = record.pool, record.outcome.value
        tenant = self._tenant(pool, record.tenant)
        requests = tenant.requests.get(outcome)
        if requests is None:
            requests = tenant.requests[outcome] = self.requests.labels(pool, self._name(record.tenant, pool), outcome)
        requests.inc()
        service = record.service
        if service.prompt or service.output:
            tenant.input.inc(service.prompt)
            tenant.output.inc(service.output)
            if service.cached:
                tenant.cached.inc(service.cached)
        if record.reason:
            self.reasons.labels(pool, record.reason).inc()
        observers = self._observers.get((pool, outcome))
        if observers is None:
            observers = (self.queue_s.labels(pool, outcome), self.total_s.labels(pool, outcome))
            self._observers[(pool, outcome)] = observers
        observers[0].observe(record.queue_s)
        observers[1].observe(record.total_s)
        first_token_s = record.first_token_s
        if first_token_s is not None:
            self.first_token_s.labels(pool).observe(first_token_s)

    def read_gauges(self, pools: Iterable[Pool], interactions: Interactions | None) -> None:
        """Take the engines' state; on the loop, since rendering happens beside it."""
        if interactions is not None:
            self.interactions.set(len(interactions))
            self._read_waste(interactions)
        for pool in pools:
            engine = pool.dispatcher.engine
            self.overloaded.labels(pool.name).set(engine.pressure(pool.dispatcher.clock()).overloaded)
            self.queued.labels(pool.name).set(engine.queued)
            self.queued_bytes.labels(pool.name).set(engine.queued_bytes)
            for name, ledger in engine.backends.items():
                sequences, starting, slots = ledger.counts()
                self.dispatched.labels(pool.name, name).set(sequences)
                self.starting.labels(pool.name, name).set(starting)
                self.slots.labels(pool.name, name).set(slots)
                self.kv.labels(pool.name, name).set(ledger.kv_fraction())
                self.up.labels(pool.name, name).set(ledger.healthy)

    def _read_waste(self, interactions: Interactions) -> None:
        """Also of tenants that wasted nothing: a zero that is shown is what one looks for."""
        known = {tenant for _, tenant in self._tenants}
        for tenant in known:
            self.wasted.labels(tenant)
        for tenant, waste in interactions.wasted.items():
            self.wasted.labels(tenant if tenant in known else OTHERS).inc(waste.tokens - self._waste.get(tenant, 0))
            self._waste[tenant] = waste.tokens

    def render(self) -> bytes:
        """The page. Takes tens of milliseconds with many tenants: not on the loop."""
        return generate_latest(self.registry)

    def _name(self, tenant: str, pool: str) -> str:
        return tenant if (pool, tenant) in self._tenants else OTHERS

    def _tenant(self, pool: str, tenant: str) -> _TenantCounters:
        counters = self._tenants.get((pool, tenant))
        if counters is None:
            if len(self._tenants) >= TENANTS_MAX:
                tenant = OTHERS
            counters = self._tenants.get((pool, tenant))
            if counters is None:
                counters = self._tenants[(pool, tenant)] = _TenantCounters(self, pool, tenant)
        return counters
