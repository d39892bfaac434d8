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
    """How many prompt tokens does an engine compute in a second while it has prompts to compute?

    Whatever a prompt takes beside its own tokens, such as a step's fixed time and the sequences that decode meanwhile,
    weighs least in the longest prompts. So prompts are compared by size, and the rate is that of the best size. Idle
    times do not count, and short prompts do not change what long ones have shown. Where the engine reports each of its
    steps, the tokens and the time of a step count instead.
    """

    __slots__ = ("_reports_steps", "_sizes", "_stepped_s", "seen", "tokens_per_s")

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None
        """None: too little was seen."""
        self.seen = 0
        self._reports_steps = False
        self._stepped_s: float | None = None
        """When the last step ended; None: nothing ran after it."""
        self._sizes: dict[int, tuple[Mean, Mean]] = {}
        """Tokens and seconds of the prompts of one size, by the number of bits of the tokens."""

    def answered(self, lease: Lease, service: ServiceTokens) -> None:
        """Learn from a complete answer whose prompt was alone in the engine. An engine that reports no cached tokens
        may report none at all, so a call inside an interaction then shows nothing.
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
        """Learn from a step that says what it computed, right after another one."""
        if step.scheduled_tokens is not None:
            self._reports_steps = True
            if self._stepped_s is not None:
                self.observed(step.scheduled_tokens, step.taken_s - self._stepped_s)
        self._stepped_s = step.taken_s if step.running else None

    def observed(self, tokens: int, seconds: float) -> None:
        """So many tokens took so long."""
        if tokens < 1:
            return
        self.seen += 1
        own_tokens, own_s = self._sizes.setdefault(tokens.bit_length(), (Mean(), Mean()))
        own_tokens.learn(tokens)
        own_s.learn(seconds)
        rates = [own.value / took.value for own, took in self._sizes.values() if own.seen >= SEEN_MIN and took.value]
        self.tokens_per_s = max(rates, default=None)


class PrefillPace:
    """Prompt tokens by which the steps of an engine become a second longer.

    Between two looks at an engine, running answers show how many steps it made. What these steps took beyond as many
    steps without prompts, the prompts took. An engine that reports each of its steps is looked at after each.
    """

    __slots__ = ("_before", "_reports_steps", "_seconds", "_started_tokens", "_step_s", "_tokens")

    def __init__(self) -> None:
        self._reports_steps = False
        self._before: tuple[float, dict[str, int], int] | None = None
        """The last look: its time, output tokens of running answers, and starting prompts, or running sequences."""
        self._step_s = Mean()
        """Seconds of a step without prompts."""
        self._tokens = Mean()
        self._seconds = Mean()
        """Of prompts between two looks."""
        self._started_tokens = 0
        """Of the prompts that have started since the last look."""

    def tokens_per_s(self) -> float | None:
        """Return the rate; None: too little was seen."""
        seconds = self._seconds.value
        return self._tokens.value / seconds if self._tokens.seen >= SEEN_MIN and seconds > 0.0 else None

    def started(self, lease: Lease) -> None:
        """Count the prompt of an answer that starts."""
        self._started_tokens += lease.prefill_tokens

    def saw_page(self, leases: Mapping[str, Lease], starting: int, now: float) -> None:
        """Learn from the answers that ran since the last page. If none made a token, a step is still under way."""
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
        """Learn from a step that says what it computed, right after another step."""
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
