"""Detection of the engines behind an access log: the nearest profile, at the measured speed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil, log
from statistics import median

from backends.simulated.engine_profiles import PROFILES, EngineProfile
from simulation.traces.rows import EngineStay, TracedRequest

REQUESTS_MAX = 100_000
"""Requests used; more would not change the speed."""
ANSWERS_MIN = 10
ALIKE = 1.25
"""Factor within which a profile is as fast as the measurement."""
SLOTS_FACTOR, KV_FACTOR = 1.1, 2.0
"""Tolerated excess over a profile: a log tells beginnings and sizes roughly, and an engine also holds cached blocks."""
ROUNDED_S = 0.002
"""Rounding of times in the log: two requests that overlap by less did not run together."""


@dataclass(frozen=True, slots=True)
class EngineEstimate:
    """The profile of the engines; `backends` is the number that were busy at once, and `why` a sentence of reasons."""

    profile: EngineProfile
    backends: int
    why: str


@dataclass(slots=True)
class _Engine:
    """Totals of one engine so far: sequences and their tokens, and both integrated over time."""

    now_s: float = 0.0
    sequences: int = 0
    tokens: float = 0.0
    sequence_s: float = 0.0
    token_s: float = 0.0
    prefilled: float = 0.0

    def advance(self, now_s: float) -> tuple[float, float, float]:
        self.sequence_s += self.sequences * (now_s - self.now_s)
        self.token_s += self.tokens * (now_s - self.now_s)
        self.now_s = now_s
        return self.sequence_s, self.token_s, self.prefilled


@dataclass(frozen=True, slots=True)
class _MeasuredRequest:
    """A request at an engine: its duration, its steps, the mean load with the request included, and the tokens that the
    engine prefilled meanwhile."""

    took_s: float
    steps: int
    sequences: float
    tokens: float
    prefilled: float

    def slowness(self, profile: EngineProfile) -> float:
        """Return the engine's time in relation to the profile's."""
        beside_s = profile.per_seq_s * self.sequences + profile.per_context_token_s * self.tokens
        return self.took_s / (self.steps * (profile.base_s + beside_s) + profile.per_prefill_token_s * self.prefilled)


class _LogTotals:
    """Totals of one access log: the peaks of sequences, tokens, context and engines, and each answer with its load."""

    def __init__(self, entries: Iterable[TracedRequest]) -> None:
        self.answers: list[_MeasuredRequest] = []
        self.sequences = self.backends = self.context = 0
        self.tokens = 0.0
        self.waited_for: set[str] = set()
        served = [(entry, entry.served) for entry in islice(entries, REQUESTS_MAX) if entry.served is not None]
        events = []
        for number, (entry, one) in enumerate(served):
            self.context = max(self.context, entry.prompt_tokens + (entry.output_tokens or 0))
            self.waited_for.update(one.waited_for)
            ended_s = max(one.dispatched_s, one.ended_s - ROUNDED_S)
            events += [(one.dispatched_s, 1, number), (ended_s, -1 if ended_s > one.dispatched_s else 2, number)]
        self._sweep(served, sorted(events))

    def _sweep(self, served: list[tuple[TracedRequest, EngineStay]], events: list[tuple[float, int, int]]) -> None:
        engines: dict[str, _Engine] = {}
        began: dict[int, tuple[float, float, float]] = {}
        for now_s, kind, number in events:
            entry, one = served[number]
            engine = engines.setdefault(one.backend, _Engine(now_s))
            reading = engine.advance(now_s)
            output_tokens = entry.output_tokens or entry.output_tokens_min
            tokens = entry.prompt_tokens + output_tokens / 2
            if kind == 1:
                began[number] = reading
                engine.prefilled += entry.prompt_tokens - len(entry.hash_ids) * entry.block_tokens
                engine.sequences += 1
                engine.tokens += tokens
                self.sequences = max(self.sequences, engine.sequences)
                self.tokens = max(self.tokens, engine.tokens)
                self.backends = max(self.backends, sum(each.sequences > 0 for each in engines.values()))
                continue
            engine.sequences -= 1
            engine.tokens -= tokens
            took_s = now_s - one.dispatched_s
            if output_tokens and took_s > 0:
                sequence_s, token_s, prefilled = (
                    after - before for after, before in zip(reading, began[number], strict=True)
                )
                self.answers.append(
                    _MeasuredRequest(took_s, output_tokens, sequence_s / took_s, token_s / took_s, prefilled)
                )


def measured(entries: Iterable[TracedRequest]) -> EngineEstimate | None:
    """Detect the engines, or return None if the trace says too little."""
    found = _LogTotals(entries)
    if len(found.answers) < ANSWERS_MIN:
        return None
    longest = sorted(found.answers, key=lambda answer: answer.steps)[len(found.answers) // 2 :]
    slowness = {one: median(answer.slowness(one) for answer in longest) for one in PROFILES.values()}
    holding = [one for one in slowness if _could_run(one, found)] or [*slowness]
    profile = min(holding, key=lambda one: (abs(log(slowness[one])), -one.max_model_len))
    why = f"The engine is chosen by the log: {len(found.answers):,} answers took {slowness[profile]:.2f} times as long"
    why += f" as at {profile.name}"
    if not 1 / ALIKE < slowness[profile] < ALIKE:
        profile = _slower(profile, slowness[profile])
        why += ", so each step does"
    return EngineEstimate(_limited(profile, found), found.backends, f"{why}; at most {found.sequences} ran at once.")


def _could_run(profile: EngineProfile, found: _LogTotals) -> bool:
    """Return whether the profile could run the observed load."""
    capacity_tokens = profile.usable_blocks * profile.block_size
    return (
        profile.max_num_seqs * SLOTS_FACTOR >= found.sequences
        and capacity_tokens * KV_FACTOR >= found.tokens
        and profile.max_model_len >= found.context
    )


def _slower(profile: EngineProfile, factor: float) -> EngineProfile:
    """Return the profile with each step `factor` times as long."""
    names = ("base_s", "per_prefill_token_s", "per_seq_s", "per_context_token_s")
    costs = {name: getattr(profile, name) * factor for name in names}
    return replace(profile, name=f"{profile.name} at {1 / factor:.2g} of its speed", **costs)


def _limited(profile: EngineProfile, found: _LogTotals) -> EngineProfile:
    """Return the profile with the observed slots and KV, where requests waited for them."""
    sequences, tokens = profile.max_num_seqs, profile.usable_blocks * profile.block_size
    if "slots" in found.waited_for or found.sequences > sequences:
        sequences = found.sequences
    if ("kv" in found.waited_for and found.tokens * KV_FACTOR < tokens) or found.tokens > tokens * KV_FACTOR:
        tokens = ceil(found.tokens)
    context = max(found.context, min(profile.max_model_len, tokens))
    return replace(
        profile,
        max_num_seqs=sequences,
        max_num_batched_tokens=max(profile.max_num_batched_tokens, sequences),
        num_gpu_blocks=ceil(max(tokens, context) / profile.block_size) + 1,
        max_model_len=context,
    )
