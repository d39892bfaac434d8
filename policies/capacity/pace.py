"""How fast is an engine, and how much does it usually run? Moving averages, and the size of its prefill window."""

from __future__ import annotations

import math
from typing import Final

from policies.capacity.lease import Lease

__all__ = ["PREFILL_TOKENS_MAX", "PREFILL_TOKENS_MIN", "Pace", "PrefillWindow", "UsualLoad"]

RATE: Final = 0.1
"""Weight of one request in a moving average."""
ANSWERS_MIN: Final = 20
"""A moving average still shows its first guess before."""
TOKEN_S_MIN: Final = 1e-6
"""No engine makes a token faster. A whole answer may come in one piece, and so take no time."""
USUAL_S: Final = 10.0
"""Longer than most requests run, so that what chance brings and takes counts little."""
PREFILL_TOKENS_MIN: Final = 2048
PREFILL_TOKENS_MAX: Final = 262_144


class Pace:
    """Seconds from dispatch to the first token, per further token, and from dispatch to the end."""

    def __init__(self) -> None:
        self.first_token_s = 0.05
        self.token_s = 0.02
        self.lifetime_s = 1.0
        self._answers = 0

    def started(self, lease: Lease, now: float) -> None:
        self.first_token_s += RATE * (now - lease.dispatched_s - self.first_token_s)

    def ended(self, lease: Lease, now: float) -> None:
        self.lifetime_s += RATE * (now - lease.dispatched_s - self.lifetime_s)
        if lease.started_s is not None and lease.output_each() >= 1:
            token_s = (now - lease.started_s) / lease.output_each()
            self.token_s = max(TOKEN_S_MIN, self.token_s + RATE * (token_s - self.token_s))
            self._answers += 1

    def known_token_s(self) -> float | None:
        """Seconds per token after the first; None: too few answers have been seen."""
        return self.token_s if self._answers >= ANSWERS_MIN else None

    def output_tokens(self, lease: Lease, now: float) -> int:
        """How many tokens has an answer that is not streamed now, over all its sequences? At most its reserve."""
        if lease.started_s is None:
            return lease.output_tokens
        request = lease.request
        each = (now - lease.started_s) / self.token_s
        return int(min(each, request.progress.output_tokens_reserved / request.sequences)) * request.sequences


class UsualLoad:
    """How many sequences does an engine run on average over the last `USUAL_S`?

    It is brought up to date by whatever is heard of the engine. So one of which nothing is heard keeps its number.
    """

    def __init__(self) -> None:
        self.sequences = 0.0
        self._at_s = 0.0

    def ran(self, sequences: float, now: float) -> None:
        """It has run so many since this was last said."""
        passed_s = max(0.0, now - self._at_s)
        self.sequences -= (sequences - self.sequences) * math.expm1(-passed_s / USUAL_S)
        self._at_s = now


class PrefillWindow:
    """How many prompt tokens may be between their dispatch and a first token at the same time?

    One step of the engine prefills many short prompts, or part of a long one. The window grows if it delays requests
    although the engine has no queue. It shrinks while the engine has a queue.
    """

    def __init__(self) -> None:
        self.tokens = PREFILL_TOKENS_MIN
        self._held_back = False
        self._is_told = False

    def told(self, step_tokens_max: int | None) -> None:
        """The engine says how many tokens one step of it computes at most; None: what it said is not believed any
        more.
        """
        self._is_told = step_tokens_max is not None
        if step_tokens_max is not None:
            self.tokens = min(PREFILL_TOKENS_MAX, max(PREFILL_TOKENS_MIN, step_tokens_max))

    def held_back(self) -> None:
        """A request waits because the window is full."""
        self._held_back = True

    def observed(self, *, engine_queues: bool, engine_waits: bool) -> None:
        """The engine was scraped. `engine_queues`: more wait inside it than the target. `engine_waits`: any wait."""
        if self._is_told:
            return
        if engine_queues:
            self.tokens = max(PREFILL_TOKENS_MIN, self.tokens * 3 // 4)
        elif not engine_waits and self._held_back:
            self.tokens = min(PREFILL_TOKENS_MAX, self.tokens * 5 // 4)
        self._held_back = False
