"""A kind of engine: its gauges, its refusals, facts that no gauge reports, and its limitations.

`Adapter` itself knows what every server of the OpenAI API has in common. A kind of engine is a subclass in this folder,
a row in `engines.kinds` and a name in `EngineKind` of the config. Nothing else asks which kind an engine is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from backends.promtext import Sample, lines_of, samples
from policies.capacity.gauges import Gauges

VALUE_MAX: Final = 1e15
"""Gauges beyond this bound are ignored."""
Metrics = Mapping[str, tuple[str, ...]]
"""Names of metrics by field of `Gauges`."""
SLOTS_LEARNED: Final = (
    "does not report how many requests it runs at once, so that is learned unless max_num_seqs says it"
)
CACHE_SHARED: Final = (
    "lets tenants share its prompt cache, so the time to a first token can tell what another has asked"
)
KV_SIZE_UNKNOWN: Final = "reports how full its KV cache is, and not how large"
"""Gaps of several kinds of engine."""
UNREADABLE: Final = (ValueError, TypeError, LookupError, AttributeError)
"""Errors raised by reading an answer of an unexpected form."""


class Adapter:
    """A kind of engine. An instance belongs to one engine and keeps that engine's facts."""

    name: ClassVar[str]
    """Name in the configuration."""
    title: ClassVar[str]
    """Name in sentences."""
    metric_prefixes: ClassVar[tuple[str, ...]] = ()
    """Prefixes that the names of its metrics have, and those of no other kind."""
    owners: ClassVar[tuple[str, ...]] = ()
    """`owned_by` in its list of models."""
    metrics_paths: ClassVar[tuple[str, ...]] = ()
    """Paths of gauges, cheapest first; an empty answer falls through to the next."""
    sums: ClassVar[Metrics] = {}
    """Metrics by field of `Gauges`: the field is the sum of all their samples."""
    kv_usage: ClassVar[tuple[str, ...]] = ()
    """Metric of the used part of the KV cache, from 0 to 1."""
    kv_used_tokens: ClassVar[tuple[str, ...]] = ()
    """Metric of the used KV tokens, where a field of `sums` is `kv_capacity_tokens`."""
    other_metrics: ClassVar[tuple[str, ...]] = ()
    """Metrics that `gauges` of the kind reads besides."""
    steps_path: ClassVar[str | None] = None
    """Path of the engine's reports after each step."""
    facts_path: ClassVar[str | None] = None
    """Path of facts that no gauge reports."""
    health_path: ClassVar[str] = "/v1/models"
    """Path that answers 200 when the engine is well."""
    role_is_start: ClassVar[bool] = True
    """True if an event with the role alone comes with the first token. Otherwise the engine may not have begun."""
    takes_cache_salt: ClassVar[bool] = False
    """True if the engine keeps the cached blocks of requests with different `cache_salt` apart."""
    gaps: ClassVar[tuple[str, ...]] = ()
    """Limitations of this kind of engine, each a part of a sentence whose subject is the engine."""

    def __init__(self) -> None:
        self.slots: int | None = None
        """Sequences that the engine runs side by side."""
        self.context_tokens: int | None = None
        """Longest context of one request."""
        self.version = ""
        metrics = (*self.sums.values(), self.kv_usage, self.kv_used_tokens, self.other_metrics)
        self._lines = lines_of([name for names in metrics for name in names])

    def snapshot(self, text: str, taken_s: float) -> Gauges | None:
        """Read one page of gauges. Return None for a page without a known gauge. Raise one of UNREADABLE for an
        invalid page."""
        page = samples(text, self._lines) if self.sums else {}
        return Gauges(taken_s, **self.gauges(page)) if page else None

    def gauges(self, page: Mapping[str, list[Sample]]) -> dict[str, Any]:
        """Return the gauges on a page by field. A rank of data parallelism has a sample of its own."""
        found: dict[str, Any] = {}
        for field, names in self.sums.items():
            if values := self.values(page, names):
                found[field] = int(sum(values))
        if shares := self.values(page, self.kv_usage):
            found["kv_usage"] = min(sum(shares) / len(shares), 1.0)
        if used := self.values(page, self.kv_used_tokens):
            found["kv_usage"] = used_part(sum(used), found.get("kv_capacity_tokens"))
        return found

    def values(self, page: Mapping[str, list[Sample]], names: tuple[str, ...]) -> list[float]:
        """Return the values of all samples of these names."""
        return [each.value for name in names for each in page.get(name, ()) if 0 <= each.value <= VALUE_MAX]

    def read_facts(self, text: str) -> None:
        """Keep the facts of an answer from `facts_path`. Raise one of UNREADABLE for an answer without them."""

    def is_refusal(self, status: int, body: bytes) -> bool:
        """Return whether this answer without success is backpressure, so that the request returns to its queue.
        Anthropic's API says "overloaded" by 529."""
        return status in (429, 503, 529)

    def description(self) -> str:
        """Return the engine's kind, version, slots and limitations as one line."""
        found = self.title if not self.version else f"{self.title} {self.version}"
        if self.slots is not None:
            of = "" if self.context_tokens is None else f" of {self.context_tokens:,} tokens"
            found += f": {self.slots} slot{'' if self.slots == 1 else 's'}{of}"
        return "; ".join([found, *self.gaps])


def used_part(used: float | None, capacity: int | None) -> float | None:
    """Return the used part of a capacity, or None if one of them is unknown."""
    return None if used is None or not capacity else min(used / capacity, 1.0)


def count(value: object) -> int | None:
    """Return a count of at least one, or None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 1 <= value <= VALUE_MAX else None
