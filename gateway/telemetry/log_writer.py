"""How do lines reach a file or a pipe whose reader may stall? A thread writes them, so the loop never waits."""

from __future__ import annotations

import logging
import os
import select
import stat
import sys
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Final

logger = logging.getLogger("fairgate")

STDOUT: Final = 1
STDERR: Final = 2
BUFFER_BYTES_MAX = 8 << 20
CLOSE_S = 2.0
RETRY_S: Final = 0.1
PIPE_BYTES: Final = getattr(select, "PIPE_BUF", 512)


class LogWriter:
    """A writer of batches of lines, in order. Lines that find no room, or that cannot be written, are counted.

    Each count has one side that changes it: the callers, one at a time, or the writing thread.
    """

    def __init__(self, what: str, target: str | int) -> None:
        """Open the target: STDOUT, STDERR, or a file to append to, for its owner only. `what`: name of the lines."""
        self._what = what
        self._path = None if isinstance(target, int) else target
        """Path of the file; None for a pipe."""
        if isinstance(target, int):
            (sys.stderr if target == STDERR else sys.stdout).flush()  # earlier prints come first
        self._descriptor = target if isinstance(target, int) else _open_for_append(target)
        self._batches: SimpleQueue[tuple[bytes, int] | None] = SimpleQueue()
        self._taking = threading.RLock()  # a collection of garbage may log while it is held
        self._taken_bytes = self._done_bytes = 0
        self._found_no_room = self._not_written = self._reported = 0
        self._is_abandoned = False
        self._worker: threading.Thread | None = None

    @property
    def lines_lost(self) -> int:
        return self._found_no_room + self._not_written

    def write(self, lines: bytes, count: int) -> None:
        """Take a batch of `count` lines. Never waits for a disk or a reader."""
        with self._taking:
            if self._taken_bytes - self._done_bytes + len(lines) > BUFFER_BYTES_MAX:
                self._found_no_room += count
                return
            self._taken_bytes += len(lines)
            self._batches.put((lines, count))
            if self._worker is None:
                # A daemon thread, since a reader that hangs must not keep the process.
                self._worker = threading.Thread(target=self._run, name=self._what, daemon=True)
                self._worker.start()

    def close(self) -> None:
        """Write the rest within CLOSE_S."""
        with self._taking:  # another thread may be about to start the worker
            self._batches.put(None)
            worker = self._worker
        if worker is not None:
            worker.join(CLOSE_S)
            if worker.is_alive():
                self._is_abandoned = True  # the descriptor stays open for the thread that is stuck in it
                return
        if self._path is not None:
            os.close(self._descriptor)

    def _run(self) -> None:
        """Write batches until `close`. The body of the writing thread."""
        while (batch := self._batches.get()) is not None and not self._is_abandoned:
            lines, count = batch
            try:
                self._follow_path()
                self._write(lines)
            except OSError as error:
                if self.lines_lost == self._reported:
                    logger.warning("the %s cannot be written: %s", self._what, error)
                self._not_written += count
                self._done_bytes += len(lines)
            else:
                self._done_bytes += len(lines)
                self._report_lost()

    def _follow_path(self) -> None:
        """Switch to the file at the path if it is not the open one, or create it if the open one was removed.

        A file that was moved away without a new one at the path is written to until `AccessLog.reopen`.
        """
        if self._path is None:
            return
        own = os.fstat(self._descriptor)
        if not stat.S_ISREG(own.st_mode):
            return
        try:
            there = os.stat(self._path)
        except OSError:
            if own.st_nlink:
                return
        else:
            if os.path.samestat(own, there) or not stat.S_ISREG(there.st_mode):
                return
        descriptor = _open_for_append(self._path)
        os.close(self._descriptor)
        self._descriptor = descriptor
        if not own.st_nlink:
            logger.warning("the %s was removed while it was open: it goes on in a new %s", self._what, self._path)

    def _write(self, lines: bytes) -> None:
        """Write all bytes, however long the reader takes. Raise OSError."""
        for piece in _pipe_writes(lines) if self._path is None else (lines,):
            at = 0
            while at < len(piece):
                try:
                    at += os.write(self._descriptor, piece[at:])
                except BlockingIOError:  # another program set O_NONBLOCK: standard output is shared
                    poll = select.poll()
                    poll.register(self._descriptor, select.POLLOUT)
                    while not poll.poll(RETRY_S * 1000):
                        if self._is_abandoned:
                            raise

    def _report_lost(self) -> None:
        """Log the number of lines lost since the last report."""
        if self._taken_bytes - self._done_bytes > BUFFER_BYTES_MAX / 2:
            return  # the warning may itself be one of these lines, and needs room
        lost = self.lines_lost - self._reported
        self._reported += lost
        if lost:
            logger.warning("%d lines of the %s were lost, since they could not be written in time", lost, self._what)


def _open_for_append(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def _pipe_writes(lines: bytes) -> Iterator[bytes]:
    """Yield whole lines in pieces that a pipe takes in one write, because several processes may write to the pipe.

    A line longer than that is a piece of its own.
    """
    at = 0
    while at < len(lines):
        end = len(lines)
        if end - at > PIPE_BYTES:
            end = (lines.rfind(b"\n", at, at + PIPE_BYTES) + 1) or (lines.find(b"\n", at) + 1)
        yield lines[at:end]
        at = end
