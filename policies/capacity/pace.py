"""How fast is an engine, and how much does it usually run? Moving averages, and the size of its prefill window."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from policies.averages import QUICK, Mean
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
        if lease.started_s is not None and lease.output_each() >= 1:
            token_s = (now - lease.started_s) / lease.output_each()
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

    One step of the engine prefills many short prompts, or part of a long one. The window grows if it delays requests
    although the engine has no queue: otherwise an engine with short steps would idle between a first token and the
    arrival of the next prompt. The window shrinks while the engine has a queue, to the tokens of one step at least.
    """

    def __init__(self) -> None:
        self.tokens = self._least = PREFILL_TOKENS_MIN
        self._held_back = False

    def set_reported(self, step_tokens_max: int | None) -> None:
        """Note the largest number of tokens in one step of the engine; None if it reports none."""
        self._least = min(PREFILL_TOKENS_MAX, max(PREFILL_TOKENS_MIN, step_tokens_max or 0))
        self.tokens = max(self.tokens, self._least)

    def held_back(self) -> None:
        """Note that a request waits because the window is full."""
        self._held_back = True

    def observed(self, *, engine_queues: bool, engine_waits: bool) -> None:
        """Resize the window after a page or a step.

        `engine_queues`: more requests than the target wait inside the engine. `engine_waits`: any request waits there.
        """
        if engine_queues:
            self.tokens = max(self._least, self.tokens * 3 // 4)
        elif not engine_waits and self._held_back:
            self.tokens = min(PREFILL_TOKENS_MAX, self.tokens * 5 // 4)
        self._held_back = False


class PrefillRate:
    """The prompt tokens that an engine computes in a second while it has prompts to compute.

    A prompt's time has other parts beside its own tokens, such as a step's fixed time and the sequences that decode
    meanwhile. They weigh least in the longest prompts. So prompts are grouped by size, and the rate is that of the best
    size. Idle times do not count, and short prompts do not change the rate of long ones. If the engine reports each of
    its steps, the tokens and the time of a step count instead.
    """

    __slots__ = ("_reports_steps", "_sizes", "_stepped_s", "seen", "tokens_per_s")

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None
        """The rate; None if too little was seen."""
        self.seen = 0
        self._reports_steps = False
        self._stepped_s: float | None = None
        """End of the last step; None if nothing ran after it."""
        self._sizes: dict[int, tuple[Mean, Mean]] = {}
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
            self.observed(
                service.prompt - (service.cached or request.progress.cached_tokens),
                lease.started_s - lease.dispatched_s,
            )

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
        own_tokens, own_s = self._sizes.setdefault(tokens.bit_length(), (Mean(), Mean()))
        own_tokens.learn(tokens)
        own_s.learn(seconds)
        rates = [own.value / took.value for own, took in self._sizes.values() if own.seen >= SEEN_MIN and took.value]
        self.tokens_per_s = max(rates, default=None)


class PrefillPace:
    """The prompt tokens that make the steps of an engine one second longer in all.

    Between two looks at an engine, running answers show how many steps it made. The prompts took the time that these
    steps took beyond as many steps without prompts. An engine that reports each of its steps is looked at after each.
    """

    __slots__ = ("_before", "_reports_steps", "_seconds", "_started_tokens", "_step_s", "_tokens")

    def __init__(self) -> None:
        self._reports_steps = False
        self._before: tuple[float, dict[str, int], int] | None = None
        """The last look: time, output tokens of running answers, and starting prompts (page) or sequences (step)."""
        self._step_s = Mean()
        """Seconds of a step without prompts."""
        self._tokens = Mean()
        self._seconds = Mean()
        """Seconds of prompts between two looks; `_tokens` are their tokens."""
        self._started_tokens = 0
        """Tokens of the prompts that have started since the last look."""

    def tokens_per_s(self) -> float | None:
        """Return the rate; None if too little was seen."""
        seconds = self._seconds.value
        return self._tokens.value / seconds if self._tokens.seen >= SEEN_MIN and seconds > 0.0 else None

    def started(self, lease: Lease) -> None:
        """Count the prompt of an answer that starts."""
        self._started_tokens += lease.prefill_tokens

    def saw_page(self, leases: Mapping[str, Lease], starting: int, now: float) -> None:
        """Learn from the answers that ran since the last page, unless none made a token: a step is still under way."""
        if self._reports_steps:
            return
        outputs = {
            id: lease.output_tokens
            for id, lease in leases.items()
            if lease.started_s is not None and lease.request.streamed
        }
        if self._before is not None:
            at_s, outputs_before, starting_before = self._before
            made = [outputs[id] - output for id, output in outputs_before.items() if id in outputs]
            if made and not any(made):
                return
            if made:
                has_prompts = self._started_tokens + starting + starting_before > 0
                self._learn(self._started_tokens, now - at_s, sum(made) / len(made), has_prompts=has_prompts)
        self._before, self._started_tokens = (now, outputs, starting), 0

    def saw_step(self, step: Gauges, now: float) -> None:
        """Learn from a step that reports its tokens, if sequences ran after the step before."""
        before, self._before = self._before, (now, {}, step.running or 0)
        if step.scheduled_tokens is not None and self._reports_steps and before is not None and before[2]:
            tokens = max(0, step.scheduled_tokens - before[2])
            self._learn(tokens, now - before[0], 1.0, has_prompts=tokens > 0)
        self._reports_steps = step.scheduled_tokens is not None

    def _learn(self, tokens: int, seconds: float, steps: float, *, has_prompts: bool) -> None:
        if not has_prompts:
            self._step_s.learn(seconds / steps)
        elif self._step_s.seen >= SEEN_MIN:
            self._tokens.learn(tokens)
            self._seconds.learn(seconds - steps * self._step_s.value)
