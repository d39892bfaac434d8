"""Log messages on standard error, written without blocking the caller.

The module is here since commands are not compiled: a compiled class that extends logging.Handler crashes the garbage
collection.
"""

from __future__ import annotations

import logging

from gateway.telemetry.log_writer import STDERR, LogWriter


class StderrLog(logging.Handler):
    """A handler that writes messages to standard error. A slow reader never blocks a caller."""

    def __init__(self) -> None:
        super().__init__()
        self._writer = LogWriter("log of messages", STDERR)

    def emit(self, record: logging.LogRecord) -> None:
        """Take a message, or count it as lost."""
        self.write_line(self.format(record))

    def write_line(self, text: str) -> None:
        """Write a text unchanged."""
        self._writer.write(f"{text}\n".encode("utf-8", "replace"), 1)

    def close(self) -> None:
        """Write the rest, if that is possible soon."""
        self._writer.close()
        super().close()
