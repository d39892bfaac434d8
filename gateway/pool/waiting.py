"""Keep-alive comments for streams that wait for their first byte.

A load balancer between client and gateway closes silent connections, usually after 60 s. One timer serves all streams
of a pool: each gets a comment after an equal time, so they are due in the order of their arrival.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import takewhile
from typing import Final, Protocol

TIMER_S_MIN: Final = 0.05
"""Shortest timer: streams due within this time get their comments together."""


class WaitingStream(Protocol):
    """A stream whose client has received nothing yet."""

    def say_waiting(self) -> None: ...


class WaitingStreams:
    """The streams of one pool before their first byte, and the timer of their comments, every `interval_s`."""

    def __init__(self, interval_s: float, clock: Callable[[], float]) -> None:
        self.interval_s = interval_s
        self._clock = clock
        self._due_s: dict[WaitingStream, float] = {}
        """Time of the next comment by stream, in order."""
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._due_s)

    def add(self, stream: WaitingStream, since_s: float) -> None:
        """Add a stream that has waited since `since_s`, until it leaves at the first byte of its answer."""
        due_s = self._due_s[stream] = since_s + self.interval_s
        if self._timer is None:
            self._arm(due_s - self._clock())

    def leave(self, stream: WaitingStream) -> None:
        self._due_s.pop(stream, None)

    def _arm(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(max(TIMER_S_MIN, delay_s), self._send_comments)

    def _send_comments(self) -> None:
        self._timer = None
        now, due_s = self._clock(), self._due_s
        for stream in list(takewhile(lambda each: due_s[each] <= now, due_s)):
            if due_s.pop(stream, None) is not None:  # a comment may end another stream
                due_s[stream] = now + self.interval_s
                stream.say_waiting()
        if due_s:
            self._arm(next(iter(due_s.values())) - now)
