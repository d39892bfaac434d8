"""vLLM's v1 scheduler as a model that runs on any clock.

The caller owns the time: it calls `step(now)` while `has_work`, lets `duration_s` pass, and calls again. The model
reads no clock, never sleeps and draws no random number, so equal calls give equal answers.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from backends.simulated.engine_profiles import EngineProfile

BlockKey = int | tuple[int, int]
"""A prefix hash given by the caller, or (request serial, block index) for text that only its own request can repeat."""


class BlockPool:
    """A pool of KV blocks: held, shared, cached for reuse, or free. O(1) per block.

    A full block has a key that stands for the whole text up to its end, so equal prefixes share keys. A block without a
    key (not full, or a second copy) has one holder. Blocks without a holder are free. A free block with a key can be
    hit until its space is taken, least recently used first.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blank = capacity
        self._cached: OrderedDict[BlockKey, None] = OrderedDict()
        self._held: dict[BlockKey, int] = {}

    @property
    def free(self) -> int:
        """Return the number of blocks that can be taken, cached ones included."""
        return self._blank + len(self._cached)

    def match(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Return the leading keys that are held or cached."""
        found: list[BlockKey] = []
        for key in keys:
            if key not in self._held and key not in self._cached:
                break
            found.append(key)
        return found

    def unheld(self, keys: Iterable[BlockKey]) -> int:
        """Return how many of these matched blocks are free now, so that adopting them uses up space."""
        return sum(1 for key in keys if key not in self._held)

    def adopt(self, keys: Iterable[BlockKey]) -> None:
        """Add a holder to each of these matched blocks."""
        for key in keys:
            holders = self._held.get(key, 0)
            if not holders:
                del self._cached[key]
            self._held[key] = holders + 1

    def take(self, count: int) -> None:
        """Take `count` blocks out of the free ones; the caller has compared with `free`."""
        evicted = count - self._blank
        if evicted <= 0:
            self._blank -= count
            return
        self._blank = 0
        for _ in range(evicted):
            self._cached.popitem(last=False)

    def name(self, key: BlockKey) -> bool:
        """Give a key to a full block. Return False if another block has the key, so that this one stays a private
        copy."""
        if key in self._held or key in self._cached:
            return False
        self._held[key] = 1
        return True

    def give_back(self, keys: Sequence[BlockKey], private: int) -> None:
        """Release a request's keyed blocks and `private` others. The end of a chain is evicted first."""
        self._blank += private
        for key in reversed(keys):
            holders = self._held[key] - 1
            if holders:
                self._held[key] = holders
            else:
                del self._held[key]
                self._cached[key] = None


class RequestRefusedError(ValueError):
    """The engine can never run this request: its lengths do not fit, or its id is in use."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A sequence to generate. `output_tokens=0` is a pooling request, which ends with its prefill.

    `block_hashes[i]` stands for the whole text up to the end of block i: equal hashes mean equal prefixes. The hashes
    may be shorter than the prompt (the rest is not shared) or reach into the output (a later turn can hit it).
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    block_hashes: tuple[int, ...] = ()


class EngineGauges(NamedTuple):
    """Gauges of `/metrics` as the last step left them: requests, blocks, and totals since the engine's start."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Fraction 0..1 of the usable blocks that requests hold; blocks kept only for reuse do not count."""
    kv_blocks: int = 0
    preemptions_total: int = 0
    """Late, as in vLLM: a preemption counts when its victim next gets a token."""
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0


@dataclass(slots=True)
class Step:
    """The effect of one batch, which begins at the call of `step` and is complete `duration_s` later."""

    duration_s: float
    scheduled_tokens: int = 0
    """Tokens computed by the step, of prompts and of answers."""
    tokens: list[tuple[str, int]] = field(default_factory=list)
    """(request, new tokens), in batch order."""
    finished: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    """Requests preempted for recomputation, before the step's tokens are made."""
    cached_tokens: dict[str, int] = field(default_factory=dict)
    """Prompt tokens found in the prefix cache, by request, of those that got their first token."""


class _Sequence:
    """A request inside the engine. Lengths are in tokens; `blocks` and `named` are numbers of blocks."""

    __slots__ = (
        "blocks", "cached", "computed", "emitted", "hashes", "id", "joined", "keys", "named", "one_token",
        "output_tokens", "planned", "prompt_tokens", "serial", "tokens", "uncounted_preemptions",
    )  # fmt: skip

    def __init__(self, request: EngineRequest, serial: int) -> None:
        self.id = request.id
        self.one_token = (request.id, 1)  # its contribution to a step, made once
        self.prompt_tokens = request.prompt_tokens
        self.output_tokens = request.output_tokens
        self.hashes = request.block_hashes
        self.serial = serial
        self.tokens = request.prompt_tokens  # known so far: the prompt and the emitted tokens
        self.emitted = 0
        self.computed = 0  # of `tokens`, how many have their KV
        self.planned = 0  # tokens to compute in this step
        self.joined = False  # admitted, and no token since
        self.cached: int | None = None  # prefix hit of the first admission
        self.uncounted_preemptions = 0
        self.blocks = 0  # held
        self.keys: list[BlockKey] = []  # of the held blocks, those that have a key
        self.named = 0  # leading blocks that were offered a key

    def key(self, block: int) -> BlockKey:
        """Return the key of a block once the block is full."""
        return self.hashes[block] if block < len(self.hashes) else (self.serial, block)


class EngineModel:
    """A continuous-batching engine: one queue, chunked prefill, paged KV, preemption by recompute."""

    def __init__(self, profile: EngineProfile) -> None:
        self.profile = profile
        self._pool = BlockPool(profile.usable_blocks)
        self._sequences: dict[str, _Sequence] = {}
        self._running: list[_Sequence] = []
        self._waiting: deque[_Sequence] = deque()
        self._serial = 0
        self._totals = dict.fromkeys([name for name in EngineGauges._fields if name.endswith("_total")], 0)
        self._gauges_before = self._gauges_after = EngineGauges()
        self._step_end_s = -math.inf

    @property
    def has_work(self) -> bool:
        """Return whether any request runs or waits."""
        return bool(self._sequences)

    def submit(self, request: EngineRequest) -> None:
        """Queue a request for the next step. Raise RequestRefusedError."""
        total = request.prompt_tokens + request.output_tokens
        if request.prompt_tokens < 1 or request.output_tokens < 0 or total > self.profile.max_model_len:
            raise RequestRefusedError(
                f"request {request.id}: {request.prompt_tokens} prompt and {request.output_tokens} output tokens do "
                f"not fit a model length of {self.profile.max_model_len}"
            )
        if request.id in self._sequences:
            raise RequestRefusedError(f"request {request.id}: this id is already in the engine")
        self._serial += 1
        sequence = self._sequences[request.id] = _Sequence(request, self._serial)
        self._waiting.append(sequence)

    def abort(self, request_id: str) -> None:
        """Forget a request and free its blocks at once. An unknown id belongs to a request that just finished."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        if sequence.blocks:
            self._running.remove(sequence)
            self._release(sequence)
        else:
            self._waiting.remove(sequence)
        if not self._sequences:  # vLLM runs an empty step, so that the gauges do not stay up
            self._gauges_after = self._read_gauges()

    def gauges(self, now: float = math.inf) -> EngineGauges:
        """Return the gauges that a scrape at `now` sees: within a step, those before it. The default is after the last
        step."""
        return self._gauges_after if now >= self._step_end_s else self._gauges_before

    def step(self, now: float) -> Step:
        """Schedule one batch at `now` and return its effect. The previous step must have ended."""
        batch, preempted = self._plan()
        result = Step(0.0, preempted=preempted)
        tokens = result.tokens
        prefill_tokens = decoding = context_tokens = 0
        done: list[_Sequence] = []
        for sequence in batch:  # runs for every token, so attributes are read once
            planned, known = sequence.planned, sequence.tokens
            sequence.planned = 0
            sequence.computed = computed = sequence.computed + planned
            if planned == 1:
                decoding += 1
                context_tokens += known
            else:
                prefill_tokens += planned
            if computed < known:
                continue  # a part of a long prompt
            if sequence.joined:
                self._note_first_output(sequence, result)
            if sequence.emitted < sequence.output_tokens:
                sequence.emitted += 1
                sequence.tokens = known + 1
                tokens.append(sequence.one_token)
            if sequence.emitted >= sequence.output_tokens:
                done.append(sequence)
        self._totals["generation_tokens_total"] += len(tokens)
        if done:
            self._finish(done, result)
        result.scheduled_tokens = prefill_tokens + decoding
        result.duration_s = self.profile.step_s(prefill_tokens, decoding, context_tokens)
        self._gauges_before = self._gauges_after
        self._gauges_after = self._read_gauges()
        self._step_end_s = now + result.duration_s
        return result

    def _plan(self) -> tuple[list[_Sequence], list[str]]:
        """Plan the tokens of every sequence in this step (`planned`). Running requests precede waiting ones."""
        budget = self.profile.max_num_batched_tokens
        block_size = self.profile.block_size
        running = self._running
        batch: list[_Sequence] = []
        preempted: list[str] = []
        for sequence in running:  # a preemption takes from the end
            if budget <= 0:
                break
            computed = sequence.computed
            count = sequence.tokens - computed
            if count > budget:
                count = budget
            end = computed + count
            if end > sequence.blocks * block_size:
                need = -(-end // block_size) - sequence.blocks
                while need > self._pool.free and sequence.blocks:
                    preempted.append(self._preempt())
                if not sequence.blocks:
                    break  # it preempted itself: no request behind it is served in this step
                self._grow(sequence, end)
            sequence.planned = count
            budget -= count
            batch.append(sequence)
        if not preempted:
            self._admit(batch, budget)
        return batch, preempted

    def _admit(self, batch: list[_Sequence], budget: int) -> None:
        """Admit waiting requests while their whole prompt fits. The first that does not fit blocks all behind it."""
        block_size = self.profile.block_size
        while self._waiting and budget > 0 and len(self._running) < self.profile.max_num_seqs:
            sequence = self._waiting[0]
            # The last token is always computed, since its logits are sampled.
            hits = self._pool.match(sequence.key(i) for i in range((sequence.tokens - 1) // block_size))
            need = -(-sequence.tokens // block_size) - len(hits) + self._pool.unheld(hits)
            if need > self._pool.free:
                return
            self._waiting.popleft()
            self._pool.adopt(hits)
            sequence.keys = hits
            sequence.blocks = sequence.named = len(hits)
            sequence.computed = len(hits) * block_size
            sequence.joined = True
            if sequence.cached is None:
                sequence.cached = sequence.computed
            sequence.planned = min(sequence.tokens - sequence.computed, budget)
            budget -= sequence.planned
            self._grow(sequence, sequence.computed + sequence.planned)
            self._running.append(sequence)
            batch.append(sequence)

    def _grow(self, sequence: _Sequence, end: int) -> None:
        """Allocate blocks for the tokens up to `end`. Blocks that will be full get their keys at once, as in vLLM."""
        block_size = self.profile.block_size
        blocks = -(-end // block_size)
        self._pool.take(blocks - sequence.blocks)
        sequence.blocks = blocks
        self._name_blocks(sequence, end // block_size)

    def _name_blocks(self, sequence: _Sequence, full: int) -> None:
        for block in range(sequence.named, full):
            key = sequence.key(block)
            if self._pool.name(key):
                sequence.keys.append(key)
        sequence.named = max(sequence.named, full)

    def _preempt(self) -> str:
        """Preempt the latest request. The request waits again ahead of later arrivals, and is recomputed."""
        victim = self._running.pop()  # admission keeps arrival order, so the last is the latest
        self._release(victim)
        victim.computed = 0
        victim.uncounted_preemptions += 1
        self._waiting.appendleft(victim)
        return victim.id

    def _release(self, sequence: _Sequence) -> None:
        self._name_blocks(sequence, sequence.computed // self.profile.block_size)
        self._pool.give_back(sequence.keys, sequence.blocks - len(sequence.keys))
        sequence.keys = []
        sequence.blocks = sequence.named = 0

    def _note_first_output(self, sequence: _Sequence, result: Step) -> None:
        """Count, as vLLM does only now, the first output since an admission."""
        sequence.joined = False
        self._totals["preemptions_total"] += sequence.uncounted_preemptions
        sequence.uncounted_preemptions = 0
        if sequence.emitted:
            return
        self._totals["prompt_tokens_total"] += sequence.prompt_tokens
        if sequence.cached:
            result.cached_tokens[sequence.id] = sequence.cached

    def _finish(self, done: list[_Sequence], result: Step) -> None:
        for sequence in done:
            result.finished.append(sequence.id)
            del self._sequences[sequence.id]
            self._release(sequence)
        self._running = [sequence for sequence in self._running if sequence.blocks]

    def _read_gauges(self) -> EngineGauges:
        kv_blocks, running = self._pool.capacity - self._pool.free, len(self._running)
        waiting = len(self._sequences) - running
        return EngineGauges(running, waiting, kv_blocks / self._pool.capacity, kv_blocks, **self._totals)
