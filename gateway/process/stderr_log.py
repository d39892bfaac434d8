"""Log messages on standard error, written without blocking the caller.

The module is here since commands are not compiled: a compiled class that extends logging.Handler crashes the garbage
collection.
"""

from __future__ import annotations

import logging
from typing import Final

from gateway.telemetry.log_writer import STDERR, LogWriter

_CLEARED: Final = "\r\x1b[2K"
"""Escape codes that clear the terminal's line."""


class StderrLog(logging.Handler):
    """A handler that writes messages to standard error. A slow reader never blocks a caller."""

    def __init__(self) -> None:
        super().__init__()
        self._writer = LogWriter("log of messages", STDERR)
        self._status = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Take a message, or count it as lost."""
        self.write_line(self.format(record))

    def write_line(self, text: str) -> None:
        """Write a text unchanged, above the status line if there is one."""
        status = self._status
        whole = f"{_CLEARED}{text}\n{status}" if status else f"{text}\n"
        self._writer.write(whole.encode("utf-8", "replace"), 1)

    def show(self, status: str) -> None:
        """Replace the status line at the bottom of the terminal. Written text stays visible above it."""
        if status != self._status:
            self._status = status
            self._writer.write((_CLEARED + status).encode("utf-8", "replace"), 1)

    def close(self) -> None:
        """Write the rest, if that is possible soon."""
        self._writer.close()
        super().close()
