"""Least loaded: the engine that runs the fewest sequences for its number of slots."""

from __future__ import annotations

from collections.abc import Sequence

from policies.capacity.ledger import BackendLedger
from policies.placements.placement import Choice, Placement
from policies.request import Placed, Request


def loads(engines: Sequence[BackendLedger], *, usual: bool = False) -> list[float]:
    """Return the sequences of each engine, scaled to the mean number of slots.

    As long as the slots of one engine are not known, the sequences are not scaled. `usual`: take the recent average.
    """
    sequences = [engine.usual.sequences if usual else float(engine.sequences_in_all()) for engine in engines]
    slots = [engine.slots.known() or 0 for engine in engines]
    if 0 in slots:
        return sequences
    mean = sum(slots) / len(slots)
    return [running * mean / size for running, size in zip(sequences, slots, strict=True)]


def least_loaded(engines: Sequence[BackendLedger]) -> str:
    """Return the engine with the least load for its size. Ties go to the one with most KV free, then by name."""
    ranks = [(load, engine.kv_fraction(), engine.name) for load, engine in zip(loads(engines), engines, strict=True)]
    return min(ranks)[2]


class LeastLoaded(Placement):
    """The placement at the engine with the least load for its size."""

    def choose(self, request: Request, engines: Sequence[BackendLedger]) -> Choice:
        return least_loaded(engines), Placed.LEAST_LOADED
