"""What does one dispatched request hold of its engine until it ends?"""

from __future__ import annotations

from policies.capacity.kv_forecast import Growing
from policies.request import Request

OUTGROWN = 1.25
"""An answer longer than its reserve is expected to add up to a quarter of what it has taken."""


class Lease:
    """One dispatched request, and what it holds of its engine. A lease ends exactly once, in one way."""

    __slots__ = (
        "backend", "charged_tokens", "counted_tokens", "dispatched_s", "growing", "held_tokens", "is_first",
        "output_tokens", "passed", "prefill_tokens", "request", "slots", "started_s", "unsure_tokens",
    )  # fmt: skip

    def __init__(self, request: Request, backend: str, dispatched_s: float) -> None:
        self.request = request
        self.backend = backend
        self.dispatched_s = dispatched_s
        self.output_tokens = 0
        """Output over all sequences: counted as it streams, estimated for an answer that is not streamed."""
        self.started_s: float | None = None
        """When its first token was seen, or is inferred to have come."""
        self.held_tokens = 0
        """KV tokens that it is counted with, at its largest."""
        self.unsure_tokens = 0
        """The same at its dispatch, if its answer may take more than was reserved."""
        self.slots = 0
        """Slots of its engine that it takes."""
        self.is_first = False
        """No other prompt was before it in its engine."""
        self.passed: list[Request] = []
        """Requests that its engine was sent before this one, and refused."""
        self.prefill_tokens = 0
        """Prompt tokens that its engine is expected to compute, since it has not cached them."""
        self.charged_tokens = 0
        """Output tokens at the last charge."""
        self.counted_tokens = 0
        """Output tokens that its ledger counts as held."""
        self.growing: Growing | None = None
        """How the forecast of its ledger knows it."""

    def was_taken(self) -> bool:
        """Its engine took it. Had the engine refused a request that it was sent before? Then it was not full, and the
        refusal counts against that request.
        """
        passed, self.passed = self.passed, []
        for request in passed:
            request.progress.refusals += 1
        return bool(passed)

    def output_each(self) -> float:
        return self.output_tokens / self.request.sequences

    def reserve_left(self) -> float:
        """Output tokens that each of its sequences may still add, by the cautious estimate."""
        done = self.output_each()
        cap = self.request.output_tokens_max / self.request.sequences
        reserved = self.request.progress.output_tokens_reserved / self.request.sequences
        return max(0.0, min(max(reserved, done * OUTGROWN), cap) - done)
