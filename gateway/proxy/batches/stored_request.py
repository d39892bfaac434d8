"""A stored line as a request of its tenant, answered in memory instead of on a socket."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable

from backends.client.outbox import BatchedWriter, Outbox
from gateway.http.headers import Head, Header
from gateway.http.responder import Responder
from gateway.keys.identity import Principal
from gateway.proxy.pipeline import JSON, Pipeline
from gateway.proxy.request_context import RequestContext

BROKEN = b"HTTP/1.0 502 \r\n\r\n"
"""Substitute for an answer that broke off."""


class BytesRoom:
    """A memory budget for stored lines, or for their answers. A tenant may hold as many bytes as are free: one tenant
    alone half of the budget, two a third each, so a new tenant finds room."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.taken: Counter[str] = Counter()
        self._freed = asyncio.Event()

    def has(self, tenant: str, size: int) -> bool:
        return self.taken[tenant] + size <= self._bytes_max - self.taken.total()

    async def take(self, tenant: str, size: int) -> None:
        """Wait for room and take it."""
        await asyncio.sleep(0)  # earlier waiters first
        while not self.has(tenant, size):
            self._freed.clear()
            await self._freed.wait()
        self.taken[tenant] += size

    def change(self, tenant: str, size: int) -> None:
        """Add to a tenant's bytes, or subtract from them."""
        self.taken[tenant] += size
        if not self.taken[tenant]:
            del self.taken[tenant]
        if size < 0:
            self._freed.set()


class StoredRequest(asyncio.Transport):
    """A line of a stored file as a request, whose answer is collected in memory instead of written to a connection.

    The answer takes room as its bytes come, and is aborted if there is no room. `hold(0)` returns the room.
    """

    def __init__(
        self,
        request_id: str,
        path: str,
        fields: list[Header],
        body: bytes,
        room: BytesRoom,
        tenant: str,
        bytes_max: int,
    ) -> None:
        super().__init__()
        head = Head(path, [JSON, *fields])
        head.method, head.target = "POST", path.encode()
        context = self.context = RequestContext("", head)
        context.id, context.body, context.is_batch = request_id, body, True
        self._writer = BatchedWriter(Outbox(), self)
        # HTTP/1.0: an answer of unknown length is not chunked, and ends with the connection.
        self._responder = Responder(self, self._writer, "POST", True, False)
        self._room, self._tenant, self._bytes_max = room, tenant, bytes_max
        self._size = self._held = 0
        self.is_cut = False
        self.pieces: list[bytes] = []
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def answer(self, pipeline: Pipeline, principal: Principal) -> tuple[int, float, bytes]:
        """Run the request. Return the status, the seconds until a retry (0 if the answer names none) and the body."""
        self.context.comes_from(principal)
        try:
            pipeline.handle_batched(self.context, self._responder)
            await self._done
        finally:
            self._responder.disconnected()
        answer = b"".join(self.pieces)
        self.pieces = []
        head, _, body = answer.partition(b"\r\n\r\n")
        again = re.search(rb"\r\nretry-after-ms: (\d+)", head)
        return int(head[9:12]), int(again[1]) / 1000 if again else 0.0, body

    async def reserve(self) -> None:
        """Wait for room for the longest answer, and take it."""
        await self._room.take(self._tenant, self._bytes_max)
        self._held = self._bytes_max

    def hold(self, size: int) -> None:
        """Set the bytes of room that the request holds."""
        self._room.change(self._tenant, size - self._held)
        self._held = size

    def close(self) -> None:
        """Return the room, and drop references back to this object; the garbage collector rarely visits old cycles."""
        self.hold(0)
        del self.context, self._responder, self._writer

    def cut(self) -> None:
        """Abort the answer."""
        if not self._done.done():
            self._responder.disconnected()
            self._end(BROKEN)

    def _end(self, instead: bytes = b"") -> None:
        if not self._done.done():
            self._writer.flush()
            instead = BROKEN if self.is_cut else instead
            self.pieces = [instead] if instead else self.pieces
            self._done.set_result(None)

    # the connection and the transport, as a responder sees them

    def may_keep_alive(self) -> bool:
        return False

    def release_body(self) -> None:
        """Do nothing: the file still has the body."""

    def answered(self, *, keep_alive: bool) -> None:
        self._end()

    def break_off(self, *, reset: bool) -> None:
        self._end(BROKEN)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_cut:
            return
        self._size += len(data)
        more = self._size - self._held
        if self._size > self._bytes_max or (more > 0 and not self._room.has(self._tenant, more)):
            self.is_cut = True
            asyncio.get_running_loop().call_soon(self.cut)
            return
        self.hold(max(self._held, self._size))
        self.pieces.append(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        for data in list_of_data:
            self.write(data)

    def is_closing(self) -> bool:
        return self._done.done()
