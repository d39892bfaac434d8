"""How fast is an engine, and how much does it usually run? Moving averages, and the size of its prefill window."""

from __future__ import annotations

import math
from typing import Final

from policies.averages import QUICK, MovingAverage
from policies.capacity.gauges import Gauges
from policies.capacity.lease import Lease
from policies.request import ServiceTokens

SEEN_MIN: Final = round(2 / QUICK)
"""Values after which the first guess of a moving average weighs little: an eighth."""
TOKEN_S_MIN: Final = 1e-6
"""Lower bound of the seconds per token. A complete answer may come in one piece, and so take no time."""
USUAL_S: Final = 10.0
"""Period of a usual load: longer than most requests run, so that chance counts little."""
PREFILL_TOKENS_MIN: Final = 2048
PREFILL_TOKENS_MAX: Final = 262_144


class Pace:
    """Moving averages of the seconds from dispatch to the first token, per further token, and from dispatch to end."""

    def __init__(self) -> None:
        self.first_token_s = 0.05
        self.token_s = 0.02
        self.lifetime_s = 1.0
        self._answers = 0

    def started(self, lease: Lease, now: float) -> None:
        self.first_token_s += QUICK * (now - lease.dispatched_s - self.first_token_s)

    def ended(self, lease: Lease, now: float) -> None:
        self.lifetime_s += QUICK * (now - lease.dispatched_s - self.lifetime_s)
        if lease.started_s is not None and (each := lease.output_each()) >= 1:
            token_s = (now - lease.started_s) / each
            self.token_s = max(TOKEN_S_MIN, self.token_s + QUICK * (token_s - self.token_s))
            self._answers += 1

    def known_token_s(self) -> float | None:
        """Return the seconds per token after the first; None if too few answers have been seen."""
        return self.token_s if self._answers >= SEEN_MIN else None

    def output_tokens(self, lease: Lease, now: float) -> int:
        """Return the tokens that an answer is estimated to have now, over all its sequences: at most its reserve.

        For answers that are not streamed.
        """
        if lease.started_s is None:
            return lease.output_tokens
        request = lease.request
        each = (now - lease.started_s) / self.token_s
        return int(min(each, request.progress.output_tokens_reserved / request.sequences)) * request.sequences


class UsualLoad:
    """The sequences that an engine runs on average over the last `USUAL_S`.

    The number changes with events and gauges of the engine only.
    """

    def __init__(self) -> None:
        self.sequences = 0.0
        self._at_s = 0.0

    def ran(self, sequences: float, now: float) -> None:
        """Count that the engine has run this many sequences since the last call."""
        passed_s = max(0.0, now - self._at_s)
        self.sequences -= (sequences - self.sequences) * math.expm1(-passed_s / USUAL_S)
        self._at_s = now


