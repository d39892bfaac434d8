"""What do operators see over time? Prometheus metrics whose labels are bounded.

Only so many tenants and models have labels of their own, fewer of them in histograms; the rest are together under
"other". Truth about a single request is in the access log. What is counted for every request is kept in plain numbers,
which become metrics when the page is read: a counter of the client library costs a lock each time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from gateway import BUILD, __version__
from gateway.telemetry.record import Record
from policies.interactions import Interactions

if TYPE_CHECKING:
    from gateway.pool.pool import Pool
    from gateway.pool.replication.news import NewsChannel
    from gateway.pool.replication.ticker import Exchanges
    from gateway.storage.contract import Store
    from gateway.storage.redis.store import RedisStore
    from gateway.telemetry.access_log import AccessLog

__all__ = ["Metrics"]

TENANTS_MAX: Final = 1000
TENANTS_IN_HISTOGRAMS_MAX: Final = 100
MODELS_MAX: Final = 100
OTHERS: Final = "other"

_WAIT_BUCKETS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOTAL_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class _Ended:
    """How many requests of one tally ended in one way, and how long they took. The distributions may be others' too."""

    __slots__ = ("requests", "totals", "waits")

    def __init__(self, waits: _Distribution, totals: _Distribution) -> None:
        self.requests = 0
        self.waits = waits
        self.totals = totals


class _Tally:
    """What one (pool, tenant, model) was given."""

    __slots__ = ("cached", "first_tokens", "input", "model", "output", "tenant", "ways")

    def __init__(self, tenant: str, model: str) -> None:
        self.tenant = tenant
        self.model = model
        self.input = 0
        self.output = 0
        self.cached = 0
        self.ways: dict[str, _Ended] = {}
        """By outcome."""
        self.first_tokens: _Distribution | None = None


class _Prompts:
    """What prompts one (pool, backend) was given, and how right the guess was of what it had cached."""

    __slots__ = ("cached", "expected", "input", "wrong")

    def __init__(self) -> None:
        self.input = 0
        self.cached = 0
        self.expected = 0
        self.wrong = 0
        """Sum of how far each guess was off."""


class _Distribution:
    """How often was a time within each of these bounds?"""

    __slots__ = ("_bounds", "_counts", "_sum_s")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum_s += seconds

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        at_most = accumulate(self._counts)
        buckets = [(bound, float(next(at_most))) for bound in (*map(str, self._bounds), "+Inf")]
        family.add_metric(labels, buckets, self._sum_s)


