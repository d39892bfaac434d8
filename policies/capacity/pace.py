"""How fast is an engine, and how much does it usually run? Moving averages, and the size of its prefill window."""

from __future__ import annotations

import math
from typing import Final

from policies.averages import QUICK, STEADY
from policies.capacity.gauges import Gauges
from policies.capacity.lease import Lease
from policies.request import ServiceTokens

SEEN_MIN: Final = round(2 / QUICK)
"""Values after which the first guess of a moving average weighs little: an eighth."""
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
        self.first_token_s += QUICK * (now - lease.dispatched_s - self.first_token_s)

    def ended(self, lease: Lease, now: float) -> None:
        self.lifetime_s += QUICK * (now - lease.dispatched_s - self.lifetime_s)
        if lease.started_s is not None and lease.output_each() >= 1:
            token_s = (now - lease.started_s) / lease.output_each()
            self.token_s = max(TOKEN_S_MIN, self.token_s + QUICK * (token_s - self.token_s))
            self._answers += 1

    def known_token_s(self) -> float | None:
        """Seconds per token after the first; None: too few answers have been seen."""
        return self.token_s if self._answers >= SEEN_MIN else None

    def output_tokens(self, lease: Lease, now: float) -> int:
        """How many tokens has an answer that is not streamed now, over all its sequences? At most its reserve."""
        if lease.started_s is None:
            return lease.output_tokens
        request = lease.request
        each = (now - lease.started_s) / self.token_s
        return int(min(each, request.progress.output_tokens_reserved / request.sequences)) * request.sequences


class UsualLoad:
    """How many sequences does an engine run on average over the last `USUAL_S`?

    Each event and each gauge of the engine brings the number up to date. So an engine without events and gauges keeps
    its number.
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
    although the engine has no queue: an engine whose steps are short would else stand still between a first token and
    the arrival of the next prompt. It shrinks while the engine has a queue, to the tokens of one step at least.
    """

    def __init__(self) -> None:
        self.tokens = self._least = PREFILL_TOKENS_MIN
        self._held_back = False

    def reported(self, step_tokens_max: int | None) -> None:
        """The engine says how many tokens one step of it computes at most; None: what it said is not believed any
        more.
        """
        self._least = min(PREFILL_TOKENS_MAX, max(PREFILL_TOKENS_MIN, step_tokens_max or 0))
        self.tokens = max(self.tokens, self._least)

    def held_back(self) -> None:
        """A request waits because the window is full."""
        self._held_back = True

    def observed(self, *, engine_queues: bool, engine_waits: bool) -> None:
        """The engine was scraped, or made a step. `engine_queues`: more wait inside it than the target. `engine_waits`:
        any wait.
        """
        if engine_queues:
            self.tokens = max(self._least, self.tokens * 3 // 4)
        elif not engine_waits and self._held_back:
            self.tokens = min(PREFILL_TOKENS_MAX, self.tokens * 5 // 4)
        self._held_back = False


class PrefillRate:
    """How many prompt tokens does an engine compute in a second? Measured by what each more of them costs.

    The time to a first token is a + u / R: u are the prompt tokens that the engine has not cached, R is the rate, and a
    is what every request takes. An answer that comes whole takes c more for each token of the answer. So 1 / R is the
    slope of the time over u at equal outputs: a least-squares fit with two regressors. Where the engine reports each of
    its steps, u are the tokens of the step, and the time is that of the step.

    An engine that starts cold under load never has a prompt alone. Until a slope is found, R is the tokens of prompts
    that others were before, over the time in which the engine had them. Decoding takes part of that time.
    """

    __slots__ = (
        "_first_token_s", "_is_fitted", "_mean", "_moments", "_queued", "_queued_s", "_queued_tokens", "_reports_steps",
        "seen", "tokens_per_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None
        """R, as of the last time that it could be fitted; None: too little was seen, or prompts differed too little."""
        self.seen = 0
        self._reports_steps = False
        self._is_fitted = False
        self._first_token_s = 0.0
        self._queued = 0
        self._queued_tokens = 0.0
        self._queued_s = 0.0
        self._mean = [0.0, 0.0, 0.0]
        self._moments = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
        """Of uu, uo, us, oo, os, ss."""

    def started(self, lease: Lease, now: float) -> None:
        """The first token of a streamed answer has come."""
        lease.prefill_s = now - max(self._first_token_s, lease.dispatched_s)
        self._first_token_s = now

    def answered(self, lease: Lease, service: ServiceTokens, now: float) -> None:
        """A request has its whole answer, and took this much.

        Nobody knows what the engine has cached for a call inside an interaction unless the engine says it.
        """
        request = lease.request
        if self._reports_steps or (service.cached is None and request.progress.inside):
            return
        uncached = service.prompt - (request.progress.cached_tokens if service.cached is None else service.cached)
        if not request.streamed:
            if lease.is_first:
                self.observed(uncached, service.output / request.sequences, now - lease.dispatched_s)
        elif lease.started_s is not None:
            if lease.is_first:
                self.observed(uncached, 0.0, lease.prefill_s)
            else:
                self._computed(uncached, lease.prefill_s)

    def saw_step(self, step: Gauges, before: Gauges | None) -> None:
        """A step that says what it computed, right after another one, shows what prompts cost. Prompts may all be
        computed in parts of one size, so these steps are compared with steps without any.
        """
        tokens = step.scheduled_tokens
        if tokens is None:
            return
        self._reports_steps = True
        if before is not None and before.is_step and before.running:
            self.observed(tokens, 0.0, step.taken_s - before.taken_s)

    def observed(self, uncached_tokens: float, output_tokens: float, seconds: float) -> None:
        """A request that found nobody's prompt before it took so long."""
        self.seen += 1
        share = max(STEADY, 1.0 / self.seen)
        mean = self._mean
        u, o, s = uncached_tokens - mean[0], output_tokens - mean[1], seconds - mean[2]
        for place, delta in enumerate((u, o, s)):
            mean[place] += share * delta
        products = (u * u, u * o, u * s, o * o, o * s, s * s)
        self._moments = [
            (1.0 - share) * (moment + share * product) for moment, product in zip(self._moments, products, strict=True)
        ]
        if self.seen >= SEEN_MIN:
            self._fit()

    def _computed(self, uncached_tokens: float, seconds: float) -> None:
        """A prompt that had others before it took the engine so long after the one before."""
        self._queued += 1
        share = max(STEADY, 1.0 / self._queued)
        self._queued_tokens += share * (uncached_tokens - self._queued_tokens)
        self._queued_s += share * (seconds - self._queued_s)
        if self._queued >= SEEN_MIN and not self._is_fitted and self._queued_s > 0:
            self.tokens_per_s = self._queued_tokens / self._queued_s

    def _fit(self) -> None:
        uu, uo, us, oo, os, ss = self._moments
        if oo > 0:  # what outputs explain is taken out
            uu, us, ss = uu - uo * uo / oo, us - uo * os / oo, ss - os * os / oo
        # The tokens must explain more of the variance of the times than is left (r squared), or the slope is noise.
        if uu > 0 and us > 0 and 2 * us * us >= uu * ss:
            self.tokens_per_s = uu / us
            self._is_fitted = True
