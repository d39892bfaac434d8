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

from gateway.http.errors import ApiError, Reason
from gateway.request.slices import Slices

__all__ = ["Reading", "Readings"]

logger = logging.getLogger("fairgate")

SLICE_S: Final = 0.002
BYTES_MAX: Final = 512 << 20
"""Of all bodies that are being read."""
TENANT_BYTES_MAX: Final = 256 << 20
_RETRY_S: Final = 1.0


class Reading:
    """One body that is being read. `work` is under way; it ends with whatever is to be done once it is read."""

    __slots__ = ("size", "tenant", "work")

    def __init__(self, tenant: str, work: Slices, size: int) -> None:
        self.tenant = tenant
        self.work = work
        self.size = size


class Readings:
    """All of one process."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, list[Reading]] = OrderedDict()
        """By tenant, in the order of their turns."""
        self._bytes = 0
        self._running: Reading | None = None
        self._is_scheduled = False

    def __len__(self) -> int:
        return sum([len(readings) for readings in self._waiting.values()])

    def start(self, reading: Reading) -> None:
        """Read this one. `ApiError` 503 if too much is being read."""
        own = self._waiting.get(reading.tenant)
        own_bytes = sum([each.size for each in own]) if own is not None else 0
        if self._bytes + reading.size > BYTES_MAX or own_bytes + reading.size > TENANT_BYTES_MAX:
            message = "too many large requests are being read: try again"
            raise ApiError(Reason.SERVER_BUSY, message, retry_after_s=_RETRY_S)
        self._bytes += reading.size
        if own is not None:
            own.append(reading)
        else:
            self._waiting[reading.tenant] = [reading]
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
        tenant = next(iter(self._waiting))
        self._waiting.move_to_end(tenant)
        reading = self._running = self._waiting[tenant][0]
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

    def _forget(self, reading: Reading) -> bool:
        own = self._waiting.get(reading.tenant)
        if own is None or reading not in own:
            return False
        own.remove(reading)
        if not own:
            del self._waiting[reading.tenant]
        self._bytes -= reading.size
        return True
