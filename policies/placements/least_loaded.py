"""Least loaded: the engine whose KV cache will be the least full."""

from __future__ import annotations

from collections.abc import Sequence

from policies.placements.contract import EngineLoad, Placement
from policies.request import Request

__all__ = ["LeastLoaded", "least_loaded"]


def least_loaded(engines: Sequence[EngineLoad]) -> str:
    """Name of the engine with the least KV in use or expected, as a fraction of its size. Ties go to the first by
    name.
    """
    if len(engines) == 1:
        return engines[0].name
    return min([(engine.kv_fraction(), engine.name) for engine in engines])[1]


class LeastLoaded(Placement):
    """Which engine has the largest fraction of its KV cache free?"""

    def choose(self, request: Request, engines: Sequence[EngineLoad]) -> str:
        return least_loaded(engines)
