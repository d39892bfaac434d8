"""Least loaded: the engine that runs the fewest sequences of what it can run."""

from __future__ import annotations

from collections.abc import Sequence

from policies.placements.placement import Choice, EngineLoad, Placement
from policies.request import Placed, Request


def loads(engines: Sequence[EngineLoad], *, usual: bool = False) -> list[float]:
    """Sequences that each engine runs, as if it were of the mean size; `usual`: what it ran on average lately.

    Sizes are slots. As long as one engine has not shown how many it has, all count as equally large.
    """
    sequences = [engine.usual.sequences if usual else float(engine.sequences_in_all()) for engine in engines]
    slots = [engine.slots.known() or 0 for engine in engines]
    if 0 in slots:
        return sequences
    mean = sum(slots) / len(slots)
    return [running * mean / size for running, size in zip(sequences, slots, strict=True)]


def least_loaded(engines: Sequence[EngineLoad]) -> str:
    """Name of the engine that runs least for its size. Of equal ones that with most KV free, then the first by name."""
    if len(engines) == 1:
        return engines[0].name
    ranks = [(load, engine.kv_fraction(), engine.name) for load, engine in zip(loads(engines), engines, strict=True)]
    return min(ranks)[2]


class LeastLoaded(Placement):
    """Which engine runs least for its size?"""

    def choose(self, request: Request, engines: Sequence[EngineLoad]) -> Choice:
        return least_loaded(engines), Placed.LEAST_LOADED if len(engines) > 1 else Placed.ONLY
