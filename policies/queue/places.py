"""Which places in the line are kept, for clients that were refused with a time to come back?

A client is known when it comes back by its flow and the tokens of its prompt. A place to which nobody comes back is
kept for a quarter of its wait longer.
"""

from __future__ import annotations

from collections import Counter
from heapq import heapify, heappop, heappush
from typing import Final

from policies.request import Flow, Refusal, Request

KEPT_LONGER: Final = 0.25
"""Part of the wait. `retry-after` is in whole seconds and spread over a tenth more, and clients are late."""

Place = tuple[Flow, int]


class Places:
    """The places that are kept, and when their clients are to come back."""

    def __init__(self) -> None:
        self._due: dict[Place, tuple[float, Refusal]] = {}
        """When, and why it was refused."""
        self._kept: Counter[str] = Counter()
        """By tenant."""
        self._ends: list[tuple[float, float, Place]] = []
        """A heap: until when a place is kept, and for when it was given. Some of these places were given up since."""

    def __len__(self) -> int:
        """Return how many places are kept."""
        return len(self._due)

    def kept(self, tenant: str) -> int:
        """Return how many places of this tenant are kept."""
        return self._kept[tenant]

    def left_s(self, request: Request, now: float) -> float | None:
        """Return the seconds until the request is due to come back; None: no place is kept for it."""
        due = self._due.get((request.flow, request.prompt_tokens))
        return None if due is None else due[0] - now

    def keep(self, request: Request, why: Refusal, wait_s: float, now: float) -> None:
        place = request.flow, request.prompt_tokens
        self._due[place] = now + wait_s, why
        self._kept[request.flow.tenant] += 1
        heappush(self._ends, (now + wait_s * (1.0 + KEPT_LONGER), now + wait_s, place))
        if len(self._ends) > 2 * len(self._due) + 64:
            self._ends = [end for end in self._ends if self._is_due(end)]
            heapify(self._ends)

    def take(self, request: Request) -> Refusal | None:
        """Give up the place of a request that has come back. Return why it was refused; None: no place was kept."""
        place = request.flow, request.prompt_tokens
        return self._give_up(place) if place in self._due else None

    def expire(self, now: float) -> None:
        """Give up the places to which nobody has come back."""
        while self._ends and self._ends[0][0] <= now:
            end = heappop(self._ends)
            if self._is_due(end):
                self._give_up(end[2])

    def _is_due(self, end: tuple[float, float, Place]) -> bool:
        due = self._due.get(end[2])
        return due is not None and due[0] == end[1]

    def _give_up(self, place: Place) -> Refusal:
        _, why = self._due.pop(place)
        tenant = place[0].tenant
        self._kept[tenant] -= 1
        if not self._kept[tenant]:
            del self._kept[tenant]
        return why
