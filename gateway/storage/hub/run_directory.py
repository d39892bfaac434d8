"""Where do the workers of one gateway find each other, and the hub? In a directory that is theirs alone."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass

PATH_BYTES_MAX = 100
"""Of the address of a Unix socket; the system takes 107."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of the sockets of one gateway's processes, and the clock that they have in common."""

    directory: str
    workers: int
    epoch_s: float
    """By how much the time since 1970 was ahead of the monotonic clock when the gateway started. One number for all:
    the monotonic clock is that of the machine."""

    @classmethod
    def made(cls, workers: int) -> RunDirectory:
        """A new directory that nobody else may enter. OSError if it cannot be made; says what to do."""
        advice = "workers meet in a directory of their own there: set TMPDIR to a directory that can be written to"
        try:
            directory = tempfile.mkdtemp(prefix="fairgate-")  # mode 0700
        except OSError as error:
            raise OSError(
                f"{error.strerror or error}: {tempfile.tempdir or 'no directory for temporary files'}; {advice}"
            ) from None
        if len(os.fsencode(directory)) + len("/worker-255") > PATH_BYTES_MAX:
            os.rmdir(directory)
            raise OSError(f"{directory} is too long for the address of a socket; set TMPDIR to a shorter one")
        return cls(directory, workers, time.time() - time.monotonic())

    @property
    def exchange(self) -> str:
        """The socket on which the hub answers exchanges."""
        return f"{self.directory}/exchange"

    def worker(self, index: int) -> str:
        """The socket on which a worker answers what the hub asks for the operator."""
        return f"{self.directory}/worker-{index}"

    def end(self) -> None:
        """Nobody meets there any more."""
        shutil.rmtree(self.directory, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """The place of one worker among the others."""

    index: int
    run_directory: RunDirectory
