"""An inference engine in any clock: continuous batching, chunked prefill, KV that grows, preemption, cached prefixes.

Requests are admitted in the order of their arrival, as vLLM does by default. A sequence takes KV for its whole context
when it is admitted and one token more with each output token. Where KV runs out, the sequence that was admitted last is
preempted and computes its context again. Prefixes are cached block by block in the KV that no sequence holds; running
sequences share no blocks.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from tenantbench.events import CHARACTERS_PER_TOKEN, Event

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Profile:
    """A step takes `step_s`, and `prefill_s` more for each prompt token: about those of an 8B model on one GPU."""

    slots: int = 16
    kv_tokens: int = 8_192
    context_tokens_max: int = 4_096
    prefill_tokens_max: int = 512
    queue_max: int = 8_192
    step_s: float = 0.01
    prefill_s: float = 0.000_06
    logs_waste: bool = True


@dataclass(eq=False)
class Sequence:
    request: str
    tenant: str
    prompt: int
    output_max: int
    blocks: list[int] = field(default_factory=list)
    generated: int = 0
    position: int = 0
    computed: int = 0
    """Tokens of the context that were computed at any time: computing them again is waste."""
    is_started: bool = False

    @property
    def context(self) -> int:
        return self.prompt + self.generated


@dataclass
class Step:
    duration_s: float
    produced: list[Sequence]
    ended: list[Sequence]


def blocks_of(text: str) -> list[int]:
    """Return a name for each complete block of a prompt, which depends on all text before it."""
    size = BLOCK_TOKENS * CHARACTERS_PER_TOKEN
    names, name = [], 0
    for end in range(size, len(text) + 1, size):
        name = hash((name, text[end - size : end]))
        names.append(name)
    return names


class Engine:
    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.events: list[Event] = []
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.kv_used = 0
        self.preemptions = 0
        self.prompt_tokens = self.output_tokens = 0
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._seen: set[int] = set()

    def is_refused(self, prompt: int, output_max: int) -> str | None:
        """Return why a request cannot be served, if so."""
        if prompt + output_max > min(self.profile.context_tokens_max, self.profile.kv_tokens):
            return "context"
        return "queue" if len(self.waiting) >= self.profile.queue_max else None

    def add(self, sequence: Sequence, now: float) -> None:
        self.events.append(Event("arrive", now, sequence.request, sequence.tenant, sequence.prompt))
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence, now: float) -> None:
        if sequence in self.running:
            self._leave(sequence, now)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
            self._log_stop(sequence, now)

    def step(self, now: float) -> Step:
        """Compute one step, which ends `duration_s` later. The step's events carry that time."""
        self._admit(now)
        self._make_room(now)
        budget, prefilled = self.profile.prefill_tokens_max, 0
        served: dict[str, Event] = {}
        produced = []
        for sequence in self.running:
            row = served.setdefault(sequence.tenant, Event("serve", 0.0, tenant=sequence.tenant))
            tokens = min(budget - prefilled, sequence.context - sequence.position)
            again = max(0, min(sequence.position + tokens, sequence.computed) - sequence.position)
            row.prompt += tokens - again
            row.wasted += again
            prefilled += tokens
            sequence.position += tokens
            sequence.computed = max(sequence.computed, sequence.position)
            if sequence.position == sequence.context:
                row.output += 1
                produced.append(sequence)
        duration = self.profile.step_s + self.profile.prefill_s * prefilled
        for sequence in produced:  # the key of the new token is computed in the next step, as a decode
            sequence.generated += 1
            sequence.position += 1
            sequence.computed = max(sequence.computed, sequence.position)
            self.kv_used += 1
        ended = [sequence for sequence in produced if sequence.generated >= sequence.output_max]
        for row in served.values():
            row.t_s = now + duration
            self.prompt_tokens += row.prompt
            self.output_tokens += row.output
            self.events.append(row)
        for sequence in ended:
            self._leave(sequence, now + duration)
        self._log_state(now + duration)
        return Step(duration, produced, ended)

    def _admit(self, now: float) -> None:
        before = len(self.running)
        while self.waiting and len(self.running) < self.profile.slots:
            sequence = self.waiting[0]
            if self.kv_used + sequence.context + len(self.running) > self.profile.kv_tokens and self.running:
                break
            self.waiting.popleft()
            self._use_cache(sequence)
            self.kv_used += sequence.context
            self.running.append(sequence)
            if not sequence.is_started:
                sequence.is_started = True
                self.events.append(Event("start", now, sequence.request, sequence.tenant))
        if len(self.running) != before:
            self._trim()
            self._log_state(now)

    def _use_cache(self, sequence: Sequence) -> None:
        """Begin behind the blocks that are cached; blocks that were computed once and evicted count as waste."""
        hits = next((i for i, block in enumerate(sequence.blocks) if block not in self._cache), len(sequence.blocks))
        for block in sequence.blocks[:hits]:
            self._cache.move_to_end(block)
        sequence.position = min(hits * BLOCK_TOKENS, sequence.context - 1)
        seen = next((i for i, block in enumerate(sequence.blocks) if block not in self._seen), len(sequence.blocks))
        sequence.computed = max(sequence.computed, min(seen * BLOCK_TOKENS, sequence.prompt))

    def _make_room(self, now: float) -> None:
        """Preempt until each running sequence can grow by a token."""
        while len(self.running) > 1 and self.kv_used + len(self.running) > self.profile.kv_tokens:
            last = self.running.pop()
            self.kv_used -= last.context
            last.position = 0
            self.waiting.appendleft(last)
            self.preemptions += 1
            self.events.append(Event("preempt", now, last.request, last.tenant))

    def _leave(self, sequence: Sequence, now: float) -> None:
        self.running.remove(sequence)
        self.kv_used -= sequence.context
        for block in sequence.blocks:
            self._cache[block] = None
            self._cache.move_to_end(block)
            self._seen.add(block)
        self._trim()
        self._log_stop(sequence, now)

    def _trim(self) -> None:
        blocks = max(0, self.profile.kv_tokens - self.kv_used) // BLOCK_TOKENS
        while len(self._cache) > blocks:
            self._cache.popitem(last=False)

    def _log_stop(self, sequence: Sequence, now: float) -> None:
        event = Event("stop", now, sequence.request, sequence.tenant, sequence.prompt, sequence.generated)
        self.events.append(event)

    def _log_state(self, now: float) -> None:
        counts = len(self.running), len(self.waiting)
        self.events.append(Event("state", now, running=counts[0], waiting=counts[1], kv_tokens=self.kv_used))
