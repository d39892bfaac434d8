"""What holds a request back? The obstacle at each engine, as a value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from policies.request import Request


class Obstacle(StrEnum):
    """A reason why an engine cannot start a request now, or why a request has waited. Listed in the order in which
    obstacles disappear, the soonest first.
    """

    TURN = "turn"
    """Another request goes first; as an engine's obstacle, a request that waits at another gateway."""
    CEILING = "ceiling"
    """The request's group or tenant has as much running as it may."""
    WORKING_SET = "working_set"
    """The contexts of the interactions under way fill the KV cache, and the request would begin another one."""
    PREFILL_PART = "prefill_part"
    """The request's tenant has begun more prefill than its part, and answers of other tenants run."""
    SPREAD = "spread"
    """The engine has room, but starts are spread so that the KV cache stays evenly full."""
    PREFILL = "prefill"
    """The prompts of other requests are processed first."""
    KV = "kv"
    """The engine's KV cache has no room."""
    SLOTS = "slots"
    """All sequence slots of the engine are taken."""
    WAITING = "waiting"
    """The engine's own queue is above the target, or holds requests that the engine has preempted."""
    CLOSED = "closed"
    """The engine is not in service, is left alone after a failure, or cannot serve this request."""
    ASKED = "asked"
    """Other gateways are asked about a limit or about the interaction. Not an engine's obstacle."""
    RETURNED = "returned"
    """The request came back after its dispatch: preempted, refused or undelivered. Not an engine's obstacle."""

    __hash__ = str.__hash__  # `Enum.__hash__` is not in C, and takes ten times as long


ASLEEP: Final = (Obstacle.CEILING, Obstacle.WORKING_SET, Obstacle.PREFILL_PART)
"""Obstacles of requests that want no room at the engines meanwhile."""
_BY_NEARNESS: Final = {obstacle: place for place, obstacle in enumerate(Obstacle)}


class Blocked:
    """The head of a queue that no engine can start, and the obstacle at each engine."""

    __slots__ = ("_counts", "ceiling", "obstacles", "others", "request")

    def __init__(
        self, request: Request, obstacles: dict[str, Obstacle], counts: dict[Obstacle, int] | None = None
    ) -> None:
        """Keep the obstacles by engine; empty if there is no engine. `counts`: their numbers, counted if absent."""
        self.request = request
        self.obstacles = obstacles
        self._counts = counts if counts is not None else dict(Counter(obstacles.values()))
        """Number of engines by obstacle, so that `nearest` looks at no engine."""
        self.ceiling = ""
        """Name of the tree node whose ceiling is reached, if the obstacle is a ceiling."""
        self.others: tuple[Blocked, ...] = ()
        """Heads of the other engines' own queues that found no room either. With one queue, the first interactive
        request that found none beside an engine reserved for the head."""

    def __repr__(self) -> str:
        return f"<Blocked {self.request.id}: {', '.join(f'{name}: {why}' for name, why in self.obstacles.items())}>"

    @staticmethod
    def everywhere(request: Request, engines: Iterable[str], why: Obstacle) -> Blocked:
        """Return one obstacle at all of these engines."""
        obstacles = dict.fromkeys(engines, why)
        return Blocked(request, obstacles, {why: len(obstacles)} if obstacles else {})

    def without(self, engine: str) -> Blocked:
        """Return the obstacles at the other engines."""
        others = Blocked(self.request, self.obstacles.copy(), self._counts.copy())
        others.set(engine, None)
        return others

    def set(self, engine: str, obstacle: Obstacle | None) -> None:
        """Replace the obstacle at an engine; None if there is none any more."""
        before = self.obstacles.get(engine)
        if before is obstacle:
            return
        if before is not None:
            self._counts[before] -= 1
            if not self._counts[before]:
                del self._counts[before]
        if obstacle is None:
            del self.obstacles[engine]
        else:
            self.obstacles[engine] = obstacle
            self._counts[obstacle] = self._counts.get(obstacle, 0) + 1

    def nearest(self) -> Obstacle:
        """Return the obstacle that disappears soonest; `CLOSED` if there is no engine."""
        found = Obstacle.CLOSED
        for obstacle in self._counts:
            if _BY_NEARNESS[obstacle] < _BY_NEARNESS[found]:
                found = obstacle
        return found
