"""Queue places that are kept for clients that were told to retry later.

A returning client is recognised by its flow and the number of its prompt tokens. A place expires a quarter of its wait
after the retry is due.
"""

from __future__ import annotations

from collections import Counter
from heapq import heapify, heappop, heappush
from typing import Final

from policies.request import Flow, RejectReason, Request

KEPT_LONGER: Final = 0.25
"""Fraction of the wait. `retry-after` is in whole seconds and spread over a tenth more, and clients are late."""

Place = tuple[Flow, int]


class KeptPlaces:
    """The kept places, with the times at which their clients are to retry."""

    def __init__(self) -> None:
        self.due: dict[Place, tuple[float, RejectReason]] = {}
        """The kept places: time of the retry, and reason of the refusal."""
        self.counts: Counter[str] = Counter()
        """Number of kept places by tenant."""
        self._ends: list[tuple[float, float, Place]] = []
        """Heap of (expiry, time of the retry, place). An entry is stale if its place was given up or kept anew."""

    def left_s(self, request: Request, now: float) -> float | None:
        """Return the seconds until the retry is due; None if no place is kept for the request."""
        due = self.due.get((request.flow, request.prompt_tokens))
        return None if due is None else due[0] - now

    def keep(self, request: Request, why: RejectReason, wait_s: float, now: float) -> None:
        place = request.flow, request.prompt_tokens
        self.due[place] = now + wait_s, why
        self.counts[request.flow.tenant] += 1
        heappush(self._ends, (now + wait_s * (1.0 + KEPT_LONGER), now + wait_s, place))
        if len(self._ends) > 2 * len(self.due) + 64:
            self._ends = [end for end in self._ends if self._is_due(end)]
            heapify(self._ends)

    def take(self, request: Request) -> RejectReason | None:
        """Give up the place of a request that has come back. Return why it was refused; None if it had no place."""
        place = request.flow, request.prompt_tokens
        return self._give_up(place) if place in self.due else None

    def expire(self, now: float) -> None:
        """Give up the places whose clients have not come back."""
        while self._ends and self._ends[0][0] <= now:
            end = heappop(self._ends)
            if self._is_due(end):
                self._give_up(end[2])

    def _is_due(self, end: tuple[float, float, Place]) -> bool:
        due = self.due.get(end[2])
        return due is not None and due[0] == end[1]

    def _give_up(self, place: Place) -> RejectReason:
        _, why = self.due.pop(place)
        tenant = place[0].tenant
        self.counts[tenant] -= 1
        if not self.counts[tenant]:
            del self.counts[tenant]
        return why
