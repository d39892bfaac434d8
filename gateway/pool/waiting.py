"""Keep-alive comments for streams that wait for their first byte.

A load balancer between client and gateway closes silent connections, usually after 60 s. One timer serves all streams
of a pool: each gets a comment after an equal time, so they are due in the order of their arrival.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

TIMER_S_MIN: Final = 0.05
"""Shortest timer: streams due within this time get their comments together."""


class WaitingStream(Protocol):
    """A stream whose client has received nothing yet."""

    def say_waiting(self) -> None: ...


class Place:
    """The place of one stream in the line, left at the first byte of its answer."""

    __slots__ = ("due_s", "stream")

    def __init__(self, due_s: float, stream: WaitingStream) -> None:
        self.due_s = due_s
        self.stream: WaitingStream | None = stream

    def leave(self) -> None:
        self.stream = None


class WaitingStreams:
    """The streams of one pool before their first byte, and the timer of their comments, every `interval_s`."""

    def __init__(self, interval_s: float, clock: Callable[[], float]) -> None:
        self.interval_s = interval_s
        self._clock = clock
        self._places: deque[Place] = deque()
        """Places in the order in which they are due. A place that was left is dropped when due."""
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._places)

    def add(self, stream: WaitingStream, since_s: float) -> Place:
        """Add a stream that has waited since `since_s`. It must call `leave` on its place."""
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
