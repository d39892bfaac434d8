"""What stands in for a socket and a loop, so that bytes are read by the same code without either."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

PIECES_MAX = 256


def pieces(data: bytes) -> list[bytes]:
    """Cut in pieces of a size that the data itself sets."""
    size = max(1, len(data) // PIECES_MAX, data[-1] if data else 1)
    return [data[at : at + size] for at in range(0, len(data), size)]


class Transport(asyncio.Transport):
    """A socket that takes everything."""

    def __init__(self, take: Callable[[bytes], None] | None = None) -> None:
        super().__init__()
        self.is_closed = False
        self._take = take

    def write(self, data: Any) -> None:
        if self._take is not None:
            self._take(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_closed

    def abort(self) -> None:
        self.is_closed = True

    close = abort


_loop: list[asyncio.AbstractEventLoop] = []


def in_loop(work: Coroutine[Any, Any, None]) -> None:
    """Do it, in one loop for all."""
    if not _loop:
        _loop.append(asyncio.new_event_loop())
    _loop[0].run_until_complete(work)
