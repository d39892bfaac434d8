"""The private directory in which the workers of one gateway and their hub find each other."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass

PATH_BYTES_MAX = 100
"""Longest address of a Unix socket; the system takes 107 bytes."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of the sockets of one gateway's processes, and their common clock."""

    directory: str
    workers: int
    epoch_s: float
    """Seconds by which Unix time was ahead of the machine's monotonic clock when the gateway started; one number for
    all."""

    @classmethod
    def made(cls, workers: int) -> RunDirectory:
        """Create a directory that no other user may enter. Raise OSError with advice."""
        advice = "workers meet in a directory of their own there: set TMPDIR to a directory that can be written to"
        try:
            directory = tempfile.mkdtemp(prefix="fairgate-")  # mode 0700
        except OSError as error:
            where = tempfile.tempdir or "no directory for temporary files"
            raise OSError(f"{error.strerror or error}: {where}; {advice}") from None
        if len(os.fsencode(directory)) + len("/worker-255") > PATH_BYTES_MAX:
            os.rmdir(directory)
            raise OSError(f"{directory} is too long for the address of a socket; set TMPDIR to a shorter one")
        return cls(directory, workers, time.time() - time.monotonic())

    @property
    def exchange(self) -> str:
        """Path of the socket for sync rounds at the hub."""
        return f"{self.directory}/exchange"

    def worker(self, index: int) -> str:
        """Path of the socket on which a worker answers the hub's questions for the operator."""
        return f"{self.directory}/worker-{index}"

    def end(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.directory, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """The number of one worker, and the run directory that it shares with the others."""

    index: int
    run_directory: RunDirectory
