"""When does what is written leave? At the end of the loop's turn, with all else that was written in it.

A write wakes the process that reads from the socket. Between the work on one request and on the next the reader falls
asleep again, and to wake it each time costs more than the write. Writes that leave together need one awakening.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

_log = logging.getLogger(__name__)

_TOGETHER_MAX: Final = 8
"""More do not wait for each other: in a long turn the first would leave late."""
_AT_ONCE_BYTES: Final = 65536
"""As much does not wait: uvloop reads on in the same turn while so much is there, and must hear first who is slow."""


class Outbox:
    """The outlets that hold something."""

    __slots__ = ("_flush_later", "_is_scheduled", "_outlets")

    def __init__(self) -> None:
        self._outlets: list[Outlet] = []
        self._is_scheduled = False
        self._flush_later = self.flush  # compiled, a bound method costs more than the call

    def add(self, outlet: Outlet) -> None:
        """This one now holds something."""
        self._outlets.append(outlet)
        if len(self._outlets) >= _TOGETHER_MAX:
            self.flush()
        elif not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush_later)

    def flush(self) -> None:
        """Send everything now."""
        self._is_scheduled = False
        if not self._outlets:
            return
        outlets, self._outlets = self._outlets, []
        for outlet in outlets:
            try:
                outlet.flush()
            except Exception:  # the others have nothing to do with it
                _log.exception("a write failed")
                outlet.abort()


class Outlet:
    """The writing side of one connection: whatever writes to its transport does so here, and whatever closes it after
    its last words. Who aborts the transport itself drops what is held."""

    __slots__ = ("_held", "_outbox", "_transport")

    def __init__(self, outbox: Outbox, transport: asyncio.Transport) -> None:
        self._outbox = outbox
        self._transport = transport
        self._held: list[bytes | memoryview] = []

    def write(self, data: bytes | memoryview) -> None:
        """Send this with the turn; at once if it is large."""
        held = self._held
        held.append(data)
        if len(data) >= _AT_ONCE_BYTES:
            self.flush()
        elif len(held) == 1:
            self._outbox.add(self)

    def flush(self) -> None:
        """Send what is held now, unless the connection is gone."""
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
        """How much of what was written has not been handed to the system."""
        unsent = self._transport.get_write_buffer_size()
        for data in self._held:
            unsent += len(data)
        return unsent

    def write_eof(self) -> None:
        self.flush()
        self._transport.write_eof()

    def close(self) -> None:
        """Close when all is sent."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """Close now. What this turn wrote still goes to the system first, as it would have without waiting."""
        self.flush()
        self._transport.abort()
