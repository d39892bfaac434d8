"""What do operators see over time? Prometheus metrics whose labels are bounded.

Beyond TENANTS_MAX combinations of pool, tenant and model, new tenants are counted under "other"; in histograms beyond
TENANTS_IN_HISTOGRAMS_MAX. The truth about a single request is in the access log. Counts are plain numbers that become
metrics when the page is read, since a counter of the client library costs a lock each time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric

from gateway import BUILD, __version__
from gateway.telemetry.metric_families import Row, family
from gateway.telemetry.record import Outcome, RequestRecord

TENANTS_MAX: Final = 1000
TENANTS_IN_HISTOGRAMS_MAX: Final = 100
MODELS_MAX: Final = 100
OTHERS: Final = "other"

_WAIT_BUCKETS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOTAL_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_QUEUE: Final = "fairgate_queue_seconds"
_REQUEST: Final = "fairgate_request_seconds"
_FIRST_TOKEN: Final = "fairgate_first_token_seconds"
_HELD_BACK: Final = "fairgate_held_back_seconds"


@dataclass(slots=True)
class _Totals:
    """Requests of one (pool, tenant, model) that ended with one outcome. Tenants may share distributions."""

    waits: _Distribution
    totals: _Distribution
    first_tokens: _Distribution
    requests: int = 0
    input: int = 0
    output: int = 0
    cached: int = 0
    wasted: int = 0


class _Distribution:
    """A histogram of times."""

    __slots__ = ("_bounds", "_sum_s", "counts")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self._bounds, seconds)] += 1
        self._sum_s += seconds

    def row(self, labels: Sequence[object]) -> Row:
        at_most = accumulate(self.counts)
        buckets = [(bound, float(next(at_most))) for bound in (*map(str, self._bounds), "+Inf")]
        return [str(label) for label in labels], buckets, self._sum_s


class RequestMetrics:
    """Prometheus counters and histograms of ended requests."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._totals: dict[tuple[str, str, str, str], _Totals] = {}
        """Sums by (pool, tenant, model, outcome)."""
        self._tenants: set[tuple[str, ...]] = set()
        """Each (pool, tenant, model) that is counted by name."""
        self._models: set[tuple[str, ...]] = set()
        self._in_histograms: set[tuple[str, ...]] = set()
        """Each (pool, tenant) with distributions of its own."""
        self._distributions: dict[str, dict[tuple[str, ...], _Distribution]] = {
            name: {} for name in (_QUEUE, _REQUEST, _FIRST_TOKEN, _HELD_BACK)
        }
        """Distributions by metric and labels."""
        self._reasons: dict[tuple[str, str, str, str], int] = {}
        """Requests by (pool, tenant, outcome, reason)."""
        self._reasons_of_keys: dict[tuple[str, str, str, str], int] = {}
        """Requests by (tenant, label of the key, outcome, reason)."""
        registry.register(self)

    def settled(self, record: RequestRecord) -> None:
        """Count an ended request; without a pool, only the reason of its refusal."""
        pool, service = record.pool, record.service
        if not pool:
            if record.outcome == Outcome.REFUSED:
                self._refused(record)
            return
        of = (pool, record.tenant, record.model, record.outcome)
        one = self._totals.get(of) or self._new_totals(*of)
        one.requests += 1
        one.waits.observe(record.queue_s)
        one.totals.observe(record.total_s)
        one.input += service.prompt
        one.output += service.output
        one.cached += service.cached or 0
        if record.reason:
            self._refused(record)
            if record.request is not None:
                one.wasted += record.request.progress.wasted_tokens
        for obstacle, seconds in record.waited_s.items():
            self._distribution(_HELD_BACK, (pool, obstacle)).observe(seconds)
        if record.first_token_s is not None:
            one.first_tokens.observe(record.first_token_s)

    def _refused(self, record: RequestRecord) -> None:
        """Count the reason of a request that did not complete. Nothing else is counted if no pool was found for it."""
        outcome, reason = record.outcome, record.reason
        _count(self._reasons, (record.pool, record.tenant, outcome, reason), (record.pool, OTHERS, outcome, reason))
        if record.key:
            key = (record.tenant, record.key, outcome, reason)
            _count(self._reasons_of_keys, key, (OTHERS, OTHERS, outcome, reason))

    def _new_totals(self, pool: str, tenant: str, model: str, outcome: str) -> _Totals:
        """Add the sums of a (pool, tenant, model, outcome) that was not seen before. Names beyond the bounds become
        `OTHERS`."""
        [model] = label(self._models, (model,), MODELS_MAX)
        if (pool, tenant, model) != label(self._tenants, (pool, tenant, model), TENANTS_MAX):
            tenant = OTHERS
        whose = label(self._in_histograms, (pool, tenant), TENANTS_IN_HISTOGRAMS_MAX)[-1]
        waits = self._distribution(_QUEUE, (pool, whose, outcome))
        totals = self._distribution(_REQUEST, (pool, outcome))
        one = _Totals(waits, totals, self._distribution(_FIRST_TOKEN, (pool, whose, model)))
        return self._totals.setdefault((pool, tenant, model, outcome), one)

    def _distribution(self, name: str, labels: tuple[str, ...]) -> _Distribution:
        """Return the distribution with these labels, a new one at first."""
        by = self._distributions[name]
        bounds = _TOTAL_BUCKETS if name == _REQUEST else _WAIT_BUCKETS
        return by.get(labels) or by.setdefault(labels, _Distribution(bounds))

    def collect(self) -> Iterator[Metric]:
        """Yield the counts for the registry. Runs in another thread than the loop, so tables are copied in one step."""
        totals = list(self._totals.items())
        tokens, wasted = Counter[tuple[str, ...]](), Counter[str]()
        for (pool, tenant, model, _), one in totals:
            wasted[tenant] += one.wasted
            for kind in ("input", "output", "cached"):
                tokens[pool, tenant, model, kind] += getattr(one, kind)
        yield family("fairgate_tokens_total", tokens.items())
        yield family("fairgate_requests_total", [(of, one.requests) for of, one in totals])
        yield family("fairgate_wasted_tokens_total", [([tenant], count) for tenant, count in wasted.items()])
        yield family("fairgate_not_completed_total", list(self._reasons.items()))
        yield family("fairgate_key_not_completed_total", list(self._reasons_of_keys.items()))
        for name, by in self._distributions.items():
            yield family(name, [one.row(labels) for labels, one in list(by.items()) if any(one.counts)])
        yield family("fairgate_build_info", [([__version__, BUILD], 1)])

    def labelled(self) -> set[tuple[str, ...]]:
        """Return each (pool, tenant) with a label, for which other metrics show a zero, too."""
        return {(pool, tenant) for pool, tenant, _, _ in list(self._totals)}


def _count(counts: dict[tuple[str, str, str, str], int], labels: tuple[str, str, str, str], others: Any) -> None:
    """Add 1 under these labels, or under `others` if there are too many labels."""
    if labels not in counts and len(counts) >= TENANTS_MAX:
        labels = others
    counts[labels] = counts.get(labels, 0) + 1


def label(known: set[tuple[str, ...]], labels: tuple[str, ...], most: int) -> tuple[str, ...]:
    """Return these labels, or `OTHERS` in place of the last one if there are too many."""
    if labels not in known:
        if len(known) >= most:
            return (*labels[:-1], OTHERS)
        known.add(labels)
    return labels
