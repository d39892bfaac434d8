"""Learned state that outlives a gateway, in a file, or that all gateways of a pool share, in their store.

The file is a convenience, never a condition. An unusable file is quarantined, and a failed write is logged. In the
store is one snapshot of each pool that each gateway merges into: for every population, the snapshot with the most
observations wins. A new gateway starts from the snapshot.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from gateway.storage.store import Store
from gateway.storage.store_errors import StoreUnavailable
from gateway.telemetry.background import OperationalError
from policies.admission import takeover
from policies.admission.engine import AdmissionEngine

logger = logging.getLogger("fairgate")

INTERVAL_S = 60.0
FILE_BYTES_MAX = 64 * 1024 * 1024
VERSION = 1


class _LearnedContent(msgspec.Struct, forbid_unknown_fields=True):
    """The decoded file: the snapshot of each pool, by name."""

    version: int
    pools: dict[str, object]


_decode = msgspec.json.Decoder(_LearnedContent).decode


class LearnedFile:
    """State file: saves and restores what each pool's admission engine keeps over a restart.

    That is the expected cost of calls (`CostProfiles`), the paces of apps' interactions and the cold-start times. All
    else is learned anew.
    """

    def __init__(self, path: Path, engines: Mapping[str, AdmissionEngine]) -> None:
        self._path = path
        self._engines = engines

    def restore(self) -> None:
        """Restore the learned state from the file. An unusable file is renamed, and everything is learned anew."""
        try:
            with self._path.open("rb") as file:
                content = file.read(FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("the state file %s cannot be read (%s): everything is learned anew", self._path, error)
            return
        try:
            self._restore(content)
        except ValueError as error:
            aside = self._path.with_name(self._path.name + ".corrupt")
            with suppress(OSError):
                self._path.replace(aside)
            logger.warning(
                "%s is not a usable state file (%s): it is kept as %s, and everything is learned anew",
                self._path, error, aside,
            )  # fmt: skip

    async def run_once(self) -> None:
        """Save, then wait for `INTERVAL_S`."""
        await self.save()
        await asyncio.sleep(INTERVAL_S)

    async def close(self) -> None:
        """Save for the last time."""
        try:
            await self.save()
        except OperationalError as fault:
            logger.warning("the learned state is not saved at the end: %s", fault)

    async def save(self) -> None:
        """Write the learned state, by a thread, so that no stream waits for the disk. Raise `OperationalError` if that
        fails."""
        pools: dict[str, object] = {name: takeover.snapshot(engine) for name, engine in self._engines.items()}
        content = msgspec.json.encode(_LearnedContent(VERSION, pools))
        try:
            await asyncio.to_thread(self._write, content)
        except OSError as error:
            raise OperationalError(f"the learned state cannot be saved to {self._path}: {error}") from error

    def _restore(self, content: bytes) -> None:
        """Check the whole content, then adopt it. Raise ValueError, with the reason, for an unusable file."""
        if len(content) > FILE_BYTES_MAX:
            raise ValueError(f"it is larger than {FILE_BYTES_MAX} bytes")
        try:
            learned = _decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(str(error)) from None
        if learned.version != VERSION:
            raise ValueError(f"it is of version {learned.version}, and this is version {VERSION}")
        found = []
        for name, engine in self._engines.items():
            if name in learned.pools:
                try:
                    found.append(takeover.read(engine, learned.pools[name]))
                except ValueError as error:
                    raise ValueError(f"pool {name}: {error}") from None
        for read in found:
            takeover.adopt(read)

    def _write(self, content: bytes) -> None:
        """Write atomically a file that only its owner may read, so that no reader sees half a file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_name(self._path.name + ".new")
        fresh.unlink(missing_ok=True)
        with open(fresh, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)


BYTES_MAX = 16 * 1024 * 1024


class LearnedSync:
    """Synchroniser of one engine's learned state with the store, from which all gateways learn."""

    def __init__(self, store: Store, pool: str, engine: AdmissionEngine) -> None:
        self._store = store
        self.pool = pool
        self._engine = engine
        self._written = b""

    async def sync_once(self) -> None:
        """Adopt the learned state in the store, write this engine's, and wait for `INTERVAL_S`."""
        try:
            await self._adopt()
            await self._write()
        except StoreUnavailable:
            pass  # the store logs the error; local state is kept
        await asyncio.sleep(INTERVAL_S)

    async def _adopt(self) -> None:
        content = await self._store.learned_state(self.pool)
        if content is None or content == self._written:
            return
        try:
            takeover.adopt(takeover.read(self._engine, msgspec.json.decode(content)))
        except (ValueError, RecursionError) as error:
            logger.warning("pool %s: the shared learned state cannot be read (%s), and is replaced", self.pool, error)

    async def _write(self) -> None:
        content = msgspec.json.encode(takeover.snapshot(self._engine))
        if content != self._written and len(content) <= BYTES_MAX:
            await self._store.learn(self.pool, content)
            self._written = content
