"""How fast is an engine? Moving averages over the requests it served, and the size of its prefill window."""

from __future__ import annotations

from typing import Final

from policies.capacity.lease import Lease

__all__ = ["PREFILL_TOKENS_MAX", "PREFILL_TOKENS_MIN", "Pace", "PrefillWindow"]

RATE: Final = 0.1
"""The part by which one request moves an average."""
PREFILL_TOKENS_MIN: Final = 2048
PREFILL_TOKENS_MAX: Final = 262_144


class Pace:
    """Seconds from dispatch to a first token, for each further token, and from dispatch to the end."""

    def __init__(self) -> None:
        self.first_token_s = 0.05
        self.token_s = 0.02
        self.lifetime_s = 1.0

    def started(self, lease: Lease, now: float) -> None:
        self.first_token_s += RATE * (now - lease.dispatched_s - self.first_token_s)

    def ended(self, lease: Lease, now: float) -> None:
        self.lifetime_s += RATE * (now - lease.dispatched_s - self.lifetime_s)
        if lease.started_s is not None and lease.output_each() >= 1:
            self.token_s += RATE * ((now - lease.started_s) / lease.output_each() - self.token_s)

    def output_tokens(self, lease: Lease, now: float) -> int:
        """What has an answer that is not streamed come to by now, over all its sequences? At most its reserve."""
        if lease.started_s is None:
            return lease.output_tokens
        request = lease.request
        each = (now - lease.started_s) / self.token_s
        return int(min(each, request.progress.output_tokens_reserved / request.sequences)) * request.sequences


class PrefillWindow:
    """How many prompt tokens may be on their way to a first token at once?

    One step of the engine prefills many short prompts, or part of a long one. The window grows while it holds requests
    back from an engine without a queue, and shrinks while the engine has one.
    """

    def __init__(self) -> None:
        self.tokens = PREFILL_TOKENS_MIN
        self._held_back = False

    def held_back(self) -> None:
        """A request waits for want of room in it."""
        self._held_back = True

    def observed(self, *, engine_queues: bool, engine_waits: bool) -> None:
        """The engine was scraped: has it more waiting than its target, has it any?"""
        if engine_queues:
            self.tokens = max(PREFILL_TOKENS_MIN, self.tokens * 3 // 4)
        elif not engine_waits and self._held_back:
            self.tokens = min(PREFILL_TOKENS_MAX, self.tokens * 5 // 4)
        self._held_back = False
