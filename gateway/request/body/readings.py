"""Whose large body is read next? All of them a few milliseconds at a time, tenants in turn.

A body of many megabytes takes longer to read than others should wait for the event loop, and no thread helps: what
reads holds the interpreter. So a reading is cut into slices, and in every turn of the loop one of them runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from typing import Final

from gateway.request.body.slices import Slices

logger = logging.getLogger("fairgate")

SLICE_S: Final = 0.002


class Reading:
    """One body that is being read. `work` is under way; it ends with whatever is to be done once it is read."""

    __slots__ = ("has_begun", "size", "tenant", "work")

    def __init__(self, tenant: str, work: Slices, size: int) -> None:
        self.tenant = tenant
        self.work = work
        self.size = size
        self.has_begun = False


class Readings:
    """All of one process. What reading takes beside the bodies is bounded: where it is too much, the next one waits."""

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max`: of bodies that are read at once; one that has more is read alone."""
        self._bytes_max = bytes_max
        self._waiting: OrderedDict[str, list[Reading]] = OrderedDict()
        """By tenant, in the order of their turns."""
        self._begun_bytes = 0
        self._next: Reading | None = None
        """The next to begin, once there is room: no other one goes before it."""
        self._running: Reading | None = None
        self._is_scheduled = False

    def __len__(self) -> int:
        return sum([len(readings) for readings in self._waiting.values()])

    def start(self, reading: Reading) -> None:
        """Read this one."""
        self._waiting.setdefault(reading.tenant, []).append(reading)
        self._schedule()

    def cancel(self, reading: Reading) -> None:
        """Nobody waits for it any longer."""
        if reading is not self._running and self._forget(reading):
            reading.work.close()

    def give_up(self, error: Exception) -> None:
        """Raise this in all of them: it is for them to say so."""
        for reading in [reading for readings in self._waiting.values() for reading in readings]:
            if self._forget(reading):
                try:
                    reading.work.throw(error)
                except StopIteration:
                    pass

    def _schedule(self) -> None:
        if not self._is_scheduled and self._waiting:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        """One slice, for the tenant whose turn it is."""
        self._is_scheduled = False
        if not self._waiting:
            return
        for tenant in list(self._waiting):
            self._waiting.move_to_end(tenant)
            reading = self._waiting[tenant][0]
            if reading.has_begun or self._may_begin(reading):
                break
        self._running = reading
        until = time.monotonic() + SLICE_S
        try:
            next(reading.work)
            while time.monotonic() < until:
                next(reading.work)
        except StopIteration:
            self._forget(reading)
        except Exception:
            logger.exception("a body could not be read")
            self._forget(reading)
        finally:
            self._running = None
        self._schedule()

    def _may_begin(self, reading: Reading) -> bool:
        """Is there memory to read this body beside the bodies whose reading has begun?"""
        if self._next is not None and self._next is not reading:
            return False
        if self._begun_bytes and self._begun_bytes + reading.size > self._bytes_max:
            self._next = reading
            return False
        self._next = None
        self._begun_bytes += reading.size
        reading.has_begun = True
        return True

    def _forget(self, reading: Reading) -> bool:
        own = self._waiting.get(reading.tenant)
        if own is None or reading not in own:
            return False
        own.remove(reading)
        if not own:
            del self._waiting[reading.tenant]
        if reading.has_begun:
            self._begun_bytes -= reading.size
        if self._next is reading:
            self._next = None
        return True
