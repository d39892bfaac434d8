"""Which streams have waited so long for their first byte that their clients must receive something?

A load balancer between client and gateway closes what is silent for long, 60 s as a rule. One timer serves all streams
of a pool: each gets a comment after the same time, so they are due in the order in which they came.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

TIMER_S_MIN: Final = 0.05
"""The timer goes off at most so often: streams that are due within this time get their comments together."""


class WaitingStream(Protocol):
    """A stream whose client has received nothing yet."""

    def say_waiting(self) -> None: ...


class Place:
    """The place of one stream among the waiting ones; left when the first byte of its answer is there."""

    __slots__ = ("due_s", "stream")

    def __init__(self, due_s: float, stream: WaitingStream) -> None:
        self.due_s = due_s
        self.stream: WaitingStream | None = stream

    def leave(self) -> None:
        self.stream = None


class WaitingStreams:
    """The streams of one pool that wait for their first byte, and the timer of their comments, every `interval_s`."""

    def __init__(self, interval_s: float, clock: Callable[[], float]) -> None:
        self.interval_s = interval_s
        self._clock = clock
        self._places: deque[Place] = deque()
        """In the order in which they are due. A place that was left is dropped when it is due."""
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._places)

    def add(self, stream: WaitingStream, since_s: float) -> Place:
        """`since_s`: when the stream began to wait, by the clock. The stream must call `leave` on its place."""
        place = Place(since_s + self.interval_s, stream)
        self._places.append(place)
        if self._timer is None:
            self._arm(place.due_s - self._clock())
        return place

    def _arm(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(max(TIMER_S_MIN, delay_s), self._send_comments)

    def _send_comments(self) -> None:
        self._timer = None
        now = self._clock()
        places = self._places
        while places and (places[0].due_s <= now or places[0].stream is None):
            place = places.popleft()
            stream = place.stream
            if stream is not None:
                place.due_s = now + self.interval_s
                places.append(place)
                stream.say_waiting()
        if places:
            self._arm(places[0].due_s - now)
