"""What the pools have learned of their apps, kept in a file over restarts.

The file is a convenience, never a condition: one that cannot be used is put aside, one that cannot be written is
noted in the log, and the gateway serves either way.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from policies.admission import memory
from policies.admission.engine import AdmissionEngine

__all__ = ["LearnedFile"]

logger = logging.getLogger("fairgate")

SAVE_INTERVAL_S = 60.0
FILE_BYTES_MAX = 64 * 1024 * 1024
VERSION = 1


class _Content(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    pools: dict[str, object]


_decode = msgspec.json.Decoder(_Content).decode


class LearnedFile:
    """Restores the engines (by the names of their pools) from a file, and keeps the file up to date."""

    def __init__(self, path: Path, engines: Mapping[str, AdmissionEngine]) -> None:
        self._path = path
        self._engines = engines
        self._written = b""
        self._can_write = True

    def restore(self) -> None:
        """Go on from the file. If it is none of ours it is renamed, and everything is learned anew."""
        try:
            with self._path.open("rb") as file:
                content = file.read(FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("%s cannot be read (%s): what is normal for each app is learned anew", self._path, error)
            return
        before = {name: memory.snapshot(engine) for name, engine in self._engines.items()}
        try:
            self._restore(content)
        except ValueError as error:
            for name, engine in self._engines.items():
                memory.restore(engine, before[name])
            self._put_aside(str(error))

    async def keep(self) -> None:
        """Save now and then, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_INTERVAL_S)
            await self.save()

    async def save(self) -> None:
        """Write what has been learned, if it has changed; beside the loop, so that no stream waits for the disk."""
        pools: dict[str, object] = {name: memory.snapshot(engine) for name, engine in self._engines.items()}
        content = msgspec.json.encode(_Content(VERSION, pools))
        if content == self._written:
            return
        try:
            await asyncio.to_thread(self._write, content)
        except OSError as error:
            if self._can_write:
                logger.warning("what was learned cannot be saved to %s: %s", self._path, error)
            self._can_write = False
        else:
            self._written, self._can_write = content, True

    def _restore(self, content: bytes) -> None:
        if len(content) > FILE_BYTES_MAX:
            raise ValueError(f"it is larger than {FILE_BYTES_MAX} bytes")
        try:
            learned = _decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(str(error)) from None
        if learned.version != VERSION:
            raise ValueError(f"it is of version {learned.version}, and this is version {VERSION}")
        for name, engine in self._engines.items():
            if name in learned.pools:
                try:
                    memory.restore(engine, learned.pools[name])
                except ValueError as error:
                    raise ValueError(f"pool {name}: {error}") from None
        self._written = content

    def _put_aside(self, why: str) -> None:
        aside = self._path.with_name(self._path.name + ".corrupt")
        try:
            self._path.replace(aside)
        except OSError as error:
            aside = Path(f"(not renamed: {error})")
        logger.warning(
            "%s holds nothing that can be gone on from (%s); kept as %s, and all is learned anew",
            self._path, why, aside,
        )  # fmt: skip

    def _write(self, content: bytes) -> None:
        """All of it or nothing: a reader never sees half a file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_name(self._path.name + ".new")
        fresh.unlink(missing_ok=True)
        with open(fresh, "wb", opener=_for_the_owner) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)


def _for_the_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
