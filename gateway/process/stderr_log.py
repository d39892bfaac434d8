"""Where do the messages of a serving process go? To standard error, and nobody waits for it.

Here, since commands are not compiled: a compiled class that extends logging.Handler crashes the garbage collection.
"""

from __future__ import annotations

import logging

from gateway.telemetry.log_writer import STDERR, LogWriter


class StderrLog(logging.Handler):
    """Messages to standard error, those of the `logging` module among them. Its reader stops nobody who says one."""

    def __init__(self) -> None:
        super().__init__()
        self._writer = LogWriter("log of messages", STDERR)

    def emit(self, record: logging.LogRecord) -> None:
        """Take a message, or count it as lost."""
        self.write_line(self.format(record))

    def write_line(self, text: str) -> None:
        """The same of a text as it stands."""
        self._writer.write(f"{text}\n".encode("utf-8", "replace"), 1)

    def close(self) -> None:
        """Write what is left, if that can be done soon."""
        self._writer.close()
        super().close()
