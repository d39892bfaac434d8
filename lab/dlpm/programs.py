"""Traffic whose prompts share their beginnings ("Locality-aware Fair Scheduling", arXiv 2501.14312, section 6.1).

A program is a tree of calls: a call is sent when its parent has been answered, and all children of a call are sent at
once. Every prompt is its parent's prompt, or a part of it, with something of its own behind. The published data sets
are not needed: only lengths and what is shared matter here, and those are the paper's (tables 2 and 3).

The first client is the one that misbehaves, by more requests (S1) or by longer prefixes (S2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Literal

from policies.request import Flow
from simulation.run import Arrival, Record

BLOCK_TOKENS = 64
"""Block size of the engines that serve it. Coarser than vLLM's 16, so that long documents simulate fast."""
QUESTION_TOKENS = 64
"""Tokens of a question about a document, or to a judge: never shared."""
SEED = 42

Misbehaviour = Literal["none", "more", "longer"]
"""Misbehaviour of the first client: none, S1, S2."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One call. Its prompt: `pieces` as (name, tokens); calls with equal first pieces share that part of the prompt."""

    pieces: tuple[tuple[int, int], ...]
    output_tokens: int
    children: Sequence[_Call] = ()

    @property
    def prompt_tokens(self) -> int:
        return sum(tokens for _, tokens in self.pieces)

    def prefix(self) -> tuple[int, ...]:
        """Chained hashes of the full blocks."""
        hashes: list[int] = []
        chain, filled = 0, 0
        for name, tokens in self.pieces:
            chain = hash((chain, name))
            whole = (filled + tokens) // BLOCK_TOKENS
            hashes += [hash((chain, block)) for block in range(whole - filled // BLOCK_TOKENS)]
            filled += tokens
        return tuple(hashes)


@dataclass(frozen=True, slots=True)
class _Program:
    """Calls that a client sends one after the other or side by side; the first ones at `starts_s`."""

    client: str
    starts_s: float
    calls: Sequence[_Call]


class Programs:
    """The traffic of one experiment: what is sent when, and how long each program took from its start to its end."""

    def __init__(self, programs: Sequence[_Program]) -> None:
        self._programs = sorted(programs, key=lambda program: program.starts_s)
        self._calls: dict[str, tuple[int, _Call]] = {}
        self._open = [0] * len(programs)
        self._ended_s = [0.0] * len(programs)
        self._serial = count()

    def arrivals(self) -> Iterator[Arrival]:
        """The first calls of all programs, in order of time."""
        for number, program in enumerate(self._programs):
            for call in program.calls:
                yield self._arrival(number, call, program.starts_s)

    def next_arrival(self, record: Record, now: float) -> Sequence[Arrival]:
        """Return the arrivals that follow when this call has ended."""
        number, call = self._calls.pop(record.arrival.id)
        self._open[number] -= 1
        self._ended_s[number] = now
        return [self._arrival(number, child, now) for child in call.children]

    def latencies_s(self) -> dict[str, list[float]]:
        """Return by client the seconds from the start to the last answer of each program that has ended."""
        found: dict[str, list[float]] = {}
        for program, open_calls, ended_s in zip(self._programs, self._open, self._ended_s, strict=True):
            if not open_calls and ended_s:
                found.setdefault(program.client, []).append(ended_s - program.starts_s)
        return found

    def _arrival(self, number: int, call: _Call, now: float) -> Arrival:
        client = self._programs[number].client
        request_id = f"{client}-{next(self._serial)}"
        self._calls[request_id] = (number, call)
        self._open[number] += 1
        return Arrival(
            request_id, Flow(client), now, call.prompt_tokens, call.output_tokens, 2 * call.output_tokens,
            prefix=call.prefix(),
        )  # fmt: skip


def long_context_qa(
    clients: int,
    requests: int,
    rate: float,
    *,
    misbehaviour: Misbehaviour,
    documents: int = 3,
    document_tokens: int = 21_449,
    output_tokens: int = 15,
    seed: int = SEED,
) -> Programs:
    """Questions about long documents. S1: four times as many, about as many more documents; S2: twice the length.

    `requests` per client at `rate` per second, each about one of its client's `documents`.
    """
    make = _Maker(seed)
    programs = []
    for client in range(clients):
        times = 4 if misbehaviour == "more" and client == 0 else 1
        longer = 2 if misbehaviour == "longer" and client == 0 else 1
        texts = [make.piece(longer * make.around(document_tokens)) for _ in range(times * documents)]
        for starts_s in make.starts(times * requests, times * rate):
            document = texts[make.random.randrange(len(texts))]
            call = _Call((document, make.piece(QUESTION_TOKENS)), output_tokens)
            programs.append(_Program(str(client), starts_s, (call,)))
    return Programs(programs)


def tree_of_thoughts(
    clients: int,
    trees: int,
    rate: float,
    *,
    misbehaviour: Misbehaviour,
    branches: int = 2,
    height: int = 4,
    question_tokens: int = 546,
    output_tokens: int = 256,
    seed: int = SEED,
) -> Programs:
    """Every thought is followed by `branches` others, `height` deep. S1: 4 branches (340 calls); S2: 10x the question.

    `trees` per client at `rate` per second.
    """
    make = _Maker(seed)
    programs = []
    for client in range(clients):
        width = 4 if misbehaviour == "more" and client == 0 else branches
        longer = 10 if misbehaviour == "longer" and client == 0 else 1
        for starts_s in make.starts(trees, rate):
            question = make.piece(longer * make.around(question_tokens))
            calls = make.thoughts((question,), width, height, output_tokens)
            programs.append(_Program(str(client), starts_s, calls))
    return Programs(programs)


def judge(
    clients: int,
    articles: int,
    rate: float,
    *,
    misbehaviour: Misbehaviour,
    dimensions: int = 2,
    article_tokens: int = 2701,
    output_tokens: int = 256,
    seed: int = SEED,
) -> Programs:
    """Branch, solve, merge: plan how to judge an article, judge it in each dimension, sum up.

    S1: 16 dimensions; S2: 600 tokens more before each article. `articles` per client at `rate` per second.
    """
    make = _Maker(seed)
    programs = []
    for client in range(clients):
        solves = 16 if misbehaviour == "more" and client == 0 else dimensions
        extra = 600 if misbehaviour == "longer" and client == 0 else 0
        for starts_s in make.starts(articles, rate):
            article = make.piece(extra + make.around(article_tokens))
            judged = [make.piece(output_tokens) for _ in range(solves)]
            merge = _Call((article, *judged), output_tokens)
            # The sum needs all judgements; it is sent after the last of them, which is as long as the others.
            solving = [_Call((article, make.piece(QUESTION_TOKENS)), output_tokens) for _ in range(solves)]
            solving[-1] = _Call(solving[-1].pieces, output_tokens, (merge,))
            plan = _Call((article, make.piece(QUESTION_TOKENS)), output_tokens, solving)
            programs.append(_Program(str(client), starts_s, (plan,)))
    return Programs(programs)


class _Maker:
    """The random draws of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self._names = count()

    def piece(self, tokens: int) -> tuple[int, int]:
        """A text that nothing else contains."""
        return next(self._names), tokens

    def around(self, tokens: int) -> int:
        """A length of this mean."""
        return round(tokens * self.random.uniform(0.5, 1.5))

    def starts(self, number: int, rate: float) -> list[float]:
        """Times of a Gamma process with a coefficient of variation of 1."""
        now, times = 0.0, []
        for _ in range(number):
            now += self.random.gammavariate(1.0, 1.0 / rate)
            times.append(now)
        return times

    def thoughts(self, path: tuple[tuple[int, int], ...], width: int, height: int, tokens: int) -> list[_Call]:
        """The calls that follow a path of thoughts, with all that follows them."""
        if not height:
            return []
        calls = []
        for _ in range(width):
            thought = self.piece(tokens)
            calls.append(_Call(path, tokens, self.thoughts((*path, thought), width, height - 1, tokens)))
        return calls
