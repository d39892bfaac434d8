"""One kind of engine: names of its gauges, its refusals, the facts that no gauge tells, and what it cannot tell.

`Adapter` itself knows what every server of the OpenAI API has in common. A kind of engine is a file of this folder with
a subclass, and a row in `engines.kinds`. Nothing outside of this folder asks which kind an engine is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from backends.promtext import Sample
from policies.capacity.gauges import Gauges

VALUE_MAX: Final = 1e15
"""A gauge beyond this bound says nothing."""
UNREADABLE: Final = (ValueError, TypeError, LookupError, AttributeError)
"""What reading an answer of another form than expected raises."""


class Adapter:
    """A kind of engine. An instance belongs to one engine, whose facts it keeps."""

    name: ClassVar[str]
    """The name in the configuration."""
    title: ClassVar[str]
    """The name in sentences."""
    metric_prefixes: ClassVar[tuple[str, ...]] = ()
    """How the names of its metrics begin, and those of no other kind."""
    owners: ClassVar[tuple[str, ...]] = ()
    """`owned_by` in its list of models."""
    metrics_paths: ClassVar[tuple[str, ...]] = ()
    """Paths of gauges, cheapest first; an empty answer falls through to the next."""
    steps_path: ClassVar[str | None] = None
    """Where the engine reports after each step what it holds."""
    facts_path: ClassVar[str | None] = None
    """Where the engine tells what no gauge tells."""
    health_path: ClassVar[str] = "/v1/models"
    """Answers 200 when the engine is well."""
    takes_cache_salt: ClassVar[bool] = False
    """Does the engine keep the cached blocks of requests with different `cache_salt` apart?"""
    gaps: ClassVar[tuple[str, ...]] = ()
    """What this kind of engine cannot tell or do, each as a part of a sentence whose subject is the engine."""

    def __init__(self) -> None:
        self.slots: int | None = None
        """Sequences that the engine runs side by side."""
        self.context_tokens: int | None = None
        """Longest context of one request."""
        self.version = ""

    def snapshot(self, text: str, taken_s: float) -> Gauges | None:
        """Read one page of gauges; None when it holds nothing that this adapter knows. Raises one of UNREADABLE."""
        return None

    def read_facts(self, text: str) -> None:
        """Keep the facts of an answer from `facts_path`. Raises one of UNREADABLE if the answer holds none."""

    def is_refusal(self, status: int, body: bytes) -> bool:
        """Is this answer backpressure, after which the request returns to its queue, and no error of the request?

        529 is the status by which Anthropic's API says that it is overloaded.
        """
        return status in (429, 503, 529)

    def description(self) -> str:
        """Return what was found, and what this engine cannot tell, as one line."""
        found = self.title if not self.version else f"{self.title} {self.version}"
        if self.slots is not None:
            of = "" if self.context_tokens is None else f" of {self.context_tokens:,} tokens"
            found += f": {self.slots} slot{'' if self.slots == 1 else 's'}{of}"
        return "; ".join([found, *self.gaps])


def summed(page: Mapping[str, list[Sample]], names: Mapping[str, str]) -> dict[str, Any]:
    """Return gauges by field, as the sum of all samples of their metric. A DP rank has a sample of its own."""
    found: dict[str, Any] = {}
    for field, name in names.items():
        values = [sample.value for sample in page.get(name, ()) if 0 <= sample.value <= VALUE_MAX]
        if values:
            found[field] = int(sum(values))
    return found


def share(page: Mapping[str, list[Sample]], name: str) -> float | None:
    """Return the mean of a gauge from 0 to 1 over all samples."""
    values = [sample.value for sample in page.get(name, ()) if 0 <= sample.value <= VALUE_MAX]
    return min(sum(values) / len(values), 1.0) if values else None


def count(value: object) -> int | None:
    """Return a count of at least one, or None if the value is no such count."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 1 <= value <= VALUE_MAX else None
