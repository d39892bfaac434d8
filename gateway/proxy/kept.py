"""How much of answers is kept until they are whole? Each counts on the pool that it is of."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.pool.pool import Pool

__all__ = ["Kept"]


class Kept:
    """What has come of one answer so far, kept until all of it is there."""

    __slots__ = ("_parts", "_pool", "size")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._parts: list[bytes] = []
        self.size = 0

    def add(self, data: bytes) -> None:
        """So much more has come."""
        self._parts.append(data)
        self.size += len(data)
        self._pool.answers_bytes += len(data)

    def joined(self) -> bytes:
        """All that has come."""
        if len(self._parts) != 1:
            self._parts = [b"".join(self._parts)]
        return self._parts[0]

    def let_go(self) -> None:
        """Keep nothing of it any longer."""
        self._pool.answers_bytes -= self.size
        self._parts, self.size = [], 0
