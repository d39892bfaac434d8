"""What do operators see over time? Prometheus metrics whose labels are bounded.

Tenants are labels of counters only, and only so many of them; histograms are by pool and outcome. Truth about a single
request is in the access log. What is counted for every request is kept in plain numbers, which become metrics when the
page is read: a counter of the client library costs a lock each time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from gateway.telemetry.record import Record
from policies.interactions import Interactions

if TYPE_CHECKING:
    from gateway.pool.pool import Pool
    from gateway.redis.news import NewsChannel
    from gateway.redis.store import Store
    from gateway.redis.ticker import Exchanges
    from gateway.telemetry.access_log import AccessLog

__all__ = ["Metrics"]

TENANTS_MAX: Final = 1000
OTHERS: Final = "other"
_WAIT_BUCKETS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOTAL_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class _Tally:
    """What one (pool, tenant) was given."""

    __slots__ = ("cached", "input", "output", "requests")

    def __init__(self) -> None:
        self.input = 0
        self.output = 0
        self.cached = 0
        self.requests: dict[str, int] = {}
        """By outcome."""


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
        self.granted = Gauge(
            "fairgate_granted_sequences", "Of the backend, this replica's own.", ["pool", "backend"], registry=registry
        )
        self.alone = Gauge(
            "fairgate_replica_alone", "1 while other replicas cannot be heard.", ["about"], registry=registry
        )
        self.exchanges = Gauge(
            "fairgate_replica_exchanges", "With other replicas, so far.", ["about", "outcome"], registry=registry
        )
        self.news = Gauge(
            "fairgate_replica_news", "Messages about prompts that were sent.", ["pool", "outcome"], registry=registry
        )
        self.store: Store | None = None
        """What replicas share, if they do."""
        self.access_log: AccessLog | None = None
        self._tallies: dict[tuple[str, str], _Tally] = {}
        self._prompts: dict[tuple[str, str], _Prompts] = {}
        """By (pool, backend)."""
        self._reasons: dict[tuple[str, str], int] = {}
        self._waste: dict[str, int] = {}
        self._times: dict[tuple[str, str], tuple[_Distribution, _Distribution]] = {}
        """By (pool, outcome): waits before dispatch, and times in all."""
        self._first_tokens: dict[str, _Distribution] = {}
        self._held_back: dict[tuple[str, str], _Distribution] = {}
        """By (pool, obstacle): waits of the requests that waited for it."""
        registry.register(self)

    def ended(self, record: Record) -> None:
        pool, outcome, reason, service = record.pool, record.outcome, record.reason, record.service
        tally = self._tallies.get((pool, record.tenant)) or self._new_tally(pool, record.tenant)
        tally.requests[outcome] = tally.requests.get(outcome, 0) + 1
        tally.input += service.prompt
        tally.output += service.output
        tally.cached += service.cached or 0
        if service.cached is not None:
            self._prompt_ended(record, service.cached)
        if reason:
            self._reasons[(pool, reason)] = self._reasons.get((pool, reason), 0) + 1
        times = self._times.get((pool, outcome))
        if times is None:
            times = self._times[(pool, outcome)] = (_Distribution(_WAIT_BUCKETS), _Distribution(_TOTAL_BUCKETS))
        times[0].observe(record.queue_s)
        times[1].observe(record.total_s)
        for obstacle, seconds in record.waited_s.items():
            held_back = self._held_back.get((pool, obstacle))
            if held_back is None:
                held_back = self._held_back[(pool, obstacle)] = _Distribution(_WAIT_BUCKETS)
            held_back.observe(seconds)
        first_token_s = record.first_token_s
        if first_token_s is not None:
            first_tokens = self._first_tokens.get(pool)
            if first_tokens is None:
                first_tokens = self._first_tokens[pool] = _Distribution(_WAIT_BUCKETS)
            first_tokens.observe(first_token_s)

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

    def refused(self, reason: str) -> None:
        """Before it was known which pool was asked."""
        self._reasons[("", reason)] = self._reasons.get(("", reason), 0) + 1

    def _new_tally(self, pool: str, tenant: str) -> _Tally:
        if len(self._tallies) >= TENANTS_MAX:
            tenant = OTHERS
        return self._tallies.setdefault((pool, tenant), _Tally())

    def collect(self) -> Iterator[Metric]:
        """What was counted, as the registry asks for it. Runs beside the loop, so tables are copied in one step."""
        tokens = CounterMetricFamily(
            "fairgate_tokens",
            "Tokens settled, by kind (cached is part of input).",
            labels=["pool", "tenant", "kind"],
        )
        requests = CounterMetricFamily("fairgate_requests", "Requests ended.", labels=["pool", "tenant", "outcome"])
        for (pool, tenant), tally in list(self._tallies.items()):
            for kind, count in (("input", tally.input), ("output", tally.output), ("cached", tally.cached)):
                tokens.add_metric([pool, tenant, kind], count)
            for outcome, count in list(tally.requests.items()):
                requests.add_metric([pool, tenant, outcome], count)
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
            "fairgate_not_completed", "Requests that did not complete, by reason.", labels=["pool", "reason"]
        )
        for (pool, reason), count in list(self._reasons.items()):
            reasons.add_metric([pool, reason], count)
        waits = HistogramMetricFamily("fairgate_queue_seconds", "Wait before dispatch.", labels=["pool", "outcome"])
        totals = HistogramMetricFamily("fairgate_request_seconds", "Arrival to end.", labels=["pool", "outcome"])
        for labels, (wait, total) in list(self._times.items()):
            wait.add_to(waits, labels)
            total.add_to(totals, labels)
        first = HistogramMetricFamily("fairgate_first_token_seconds", "Arrival to first token.", labels=["pool"])
        for pool, distribution in list(self._first_tokens.items()):
            distribution.add_to(first, [pool])
        obstacles = HistogramMetricFamily(
            "fairgate_held_back_seconds", "Part of the wait, by what it was for.", labels=["pool", "obstacle"]
        )
        for (pool, obstacle), distribution in list(self._held_back.items()):
            distribution.add_to(obstacles, [pool, str(obstacle)])
        yield from (tokens, requests, prompts, reasons, waits, totals, first, obstacles)
        if self.access_log is not None:
            lost = CounterMetricFamily("fairgate_access_log_lines_lost", "Lines that could not be written.")
            lost.add_metric([], self.access_log.lines_lost)
            yield lost
        if self.store is not None:
            shared = GaugeMetricFamily("fairgate_state_shared", "1 while Redis can be asked, 0 while on its own.")
            shared.add_metric([], self.store.fault is None)
            commands = CounterMetricFamily("fairgate_redis_commands", "Sent to Redis.", labels=["outcome"])
            commands.add_metric(["answered"], self.store.answered)
            commands.add_metric(["failed"], self.store.failed)
            yield from (shared, commands)

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
                self.dispatched.labels(pool.name, name).set(ledger.sequences)
                self.starting.labels(pool.name, name).set(len(ledger.starting))
                self.slots.labels(pool.name, name).set(ledger.slots.count)
                self.kv.labels(pool.name, name).set(ledger.kv_fraction())
                self.up.labels(pool.name, name).set(ledger.healthy)
                if ledger.allowance is not None:
                    self.granted.labels(pool.name, name).set(ledger.allowance.sequences)

    def read_exchanges(self, exchanges: Iterable[Exchanges]) -> None:
        """How is it with other replicas?"""
        for each in exchanges:
            self.alone.labels(each.about).set(each.is_alone)
            self.exchanges.labels(each.about, "answered").set(each.answered)
            self.exchanges.labels(each.about, "lost").set(each.lost)

    def read_news(self, channels: Iterable[NewsChannel]) -> None:
        """What do gateways tell each other of the prompts that they sent?"""
        for each in channels:
            self.news.labels(each.pool, "told").set(each.told)
            self.news.labels(each.pool, "heard").set(each.heard)
            self.news.labels(each.pool, "ignored").set(each.ignored)

    def _read_waste(self, interactions: Interactions) -> None:
        """Also of tenants that wasted nothing: a zero that is shown is what one looks for."""
        known = {tenant for _, tenant in self._tallies}
        for tenant in known:
            self.wasted.labels(tenant)
        for tenant, waste in interactions.wasted.items():
            self.wasted.labels(tenant if tenant in known else OTHERS).inc(waste.tokens - self._waste.get(tenant, 0))
            self._waste[tenant] = waste.tokens

    def render(self) -> bytes:
        """The page. Takes tens of milliseconds with many tenants: not on the loop."""
        return generate_latest(self.registry)
