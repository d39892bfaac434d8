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

__all__ = ["NEVER_WAITED", "Waits", "seconds_of"]

NEVER_WAITED: Final[Mapping[str, float]] = {}


class Waits:
    """The clocks of one pool."""

    def __init__(self) -> None:
        self._next: Blocked | None = None
        """What held back the next in order since `_since_s`."""
        self._since_s = 0.0
        self._closed_s = 0.0
        """How long no engine was in service while requests waited."""

    def blocked(self, blocked: Blocked | None, now: float) -> None:
        """From now on this is what the next in order waits for; None: nothing waits for room."""
        if self._next is not None:
            self._pay(now)
        self._next = blocked
        self._since_s = now

    def began(self, request: Request, now: float, *, asked: bool) -> None:
        """It could not start at once. `asked`: other gateways are asked first."""
        rest = Obstacle.ASKED if asked else Obstacle.TURN
        request.progress.wait = Wait(now, rest, self._closed_by(now))

    def answered(self, request: Request, now: float) -> None:
        """Other gateways have answered: it is queued from now on."""
        wait = request.progress.wait
        assert wait is not None
        _add(wait, wait.rest, now - wait.since_s)
        wait.rest, wait.closed_s = Obstacle.TURN, self._closed_by(now)

    def returned(self, request: Request, dispatched_s: float, now: float) -> None:
        """The engine that had it since then gave it back."""
        wait = request.progress.wait
        if wait is None:
            wait = request.progress.wait = Wait(dispatched_s, Obstacle.TURN, 0.0)
        self.goes_on(wait, now)
        _add(wait, Obstacle.RETURNED, now - dispatched_s)

    def goes_on(self, wait: Wait, now: float) -> None:
        """It had ended, and its request waits again, be it in another pool."""
        if wait.closed_s:
            _add(wait, Obstacle.CLOSED, wait.closed_s)
        wait.closed_s, wait.ended_s = self._closed_by(now), -1.0

    def ended(self, request: Request, now: float) -> None:
        """It waits no longer."""
        wait = request.progress.wait
        if wait is not None:
            if self._next is not None:
                self._pay(now)
            wait.closed_s = self._closed_s - wait.closed_s if wait.rest is Obstacle.TURN else 0.0
            wait.ended_s = now

    def so_far(self, request: Request, now: float) -> Mapping[str, float]:
        """Seconds by obstacle of a request that waits. Changes nothing."""
        wait = request.progress.wait
        if wait is None:
            return NEVER_WAITED
        closed_s = self._closed_by(now) - wait.closed_s if wait.rest is Obstacle.TURN else 0.0
        blocked = self._next
        if blocked is None or _is_closed(blocked):
            return _seconds(wait, now, closed_s, None, 0.0)
        for each in (blocked, *blocked.others):
            if each.request is request:
                return _seconds(wait, now, closed_s, each.nearest(), max(0.0, now - self._since_s))
        return _seconds(wait, now, closed_s, None, 0.0)

    def _pay(self, now: float) -> None:
        """The time since the last event counts for what the next in order waited for."""
        elapsed_s = now - self._since_s
        blocked = self._next
        if elapsed_s <= 0 or blocked is None:
            return
        self._since_s = now
        if _is_closed(blocked):
            self._closed_s += elapsed_s
            return
        _pay_one(blocked, elapsed_s)
        for each in blocked.others:
            _pay_one(each, elapsed_s)

    def _closed_by(self, now: float) -> float:
        """The clock of `Obstacle.CLOSED`."""
        blocked = self._next
        if blocked is None or now <= self._since_s or not _is_closed(blocked):
            return self._closed_s
        return self._closed_s + now - self._since_s


def seconds_of(wait: Wait | None) -> Mapping[str, float]:
    """What a request has waited for that waits no longer: seconds by obstacle. Their sum is all of its wait."""
    return NEVER_WAITED if wait is None else _seconds(wait, wait.ended_s, wait.closed_s, None, 0.0)


def _seconds(wait: Wait, now: float, closed_s: float, obstacle: Obstacle | None, obstacle_s: float) -> dict[str, float]:
    """`closed_s`, `obstacle_s`: for an engine in service, and for this obstacle, beyond what is noted."""
    by = {} if wait.by is None else wait.by.copy()
    for name, seconds in ((wait.obstacle, wait.obstacle_s), (obstacle, obstacle_s), (Obstacle.CLOSED, closed_s)):
        if name is not None and seconds > 0 and name is not wait.rest:
            by[name] = by.get(name, 0.0) + seconds
    rest_s = now - wait.since_s - sum(by.values())
    if rest_s > 0:
        by[wait.rest] = rest_s
    return by


def _is_closed(blocked: Blocked) -> bool:
    """Is no engine in service for anybody?"""
    if blocked.nearest() is not Obstacle.CLOSED:
        return False
    return not blocked.others or all([each.nearest() is Obstacle.CLOSED for each in blocked.others])


def _pay_one(blocked: Blocked, seconds: float) -> None:
    wait = blocked.request.progress.wait
    if wait is None:
        return
    obstacle = blocked.nearest()
    if wait.obstacle is obstacle:
        wait.obstacle_s += seconds
        return
    if wait.obstacle is not None:
        _add(wait, wait.obstacle, wait.obstacle_s)
    wait.obstacle, wait.obstacle_s = obstacle, seconds


def _add(wait: Wait, obstacle: str, seconds: float) -> None:
    """Its turn is what is left in the end."""
    if obstacle is Obstacle.TURN:
        return
    if wait.by is None:
        wait.by = {}
    wait.by[obstacle] = wait.by.get(obstacle, 0.0) + seconds
