"""By prefix: of the engines that can start a request now, the engine at which the request is done soonest.

An engine need not compute cached tokens. So the time until a request is done follows from two numbers: the tokens that
the engine still has to compute (earlier prompts, and the part of this prompt that is not cached), and the sequences
that run there. Each running sequence counts as `SEQUENCE_TOKENS` of prompt. Tokens that are not cached count `MOVED`
times, because later calls of the conversation find them only where they were computed. The cost at an engine is
multiplied by how many times slower than the fastest its measured pace is.

Bounded imbalance: an engine that runs more than `IMBALANCE` times the mean, and `SPARE` more, gets nothing as long as
another engine has room. So a prefix that many requests share spreads to more engines before it overloads one. The
excess must have lasted for a while, or be larger than chance brings: conversations come and go by chance, and a
conversation that is driven from its cache is computed anew.

An engine where no request runs with the wanted adapter (LoRA) must load it first, which counts as `ADAPTER_TOKENS` more
tokens that are not cached. The engines' own reports of adapters are not read: vLLM's page has a line for every set of
adapters that ran together.

A prompt without any block in a cache goes to an engine by rendezvous hashing with bounded load: each engine has a score
from the hash of the prompt's first block and the engine's name. The highest score wins among the engines that are not
above the bound, if possible among engines that run the adapter. All gateways compute equal scores, so prompts that
begin alike meet without any exchange between gateways.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final

from policies.capacity.ledger import BackendLedger
from policies.placements.least_loaded import least_loaded, loads
from policies.placements.placement import Choice, Placement
from policies.placements.prefix_index import PrefixIndex, tokens_of_blocks
from policies.request import Placed, Request

SEQUENCE_TOKENS: Final = 16.0
"""Cost of one running sequence to a new request, in prompt tokens to compute."""
MOVED: Final = 8.0
"""Number of times that a prompt sent to another engine is computed anew, or evicts another prompt, before its
conversation ends."""
ADAPTER_TOKENS: Final = 1024.0
"""Cost of loading an adapter (LoRA), in prompt tokens to compute: some 100 MB, about a tenth of a second."""
IMBALANCE: Final = 1.2
CHANCE: Final = 2.0
"""Standard deviations that count as chance. For arrivals by chance (Poisson), the variance is the mean."""
SPARE: Final = 3.0
"""Sequences that an engine may run beyond the bound, so that few requests may all be where their prompts are."""
_BITS: Final = (1 << 64) - 1
SLOWER: Final = 1.5
"""Ratio up to which paces are taken for equal: they differ by chance and by load."""


class ByPrefix(Placement):
    """The placement at the engine where a request is expected to be done soonest."""

    reads_prefixes = True

    def __init__(self, params: Any = None, *, prefixes: PrefixIndex | None = None, flows_max: int = 10_000) -> None:
        self._prefixes = prefixes if prefixes is not None else PrefixIndex()

    def choose(self, request: Request, engines: Sequence[BackendLedger]) -> Choice:
        running = loads(engines)
        prefix = request.prefix
        if not prefix:
            return least_loaded(engines), Placed.LEAST_LOADED
        depths = self._prefixes.depths(prefix)
        if not depths:
            most = IMBALANCE * _mean(running)
            within = [engine for engine, load in zip(engines, running, strict=True) if load < most]
            having = [engine for engine in within if request.adapter in engine.adapters]
            highest = max([(_score(prefix[0], engine.name), engine.name) for engine in having or within or engines])
            return highest[1], Placed.RENDEZVOUS
        paces, over = _paces(engines), _over(engines, running)
        costs = []
        for engine, load, pace, is_over in zip(engines, running, paces, over, strict=True):
            cached = tokens_of_blocks(depths.get(engine.name, 0), prefix, request.prompt_tokens)
            missing = float(request.prompt_tokens - cached)
            if request.adapter and request.adapter not in engine.adapters:
                missing += ADAPTER_TOKENS
            todo = engine.prefill_tokens + MOVED * missing
            costs.append((is_over, pace * (todo + SEQUENCE_TOKENS * load), engine.name))
        chosen = min(costs)[2]
        has_most = depths.get(chosen, 0) == max(depths.values())
        return chosen, Placed.CACHED if has_most else Placed.SPREAD


def _mean(running: Sequence[float]) -> float:
    """Return the mean load, including the request that is placed."""
    return (sum(running) + 1) / len(running)


def _over(engines: Sequence[BackendLedger], running: Sequence[float]) -> list[bool]:
    """Return for each engine whether it is above the bound: it then gets nothing while another engine has room."""
    mean = _mean(running)
    least = IMBALANCE * mean + SPARE
    if max(running) < least:
        return [False] * len(running)
    most = least + CHANCE * math.sqrt(mean)
    usual = loads(engines, usual=True)
    usual_most = IMBALANCE * sum(usual) / len(usual) + SPARE
    return [
        load >= most or (load >= least and average >= usual_most) for load, average in zip(running, usual, strict=True)
    ]


def _paces(engines: Sequence[BackendLedger]) -> list[float]:
    """Return how many times slower each engine is than the fastest; 1.0 if not known or at most `SLOWER`."""
    known = [engine.pace.known_token_s() for engine in engines]
    best = min([pace for pace in known if pace is not None], default=0.0)
    return [pace / best if pace is not None and pace > SLOWER * best else 1.0 for pace in known]


def _score(block: int, engine: str) -> int:
    """Return a pseudo-random number of 64 bits for the pair, which all gateways compute alike."""
    mixed = (block ^ _name_hash(engine)) * 0x9E3779B97F4A7C15 & _BITS
    mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & _BITS
    return mixed ^ mixed >> 32


@lru_cache(maxsize=4096)
def _name_hash(engine: str) -> int:
    return int.from_bytes(blake2b(engine.encode(), digest_size=8).digest())