class PrefillWindow:
    """A limit of the prompt tokens that are between dispatch and first token at a time.

    An engine's step prefills many short prompts, or part of a long prompt. The window grows if it delays requests
    although the engine has no queue: otherwise an engine with short steps would idle between a first token and the
    arrival of the next prompt. The window shrinks while the engine has a queue, to the tokens of one step at least.
    """

    def __init__(self) -> None:
        self.tokens = self._least = PREFILL_TOKENS_MIN
        self.held_back = False
        """A request has waited since the last page or step, because the window was full."""

    def set_reported(self, step_tokens_max: int | None) -> None:
        """Note the largest number of tokens in one step of the engine; None if it reports none."""
        self._least = min(PREFILL_TOKENS_MAX, max(PREFILL_TOKENS_MIN, step_tokens_max or 0))
        self.tokens = max(self.tokens, self._least)

    def observed(self, *, engine_queues: bool, engine_waits: bool) -> None:
        """Resize the window after a page or a step.

        `engine_queues`: more requests than the target wait inside the engine. `engine_waits`: any request waits there.
        """
        if engine_queues:
            self.tokens = max(self._least, self.tokens * 3 // 4)
        elif not engine_waits and self.held_back:
            self.tokens = min(PREFILL_TOKENS_MAX, self.tokens * 5 // 4)
        self.held_back = False


class PrefillRate:
    """The prompt tokens that an engine computes in a second while it has prompts to compute.

    A prompt's time has other parts beside its own tokens, such as a step's fixed time and the sequences that decode
    meanwhile. The other parts weigh least in the longest prompts. So prompts are grouped by size, and the rate is that
    of the best size. Idle times do not count, and short prompts do not change the rate of long ones. If the engine
    reports each of its steps, the tokens and the time of a step count instead.
    """

    __slots__ = ("_reports_steps", "_sizes", "_stepped_s", "seen", "tokens_per_s")

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None
        """The rate; None if too little was seen."""
        self.seen = 0
        self._reports_steps = False
        self._stepped_s: float | None = None
        """End of the last step; None if nothing ran after it."""
        self._sizes: dict[int, tuple[MovingAverage, MovingAverage]] = {}
        """Tokens and seconds of the prompts of one size, by the number of bits of the tokens."""

    def answered(self, lease: Lease, service: ServiceTokens) -> None:
        """Learn from a complete streamed answer whose prompt was alone in the engine.

        An engine without cached tokens in its answer may never report them. A call inside an interaction then shows
        nothing.
        """
        request = lease.request
        if self._reports_steps or lease.started_s is None or not (request.streamed and lease.is_first):
            return
        if service.cached or not request.progress.inside:
            cached_tokens = service.cached or request.progress.cached_tokens
            self.observed(service.prompt - cached_tokens, lease.started_s - lease.dispatched_s)

    def saw_step(self, step: Gauges) -> None:
        """Learn from a step that reports its tokens, if the engine was busy since the step before."""
        if step.scheduled_tokens is not None:
            self._reports_steps = True
            if self._stepped_s is not None:
                self.observed(step.scheduled_tokens, step.taken_s - self._stepped_s)
        self._stepped_s = step.taken_s if step.running else None

    def observed(self, tokens: int, seconds: float) -> None:
        """Learn from a prompt or step: its tokens and its seconds."""
        if tokens < 1:
            return
        self.seen += 1
        size = tokens.bit_length()
        own_tokens, own_s = self._sizes.get(size) or self._sizes.setdefault(size, (MovingAverage(), MovingAverage()))
        own_tokens.learn(tokens)
        own_s.learn(seconds)
        rates = [own.value / took.value for own, took in self._sizes.values() if own.seen >= SEEN_MIN and took.value]
        self.tokens_per_s = max(rates, default=None)


class PrefillLead:
    """The lead of one tenant node at an engine (`placements.prefill_parts`), and the node's weight."""

    __slots__ = ("tokens", "weight")

    def __init__(self) -> None:
        self.tokens = 0.0
        self.weight = 1.0


class PrefillPace:
    """The prompt tokens that make the steps of an engine one second longer in all.

    Between two looks at an engine (pages of its metrics, or steps that it reports), each running answer makes a token
    per step. So the tokens that all streamed answers made, divided by the sequences that ran, are the steps that the
    engine made. The prompts took the time beyond that of as many steps without prompts. All four amounts are averaged
    before they are divided: chance in a short time between two looks then cancels out.
    """

    __slots__ = ("_before", "_plain_s", "_plain_steps", "_seconds", "_tokens", "made_tokens", "started_tokens")

    def __init__(self) -> None:
        self.made_tokens = 0
        """Tokens that streamed answers have made since the last look, without the first one of each answer."""
        self.started_tokens = 0
        """Tokens of the prompts of answers that have started since the last look."""
        self._before: tuple[float, int, int] = (0.0, 0, 0)
        """The last look: time, `starting` and `streaming`."""
        self._plain_s = MovingAverage()
        self._plain_steps = MovingAverage()
        """Seconds and steps between two looks without prompts."""
        self._tokens = MovingAverage()
        self._seconds = MovingAverage()
        """Tokens of the prompts between two looks, and the seconds that they took."""

    def tokens_per_s(self) -> float | None:
        """Return the rate; None if too little was seen."""
        seconds = self._seconds.value
        return self._tokens.value / seconds if self._tokens.seen >= SEEN_MIN and seconds > 0.0 else None

    def looked(self, now: float, *, starting: int, streaming: int) -> None:
        """Learn from the time since the last look, unless running answers made no token: a step is still under way.

        `starting`: prompts that were dispatched and have not started. `streaming`: sequences of the streamed answers
        that have.
        """
        at_s, starting_before, streaming_before = self._before
        if streaming and streaming_before:
            if not self.made_tokens:
                return
            steps = 2 * self.made_tokens / (streaming + streaming_before)
            self._learn(now - at_s, steps, has_prompts=self.started_tokens + starting + starting_before > 0)
        self._before, self.started_tokens, self.made_tokens = (now, starting, streaming), 0, 0

    def _learn(self, seconds: float, steps: float, *, has_prompts: bool) -> None:
        if not has_prompts:
            self._plain_s.learn(seconds)
            self._plain_steps.learn(steps)
        elif self._plain_s.seen >= SEEN_MIN:
            self._tokens.learn(self.started_tokens)
            self._seconds.learn(seconds - steps * self._plain_s.value / self._plain_steps.value)
