"""What does a dispatched request hold of its engine until it ends?"""

from __future__ import annotations

from policies.capacity.kv_forecast import Growth
from policies.request import Request

OUTGROWN = 1.25
"""Factor by which an answer may still grow when that takes it beyond its reserve."""


class Lease:
    """A dispatched request and its share of its engine. A lease ends exactly once, in one way."""

    __slots__ = (
        "backend", "charged_tokens", "counted_tokens", "dispatched_s", "footprint_tokens", "growth", "is_first",
        "output_tokens", "passed", "prefill_tokens", "request", "slots", "started_s", "unsure_tokens",
    )  # fmt: skip

    def __init__(self, request: Request, backend: str, dispatched_s: float) -> None:
        self.request = request
        self.backend = backend
        self.dispatched_s = dispatched_s
        self.output_tokens = 0
        """Output over all sequences: counted as it streams, estimated for an answer that is not streamed."""
        self.started_s: float | None = None
        """Time at which the first token was seen, or is inferred to have come; None before that."""
        self.footprint_tokens = 0
        """KV tokens counted for the request at its largest."""
        self.unsure_tokens = 0
        """The `footprint_tokens` at dispatch if the answer may outgrow its reserve, otherwise 0."""
        self.slots = 0
        """Slots of the engine that the request takes."""
        self.is_first = False
        """The engine had no other prompt to compute at dispatch."""
        self.passed: list[Request] = []
        """Requests that the engine was sent before this one, and refused."""
        self.prefill_tokens = 0
        """Prompt tokens that are not expected to be cached, so the engine must compute them."""
        self.charged_tokens = 0
        """Output tokens at the last charge."""
        self.counted_tokens = 0
        """Output tokens that the ledger counts as held."""
        self.growth: Growth | None = None
        """Entry in the forecast of the ledger; None if the KV capacity is not known."""

    def was_taken(self) -> bool:
        """Count earlier refusals against their requests, since the engine took this one. Return whether there were any.

        An engine that takes a later request was not full when it refused the earlier one.
        """
        passed, self.passed = self.passed, []
        for request in passed:
            request.progress.proven_refusals += 1
        return bool(passed)

    def output_each(self) -> float:
        return self.output_tokens / self.request.sequences

    def reserve_left(self) -> float:
        """Return the output tokens that each sequence may still add, by the cautious estimate."""
        done = self.output_each()
        cap = self.request.output_tokens_max / self.request.sequences
        reserved = self.request.progress.output_tokens_reserved / self.request.sequences
        return max(0.0, min(max(reserved, done * OUTGROWN), cap) - done)
