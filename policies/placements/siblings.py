"""Which queued requests begin alike?

Requests are found by the hashes of their blocks at depths 1, 2, 4, 8, ..., so a request costs O(log blocks).
"""

from __future__ import annotations

from typing import Final

from policies.placements.prefix_index import Prefix
from policies.request import Request

LOOKED_UP: Final = 2
"""Siblings looked up again at each dispatch. The dispatch of a sibling looks up further siblings, so all are reached in
time."""


class SamePrefixRequests:
    """The requests of one queue, by the beginnings of their prompts."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[str, Request]] = {}

    def add(self, request: Request) -> None:
        for block in _landmarks(request.prefix):
            self._waiting.setdefault(block, {})[request.id] = request

    def remove(self, request: Request) -> None:
        for block in _landmarks(request.prefix):
            alike = self._waiting[block]
            del alike[request.id]
            if not alike:
                del self._waiting[block]

    def nearest(self, prefix: Prefix) -> list[Request]:
        """Return at most `LOOKED_UP` requests: the longest common beginning first, then the oldest."""
        found: dict[str, Request] = {}
        for block in reversed(_landmarks(prefix)):
            for request in self._waiting.get(block, {}).values():
                found[request.id] = request
                if len(found) == LOOKED_UP:
                    return [*found.values()]
        return [*found.values()]

    def depth(self, prefix: Prefix) -> int:
        """Return how many leading blocks a waiting request shares with this prefix, to within a factor of two."""
        depth, shared = 1, 0
        for block in _landmarks(prefix):
            if block not in self._waiting:
                break
            depth, shared = 2 * depth, depth
        return shared


def _landmarks(prefix: Prefix) -> list[int]:
    """Return the keys of a prefix at depths 1, 2, 4, 8 and so on."""
    marks, depth = [], 1
    while depth <= len(prefix):
        marks.append(prefix[depth - 1])
        depth *= 2
    return marks
