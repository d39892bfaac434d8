"""Which certificate does the listener show? The one in the files, or, if those are unusable, the one before."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Sequence

from gateway.telemetry.background import OperationalError

LOOK_S = 3.0

_log = logging.getLogger("fairgate")


class Certificates:
    """The TLS context for new handshakes, made anew whenever the files change. Established connections keep theirs."""

    def __init__(self, make: Callable[[], ssl.SSLContext], files: Sequence[str]) -> None:
        """Read the files by `make`, which raises ValueError with the file and its fault if they are unusable."""
        self._make = make
        self._files = files
        self._taken = self._latest = self._file_versions()
        self._fault: str | None = None
        self.context = make()

    def set(self, make: Callable[[], ssl.SSLContext], files: Sequence[str]) -> bool:
        """Replace the files and `reload`."""
        self._make = make
        self._files = files
        return self.reload()

    def reload(self) -> bool:
        """Read the files. If they are unusable, log that, keep the context and return False."""
        self._read()
        if self._fault is not None:
            _log.error("the TLS certificate cannot be loaded, and the previous one stays in use: %s", self._fault)
        return self._fault is None

    async def run_once(self) -> None:
        """Wait a moment and read changed files once they rest: certificate and key are seldom written at once. Raise
        `OperationalError` for as long as the files are unusable."""
        await asyncio.sleep(LOOK_S)
        before, self._latest = self._latest, await asyncio.to_thread(self._file_versions)
        if self._latest == before and (before != self._taken or self._fault is not None):
            await asyncio.to_thread(self._read)
        if self._fault is not None:
            raise OperationalError(
                f"the TLS certificate cannot be loaded, and the previous one stays in use: {self._fault}"
            )

    def _read(self) -> None:
        self._taken = self._file_versions()  # first, so that a change during the read is noticed later
        try:
            self.context = self._make()
        except ValueError as error:
            self._fault = str(error)
        else:
            self._fault = None
            _log.info("TLS: new connections use the certificate that is now in %s", ", ".join(self._files))

    def _file_versions(self) -> list[tuple[int, int, int]]:
        return [_file_version(file) for file in self._files]


def _file_version(file: str) -> tuple[int, int, int]:
    """Return a value that changes with each version of a file, whether written in place or renamed."""
    try:
        found = os.stat(file)
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_ino, found.st_size)
