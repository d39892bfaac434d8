"""Where do the messages of a serving process go? To standard error, and nobody waits for it.

Here, since commands are not compiled: a compiled class that extends logging.Handler crashes the garbage collection.
"""

from __future__ import annotations

import logging
from typing import Final

from gateway.telemetry.log_writer import STDERR, LogWriter

_CLEARED: Final = "\r\x1b[2K"
"""Makes the terminal's line empty."""


class StderrLog(logging.Handler):
    """Messages to standard error, those of the `logging` module among them. Its reader stops nobody who says one."""

    def __init__(self) -> None:
        super().__init__()
        self._writer = LogWriter("log of messages", STDERR)
        self._status = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Take a message, or count it as lost."""
        self.write_line(self.format(record))

    def write_line(self, text: str) -> None:
        """Write a text as it stands, above the status if there is one."""
        status = self._status
        whole = f"{_CLEARED}{text}\n{status}" if status else f"{text}\n"
        self._writer.write(whole.encode("utf-8", "replace"), 1)

    def show(self, status: str) -> None:
        """Replace the line at the bottom of the terminal. What was written stays in sight above it."""
        if status != self._status:
            self._status = status
            self._writer.write((_CLEARED + status).encode("utf-8", "replace"), 1)

    def close(self) -> None:
        """Write what is left, if that can be done soon."""
        self._writer.close()
        super().close()
