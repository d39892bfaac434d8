"""How long did each obstacle hold a request back? The clocks only explain waits; they decide nothing.

The next request in order waits for its obstacle, and all others wait for their turn. So an event attributes the time
since the last event to the next in order alone, and the rest of a request's wait counts as its turn. While no engine is
in service, all requests wait for one: a clock of the pool counts that time, and a request reads the clock when it is
queued and when it leaves. An event costs O(1), however many requests wait (O(engines) where each engine has a queue of
its own).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from policies.capacity.obstacle import Blocked, Obstacle
from policies.request import Request, Wait

NEVER_WAITED: Final[Mapping[str, float]] = {}


class WaitClocks:
    """The clocks of one pool, which attribute waits to obstacles."""

    def __init__(self) -> None:
        self._held: tuple[tuple[Request, Obstacle], ...] = ()
        """The next in order of each queue and its nearest obstacle, since `_since_s`."""
        self._is_closed = False
        """True if no engine is open for the next request of any queue."""
        self._since_s = 0.0
        self._closed_s = 0.0
        """Seconds without an engine in service while requests waited."""

    def blocked(self, blocked: Blocked | None, now: float) -> None:
        """Set the next in order and its obstacles; None if no request waits for room."""
        self._pay(now)
        heads = (blocked, *blocked.others) if blocked is not None else ()
        self._held = tuple([(each.request, each.nearest()) for each in heads])
        self._is_closed = bool(heads) and all([obstacle is Obstacle.CLOSED for _, obstacle in self._held])
        self._since_s = now

    def began(self, request: Request, now: float, *, asked: bool) -> None:
        """Begin the wait of a request that could not start at once. `asked`: other gateways are asked first."""
        rest = Obstacle.ASKED if asked else Obstacle.TURN
        request.progress.wait = Wait(now, rest, self._closed_by(now))

    def answered(self, request: Request, now: float) -> None:
        """Count the time for the answer of other gateways. The request is queued now."""
        wait = request.progress.wait
        assert wait is not None
        _add(wait.by, wait.rest, now - wait.since_s)
        wait.rest, wait.closed_s = Obstacle.TURN, self._closed_by(now)

    def returned(self, request: Request, dispatched_s: float, now: float) -> None:
        """Resume or begin the wait of a request that its engine, which had it since `dispatched_s`, has returned."""
        wait = request.progress.wait
        if wait is None:
            wait = request.progress.wait = Wait(dispatched_s, Obstacle.TURN, 0.0)
        self.goes_on(wait, now)
        _add(wait.by, Obstacle.RETURNED, now - dispatched_s)

    def goes_on(self, wait: Wait, now: float) -> None:
        """Resume a wait that had ended, in this pool or another."""
        wait.closed_s, wait.ended_s = self._closed_by(now), -1.0

    def ended(self, request: Request, now: float) -> None:
        """End the wait of a request, if it has one."""
        wait = request.progress.wait
        if wait is not None:
            self._pay(now)
            if wait.rest is Obstacle.TURN:
                _add(wait.by, Obstacle.CLOSED, self._closed_s - wait.closed_s)
            wait.ended_s = now

    def so_far(self, request: Request, now: float) -> Mapping[str, float]:
        """Return the seconds by obstacle of a waiting request. Changes nothing."""
        wait = request.progress.wait
        if wait is None:
            return NEVER_WAITED
        by = wait.by.copy()
        if wait.rest is Obstacle.TURN:
            _add(by, Obstacle.CLOSED, self._closed_by(now) - wait.closed_s)
        if not self._is_closed:
            for head, obstacle in self._held:
                if head is request:
                    _add(by, obstacle, now - self._since_s)
        return _with_rest(by, wait, now)

    def _pay(self, now: float) -> None:
        """Attribute the time since the last event to the obstacles of the next in order."""
        elapsed_s = now - self._since_s
        if elapsed_s <= 0:
            return
        self._since_s = now
        if self._is_closed:
            self._closed_s += elapsed_s
            return
        for request, obstacle in self._held:
            wait = request.progress.wait
            if wait is not None:
                _add(wait.by, obstacle, elapsed_s)

    def _closed_by(self, now: float) -> float:
        """Return the clock of `Obstacle.CLOSED` at this time."""
        return self._closed_s + max(0.0, now - self._since_s) if self._is_closed else self._closed_s


def seconds_of(wait: Wait | None) -> Mapping[str, float]:
    """Return the seconds by obstacle of a wait that has ended. The sum is the whole wait."""
    return NEVER_WAITED if wait is None else _with_rest(wait.by.copy(), wait, wait.ended_s)


def _with_rest(by: dict[str, float], wait: Wait, now: float) -> dict[str, float]:
    """Attribute the time that has no obstacle yet to `wait.rest`."""
    _add(by, wait.rest, now - wait.since_s - sum(by.values()))
    return by


def _add(by: dict[str, float], obstacle: str, seconds: float) -> None:
    if seconds > 0:
        by[obstacle] = by.get(obstacle, 0.0) + seconds
