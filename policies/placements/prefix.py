"""Longest prefix: of the engines with room, the one whose cache holds most of the prompt's beginning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policies.placements.contract import EngineLoad, Placement
from policies.placements.least_loaded import least_loaded
from policies.placements.prefix_index import PrefixIndex
from policies.request import Request

__all__ = ["LongestPrefix"]


class LongestPrefix(Placement):
    """Which engine has most of the prompt cached? The least loaded one if no other has more of it."""

    reads_prefixes = True

    def __init__(self, params: Any = None, *, prefixes: PrefixIndex | None = None, flows_max: int = 10_000) -> None:
        self._prefixes = prefixes if prefixes is not None else PrefixIndex()

    def choose(self, request: Request, engines: Sequence[EngineLoad]) -> str:
        free = least_loaded(engines)
        if not request.prefix or len(engines) == 1:
            return free
        depths = self._prefixes.depths(request.prefix)
        names = [engine.name for engine in engines]
        deepest = max([depths.get(name, 0) for name in names])
        if deepest <= depths.get(free, 0):
            return free
        return min([name for name in names if depths.get(name, 0) == deepest])
