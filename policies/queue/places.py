"""Whose place in the line is kept, of the clients that were refused with a time to come back?

A place that nobody comes back to is kept for a quarter of its wait longer.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

from policies.request import Flow, Request

KEPT_LONGER: Final = 0.25
"""Part of the wait. `retry-after` is in whole seconds and spread over a tenth more, and clients are late."""

Place = tuple[Flow, int]
"""By what a request is known when it comes back: its flow, and the tokens of its prompt."""


def place_of(request: Request) -> Place:
    return request.flow, request.prompt_tokens


class Places:
    """The places that are kept, and when their clients are to come back."""

    def __init__(self) -> None:
        self.due_s: dict[Place, float] = {}
        self._ends: list[tuple[float, float, Place]] = []
        """A heap: until when a place is kept, and for when it was given. Some of these places were given up since."""

    def entries(self) -> int:
        """In memory, for places that are kept and that were given up."""
        return len(self._ends)

    def keep(self, place: Place, wait_s: float, now: float) -> None:
        self.due_s[place] = now + wait_s
        heappush(self._ends, (now + wait_s * (1.0 + KEPT_LONGER), now + wait_s, place))
        if len(self._ends) > 2 * len(self.due_s) + 64:
            self._ends = [end for end in self._ends if self.due_s.get(end[2]) == end[1]]
            heapify(self._ends)

    def expired(self, now: float) -> list[Place]:
        """Places that nobody has come back to. They are no longer kept."""
        found: list[Place] = []
        while self._ends and self._ends[0][0] <= now:
            _, due_s, place = heappop(self._ends)
            if self.due_s.get(place) == due_s:
                del self.due_s[place]
                found.append(place)
        return found
