"""Writes of one turn of the event loop, sent together at its end.

A write wakes the process that reads from the socket. Between two requests the reader falls asleep again, and waking it
each time costs more than the write. Writes that leave together wake the reader once.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

_log = logging.getLogger(__name__)

_TOGETHER_MAX: Final = 8
"""Writers that wait for each other. In a long turn more would delay the first."""
_AT_ONCE_BYTES: Final = 65536
"""Data of this size leaves at once: uvloop keeps reading in the same turn, and needs the backpressure of a slow
client."""


class Outbox:
    """All writers with unsent data."""

    __slots__ = ("_flush_later", "_is_scheduled", "_writers")

    def __init__(self) -> None:
        self._writers: list[BatchedWriter] = []
        self._is_scheduled = False
        self._flush_later = self.flush  # compiled, a bound method costs more than the call

    def add(self, writer: BatchedWriter) -> None:
        """Register a writer that now holds data."""
        self._writers.append(writer)
        if len(self._writers) >= _TOGETHER_MAX:
            self.flush()
        elif not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush_later)

    def flush(self) -> None:
        """Send everything now."""
        self._is_scheduled = False
        if not self._writers:
            return
        writers, self._writers = self._writers, []
        for writer in writers:
            try:
                writer.flush()
            except Exception:  # one connection's failure must not stop the others
                _log.exception("a write failed")
                writer.abort()


class BatchedWriter:
    """The writing side of one connection. Every write and every orderly close must go through the writer: aborting the
    transport itself drops the held data."""

    __slots__ = ("_held", "_outbox", "_transport")

    def __init__(self, outbox: Outbox, transport: asyncio.Transport) -> None:
        self._outbox = outbox
        self._transport = transport
        self._held: list[bytes | memoryview] = []

    def write(self, data: bytes | memoryview) -> None:
        """Send data at the end of this turn, or at once if it is large."""
        held = self._held
        held.append(data)
        if len(data) >= _AT_ONCE_BYTES:
            self.flush()
        elif len(held) == 1:
            self._outbox.add(self)

    def flush(self) -> None:
        """Send the held data, unless the connection is closing."""
        held = self._held
        if not held:
            return
        self._held = []
        if self._transport.is_closing():
            return
        if len(held) == 1:
            self._transport.write(held[0])
        else:
            self._transport.writelines(held)

    def unsent_bytes(self) -> int:
        """Return the number of written bytes that the system has not taken yet."""
        unsent = self._transport.get_write_buffer_size()
        for data in self._held:
            unsent += len(data)
        return unsent

    def write_eof(self) -> None:
        """End the sending side after everything is sent."""
        self.flush()
        try:
            self._transport.write_eof()
        except OSError:
            pass  # the peer has reset the connection, which asyncio's own loop raises here

    def close(self) -> None:
        """Close after everything is sent."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """Abort. Data written in this turn still goes to the system first, as without batching."""
        self.flush()
        self._transport.abort()