class Metrics:
    """Counted at settle, gauges read when asked for."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
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
        self.access_log: AccessLog | None = None
        self._tallies: dict[tuple[str, str, str], _Tally] = {}
        """By (pool, tenant, model)."""
        self._models: set[str] = set()
        self._in_histograms: set[tuple[str, str]] = set()
        """Each (pool, tenant) with distributions of its own."""
        self._waits: dict[tuple[str, str, str], _Distribution] = {}
        """By (pool, tenant, outcome)."""
        self._first_tokens: dict[tuple[str, str, str], _Distribution] = {}
        """By (pool, tenant, model)."""
        self._prompts: dict[tuple[str, str], _Prompts] = {}
        """By (pool, backend)."""
        self._reasons: dict[tuple[str, str, str, str], int] = {}
        """By (pool, tenant, outcome, reason)."""
        self._waste: dict[str, int] = {}
        """As it was read last."""
        self._wasted: dict[str, int] = {}
        """By tenant, as it is shown."""
        self._totals: dict[tuple[str, str], _Distribution] = {}
        """By (pool, outcome)."""
        self._held_back: dict[tuple[str, str], _Distribution] = {}
        """By (pool, obstacle): waits of the requests that waited for it."""
        self._queues: list[tuple[str, str, int]] = []
        self._contexts: list[tuple[str, str, int]] = []
        """Pool, tenant, and how much waited when it was read."""
        self._tenants: list[tuple[str, str, float, float]] = []
        self._preemptions: list[tuple[str, str, int]] = []
        self._exchanges: list[tuple[str, str, int]] = []
        self._news: list[tuple[str, str, int]] = []
        registry.register(self)

    def ended(self, record: Record) -> None:
        pool, service = record.pool, record.service
        tally = self._tallies.get((pool, record.tenant, record.model)) or self._new_tally(record)
        way = tally.ways.get(record.outcome) or self._new_way(tally, record)
        way.requests += 1
        way.waits.observe(record.queue_s)
        way.totals.observe(record.total_s)
        tally.input += service.prompt
        tally.output += service.output
        tally.cached += service.cached or 0
        if service.cached is not None:
            self._prompt_ended(record, service.cached)
        if record.reason:
            self._not_completed(record)
        for obstacle, seconds in record.waited_s.items():
            held_back = self._held_back.get((pool, obstacle))
            if held_back is None:
                held_back = self._held_back[(pool, obstacle)] = _Distribution(_WAIT_BUCKETS)
            held_back.observe(seconds)
        first_token_s = record.first_token_s
        if first_token_s is not None:
            if tally.first_tokens is None:
                of = (pool, self._in_histograms_as(pool, tally.tenant), tally.model)
                tally.first_tokens = self._first_tokens.setdefault(of, _Distribution(_WAIT_BUCKETS))
            tally.first_tokens.observe(first_token_s)

    def _prompt_ended(self, record: Record, cached: int) -> None:
        """Only of answers in which an engine says what it found cached."""
        prompts = self._prompts.get((record.pool, record.backend))
        if prompts is None:
            prompts = self._prompts[(record.pool, record.backend)] = _Prompts()
        expected = 0 if record.request is None else record.request.progress.cached_tokens
        prompts.input += record.service.prompt
        prompts.cached += cached
        prompts.expected += expected
        prompts.wrong += abs(expected - cached)

    def refused(self, record: Record) -> None:
        """Before it was known which pool was asked."""
        self._not_completed(record)

    def _not_completed(self, record: Record) -> None:
        key = (record.pool, record.tenant, record.outcome, record.reason)
        count = self._reasons.get(key)
        if count is None and len(self._reasons) >= TENANTS_MAX:
            key = (record.pool, OTHERS, record.outcome, record.reason)
            count = self._reasons.get(key)
        self._reasons[key] = (count or 0) + 1

    def _new_tally(self, record: Record) -> _Tally:
        pool, tenant = record.pool, record.tenant if len(self._tallies) < TENANTS_MAX else OTHERS
        model = self._model(record.model)
        return self._tallies.setdefault((pool, tenant, model), _Tally(tenant, model))

    def _new_way(self, tally: _Tally, record: Record) -> _Ended:
        pool, outcome = record.pool, record.outcome
        of = (pool, self._in_histograms_as(pool, tally.tenant), outcome)
        waits = self._waits.setdefault(of, _Distribution(_WAIT_BUCKETS))
        totals = self._totals.setdefault((pool, outcome), _Distribution(_TOTAL_BUCKETS))
        way = tally.ways[outcome] = _Ended(waits, totals)
        return way

    def _in_histograms_as(self, pool: str, tenant: str) -> str:
        """The tenant, or what stands for it in histograms if there are too many."""
        of = (pool, tenant)
        if of not in self._in_histograms:
            if len(self._in_histograms) >= TENANTS_IN_HISTOGRAMS_MAX:
                return OTHERS
            self._in_histograms.add(of)
        return tenant

    def _model(self, model: str) -> str:
        """The model, or what stands for it if there are too many."""
        if model not in self._models:
            if len(self._models) >= MODELS_MAX:
                return OTHERS
            self._models.add(model)
        return model

    def collect(self) -> Iterator[Metric]:
        """What was counted, as the registry asks for it. Runs beside the loop, so tables are copied in one step."""
        tokens = CounterMetricFamily(
            "fairgate_tokens",
            "Tokens settled, by kind (cached is part of input).",
            labels=["pool", "tenant", "model", "kind"],
        )
        requests = CounterMetricFamily(
            "fairgate_requests", "Requests ended.", labels=["pool", "tenant", "model", "outcome"]
        )
        for (pool, tenant, model), tally in list(self._tallies.items()):
            for kind, count in (("input", tally.input), ("output", tally.output), ("cached", tally.cached)):
                tokens.add_metric([pool, tenant, model, kind], count)
            for outcome, way in list(tally.ways.items()):
                requests.add_metric([pool, tenant, model, outcome], way.requests)
        prompts = CounterMetricFamily(
            "fairgate_backend_prompt_tokens",
            "Prompt tokens settled, by kind (cached is part of input, expected to be cached, wrong by how much).",
            labels=["pool", "backend", "kind"],
        )
        for (pool, backend), sums in list(self._prompts.items()):
            kinds = (("input", sums.input), ("cached", sums.cached), ("expected", sums.expected), ("wrong", sums.wrong))
            for kind, count in kinds:
                prompts.add_metric([pool, backend, kind], count)
        reasons = CounterMetricFamily(
            "fairgate_not_completed",
            "Requests that did not complete, by outcome and reason; what is refused did not fail.",
            labels=["pool", "tenant", "outcome", "reason"],
        )
        for labels, count in list(self._reasons.items()):
            reasons.add_metric(labels, count)
        yield from (tokens, requests, prompts, reasons)
        yield from self._times()
        yield from self._as_read()
        if self.access_log is not None:
            lost = CounterMetricFamily("fairgate_access_log_lines_lost", "Lines that could not be written.")
            lost.add_metric([], self.access_log.lines_lost)
            yield lost
        if self.store is not None:
            shared = GaugeMetricFamily("fairgate_state_shared", "1 while shared with replicas, 0 while on its own.")
            shared.add_metric([], self.store.fault is None)
            yield shared
        if self.redis is not None:
            commands = CounterMetricFamily("fairgate_redis_commands", "Sent to Redis.", labels=["outcome"])
            commands.add_metric(["answered"], self.redis.answered)
            commands.add_metric(["failed"], self.redis.failed)
            yield commands

    def _times(self) -> Iterator[Metric]:
        waits = HistogramMetricFamily(
            "fairgate_queue_seconds", "Wait before dispatch.", labels=["pool", "tenant", "outcome"]
        )
        first = HistogramMetricFamily(
            "fairgate_first_token_seconds", "Arrival to first token.", labels=["pool", "tenant", "model"]
        )
        for family, distributions in ((waits, self._waits), (first, self._first_tokens)):
            for of, distribution in list(distributions.items()):
                distribution.add_to(family, of)
        totals = HistogramMetricFamily("fairgate_request_seconds", "Arrival to end.", labels=["pool", "outcome"])
        for ends, distribution in list(self._totals.items()):
            distribution.add_to(totals, ends)
        obstacles = HistogramMetricFamily(
            "fairgate_held_back_seconds", "Part of the wait, by what it was for.", labels=["pool", "obstacle"]
        )
        for (pool, obstacle), distribution in list(self._held_back.items()):
            distribution.add_to(obstacles, [pool, str(obstacle)])
        yield from (waits, totals, first, obstacles)

    def _as_read(self) -> Iterator[Metric]:
        """What was read on the loop, and this build."""
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
        build = GaugeMetricFamily("fairgate_build_info", "1; the labels say what runs.", labels=["version", "build"])
        build.add_metric([__version__, BUILD], 1)
        yield from (queued, held, received, due, preemptions, wasted, exchanges, news, build)

    def read_gauges(self, pools: Iterable[Pool], interactions: Interactions | None) -> None:
        """Take the engines' state; on the loop, since rendering happens beside it."""
        if interactions is not None:
            self.interactions.set(len(interactions))
            self._read_waste(interactions)
        queues: dict[tuple[str, str], int] = dict.fromkeys(self._shown(), 0)
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
        shown = self._shown()
        for pool in present["pools"]:
            for one in pool["tenants"]:
                of = (pool["pool"], one["tenant"])
                if of not in shown and len(shown) >= TENANTS_MAX:
                    of = (of[0], OTHERS)
                shown.add(of)
                received, due = found.get(of, (0.0, 0.0))
                found[of] = (received + one["service_received"], due + one["service_due"])
        self._tenants = [(*of, *service) for of, service in found.items()]

    def _shown(self) -> set[tuple[str, str]]:
        """Who has been seen: a zero that is shown is what one looks for."""
        return {(pool, tenant) for pool, tenant, _ in list(self._tallies)}

    def forget_backend(self, pool: str, backend: str) -> None:
        """It is no longer there."""
        for gauge in (self.dispatched, self.starting, self.slots, self.kv, self.up, self.on_steps, self.granted):
            gauge.remove_by_labels({"pool": pool, "backend": backend})
        self._prompts.pop((pool, backend), None)

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
            for outcome, count in (("told", each.told), ("heard", each.heard), ("ignored", each.ignored))
        ]

    def _read_waste(self, interactions: Interactions) -> None:
        """Also of tenants that wasted nothing: a zero that is shown is what one looks for."""
        wasted = {tenant: 0 for _, tenant in self._shown()} | self._wasted
        for tenant, waste in interactions.wasted.items():
            shown = tenant if tenant in wasted else OTHERS
            wasted[shown] = wasted.get(shown, 0) + waste.tokens - self._waste.get(tenant, 0)
            self._waste[tenant] = waste.tokens
        self._wasted = wasted

    def render(self) -> bytes:
        """The page. Takes tens of milliseconds with many tenants: not on the loop."""
        return generate_latest(self.registry)
