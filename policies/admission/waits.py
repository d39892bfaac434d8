"""What held each request back, and for how long?

The next request in order waits for what the pool lacks: its obstacle counts. All others wait for their turn. So an
event pays the time since the last one to the next in order alone, and what is left of a request's wait at its end was
its turn. If no engine is in service, everybody waits for one: that is a clock of the pool, which a request reads when
it is queued and when it leaves. An event costs O(1), however many requests wait (O(engines) where each engine has a
queue of its own).

Nothing is decided by this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from policies.capacity.obstacle import Blocked, Obstacle
from policies.request import Request, Wait

NEVER_WAITED: Final[Mapping[str, float]] = {}


class Waits:
    """The clocks of one pool."""

    def __init__(self) -> None:
        self._blocked: Blocked | None = None
        """What has held back the next in order since `_since_s`."""
        self._since_s = 0.0
        self._closed_s = 0.0
        """How long no engine was in service while requests waited."""

    def blocked(self, blocked: Blocked | None, now: float) -> None:
        """From now on this is what the next in order waits for; None: nothing waits for room."""
        if self._blocked is not None:
            self._pay(now)
        self._blocked = blocked
        self._since_s = now

    def began(self, request: Request, now: float, *, asked: bool) -> None:
        """The request could not start at once. `asked`: other gateways are asked first."""
        rest = Obstacle.ASKED if asked else Obstacle.TURN
        request.progress.wait = Wait(now, rest, self._closed_by(now))

    def answered(self, request: Request, now: float) -> None:
        """Other gateways have answered: the request is queued from now on."""
        wait = request.progress.wait
        assert wait is not None
        _add(wait.by, wait.rest, now - wait.since_s)
        wait.rest, wait.closed_s = Obstacle.TURN, self._closed_by(now)

    def returned(self, request: Request, dispatched_s: float, now: float) -> None:
        """The engine that had the request since then gave it back."""
        wait = request.progress.wait
        if wait is None:
            wait = request.progress.wait = Wait(dispatched_s, Obstacle.TURN, 0.0)
        self.goes_on(wait, now)
        _add(wait.by, Obstacle.RETURNED, now - dispatched_s)

    def goes_on(self, wait: Wait, now: float) -> None:
        """A wait had ended, and its request waits again, be it in another pool."""
        wait.closed_s, wait.ended_s = self._closed_by(now), -1.0

    def ended(self, request: Request, now: float) -> None:
        """The request waits no longer."""
        wait = request.progress.wait
        if wait is not None:
            self._pay(now)
            if wait.rest is Obstacle.TURN:
                _add(wait.by, Obstacle.CLOSED, self._closed_s - wait.closed_s)
            wait.ended_s = now

    def so_far(self, request: Request, now: float) -> Mapping[str, float]:
        """Seconds by obstacle of a request that waits. Changes nothing."""
        wait = request.progress.wait
        if wait is None:
            return NEVER_WAITED
        by = wait.by.copy()
        if wait.rest is Obstacle.TURN:
            _add(by, Obstacle.CLOSED, self._closed_by(now) - wait.closed_s)
        if self._blocked is not None and not _is_closed(self._blocked):
            for each in (self._blocked, *self._blocked.others):
                if each.request is request:
                    _add(by, each.nearest(), now - self._since_s)
        return _with_rest(by, wait, now)

    def _pay(self, now: float) -> None:
        """The time since the last event counts for what the next in order waited for."""
        elapsed_s, blocked = now - self._since_s, self._blocked
        if elapsed_s <= 0 or blocked is None:
            return
        self._since_s = now
        if _is_closed(blocked):
            self._closed_s += elapsed_s
            return
        for each in (blocked, *blocked.others):
            wait = each.request.progress.wait
            if wait is not None:
                _add(wait.by, each.nearest(), elapsed_s)

    def _closed_by(self, now: float) -> float:
        """The clock of `Obstacle.CLOSED`."""
        if self._blocked is None or now <= self._since_s or not _is_closed(self._blocked):
            return self._closed_s
        return self._closed_s + now - self._since_s


def seconds_of(wait: Wait | None) -> Mapping[str, float]:
    """What did a request wait for that waits no longer? Seconds by obstacle; their sum is all of its wait."""
    return NEVER_WAITED if wait is None else _with_rest(wait.by.copy(), wait, wait.ended_s)


def _with_rest(by: dict[str, float], wait: Wait, now: float) -> dict[str, float]:
    _add(by, wait.rest, now - wait.since_s - sum(by.values()))
    return by


def _is_closed(blocked: Blocked) -> bool:
    """Is no engine in service for anybody?"""
    return all([each.nearest() is Obstacle.CLOSED for each in (blocked, *blocked.others)])


def _add(by: dict[str, float], obstacle: str, seconds: float) -> None:
    if seconds > 0:
        by[obstacle] = by.get(obstacle, 0.0) + seconds
