"""A small pipe that nobody reads unless a test does."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from tests.waiting import WAIT_S

PIPE_BYTES = 4096


class Pipe:
    """`ours` is read here, and `theirs` is written to."""

    def __init__(self) -> None:
        self.ours, self.theirs = os.pipe()
        fcntl.fcntl(self.theirs, getattr(fcntl, "F_SETPIPE_SZ", 1031), PIPE_BYTES)
        os.set_blocking(self.ours, False)

    def fill(self) -> None:
        """No byte more fits in."""
        os.set_blocking(self.theirs, False)
        size = PIPE_BYTES
        try:
            while True:
                os.write(self.theirs, b"." * size)
                size = 1
        except BlockingIOError:
            os.set_blocking(self.theirs, True)

    async def read(self) -> bytes:
        """Return what was written, once something was."""
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.ours, readable.set)
        try:
            async with asyncio.timeout(WAIT_S):
                await readable.wait()
        finally:
            loop.remove_reader(self.ours)
        return os.read(self.ours, 65536)

    async def said(self, pattern: bytes) -> bytes:
        """What was written, once the pattern is in it."""
        found = b""
        while re.search(pattern, found) is None:
            found += await self.read()
        return found

    def close(self) -> None:
        os.close(self.ours)
        os.close(self.theirs)


@contextmanager
def piped(descriptor: int) -> Iterator[Pipe]:
    """Let what is written to this descriptor go into a small pipe."""
    saved, pipe = os.dup(descriptor), Pipe()
    os.dup2(pipe.theirs, descriptor)
    try:
        yield pipe
    finally:
        os.dup2(saved, descriptor)
        os.close(saved)
        pipe.close()
