"""What holds a request back? The obstacle at each engine, as a value."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from policies.request import Request


class Obstacle(StrEnum):
    """What keeps one engine from starting one request now, listed from the one that disappears soonest to the last; and
    what else a request may have waited for.
    """

    TURN = "turn"
    """Another request goes first. At an engine: one that waits at another gateway."""
    CEILING = "ceiling"
    """Its group or tenant has as much running as it may."""
    WORKING_SET = "working_set"
    """The contexts of the interactions under way fill the KV cache, and the request would begin another one."""
    SPREAD = "spread"
    """The engine has room, but starts are spread so that the KV cache stays evenly full."""
    PREFILL = "prefill"
    """The prompts of other requests are processed first."""
    KV = "kv"
    """Its KV cache has no room."""
    SLOTS = "slots"
    """None of its sequence slots is free."""
    WAITING = "waiting"
    """Its own queue is above the target."""
    CLOSED = "closed"
    """It is not in service, or does not have what the request goes on from."""
    ASKED = "asked"
    """Of no engine: other gateways are asked whether a limit that all of them count has room for the request."""
    RETURNED = "returned"
    """Of no engine: one had the request, and gave it back or was not reached."""

    __hash__ = str.__hash__  # an enumeration's own is no machine code, and takes ten times as long


_BY_NEARNESS = {obstacle: place for place, obstacle in enumerate(Obstacle)}


def nearest(obstacles: Iterable[Obstacle]) -> Obstacle | None:
    """Which of the obstacles at several engines stands for all? The one that disappears soonest; None if there is
    none.
    """
    found: Obstacle | None = None
    for obstacle in obstacles:  # most often the same, and asked at each event
        if found is None or (obstacle is not found and _BY_NEARNESS[obstacle] < _BY_NEARNESS[found]):
            found = obstacle
    return found


class Blocked:
    """No engine could take the next request in order: what was the obstacle at each?"""

    __slots__ = ("_nearest", "ceiling", "obstacles", "others", "request")

    def __init__(self, request: Request, obstacles: dict[str, Obstacle]) -> None:
        self.request = request
        self._nearest: Obstacle | None = None
        self.obstacles = obstacles
        """By the name of the engine; empty if there is none."""
        self.ceiling = ""
        """Name of the ceiling that is reached, where that is the obstacle."""
        self.others: tuple[Blocked, ...] = ()
        """Those that are next at the other engines, which found no room either: where each engine has a queue of its
        own, or where one is kept for this request."""

    def __repr__(self) -> str:
        return f"<Blocked {self.request.id}: {', '.join(f'{name}: {why}' for name, why in self.obstacles.items())}>"

    def but(self, engine: str) -> Blocked:
        """Return the obstacles at the other engines."""
        return Blocked(self.request, {name: why for name, why in self.obstacles.items() if name != engine})

    def nearest(self) -> Obstacle:
        """The obstacle that disappears soonest. Without any engine, none is in service."""
        if self._nearest is None:
            self._nearest = nearest(self.obstacles.values()) or Obstacle.CLOSED
        return self._nearest
