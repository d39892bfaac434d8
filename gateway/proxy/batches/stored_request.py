"""What does an engine answer to a stored line? Asked as any request of its tenant is, without a socket.

Answers count among those that the pool keeps until they are whole, until they are written down. While
batches hold half of what the pool may keep, one answer goes on, and of the others no more is read.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from backends.client.outbox import Outbox, Outlet
from gateway.http.headers import Header
from gateway.http.responder import Responder
from gateway.keys.identity import Principal
from gateway.proxy.pipeline import JSON, Pipeline
from gateway.proxy.request_context import RequestContext

if TYPE_CHECKING:
    from gateway.pool.pool import Pool

BROKEN = b"HTTP/1.0 502 \r\n\r\n"
"""Stands for an answer that broke off."""


class HeldAnswers:
    """The answers of one gateway of which no more is read for now, but for the first, which goes on."""

    def __init__(self) -> None:
        self._waiting: dict[StoredRequest, None] = {}

    def add(self, request: StoredRequest) -> None:
        """Let the rest of this answer wait, if others wait already."""
        if request not in self._waiting:
            self._waiting[request] = None
            if len(self._waiting) > 1:
                request.pause()

    def go_on(self) -> None:
        """Read the first on, and as many as there is room for now: one has ended, or was written down."""
        for request in list(self._waiting):
            if request.is_closing():
                del self._waiting[request]
                continue
            request.resume()
            if request.holds_too_much():
                return
            del self._waiting[request]


class StoredRequest(asyncio.Transport):
    """One request and what is written as its answer: its connection, in memory. `let_go` of it at last."""

    def __init__(
        self, request_id: str, path: str, fields: list[Header], body: bytes, answer_bytes_max: int, held: HeldAnswers
    ) -> None:
        super().__init__()
        context = self.context = RequestContext("", path, [JSON, *fields])
        context.method, context.target = "POST", path.encode()
        context.id, context.body, context.is_batch = request_id, body, True
        self._outlet = Outlet(Outbox(), self)
        # HTTP/1.0: what has no known length is not chunked, and ends with the connection.
        self._responder = Responder(self, self._outlet, "POST", True, False)
        self._left = answer_bytes_max
        self._held = held
        self._pool: Pool | None = None
        """Where the answer counts."""
        self._held_bytes = 0
        self._pieces: list[bytes] = []
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def answer(self, pipeline: Pipeline, principal: Principal) -> tuple[int, float, bytes]:
        """The status, in how many seconds to come again (0: nothing is said), and the body."""
        self.context.principal, self.context.tenant = principal, principal.tenant
        try:
            pipeline.ask(self.context, self._responder)
            await self._done
        finally:
            self._responder.disconnected()
            self._end(BROKEN)
        answer = b"".join(self._pieces)
        self._pieces = []
        head, _, body = answer.partition(b"\r\n\r\n")
        again = re.search(rb"\r\nretry-after-ms: (\d+)", head)
        return int(head[9:12]), int(again[1]) / 1000 if again else 0.0, body

    def cut(self) -> None:
        """Wait no longer for the answer."""
        self._responder.disconnected()
        self._end(BROKEN)

    def count(self, size: int) -> None:
        """So many bytes of the answer are in memory from now on."""
        if self._pool is None and self.context.request is not None:
            self._pool = self.context.serving_pool
        if self._pool is not None:
            self._pool.answers_bytes += size - self._held_bytes
            self._held_bytes = size

    def let_go(self) -> None:
        """Nothing of the answer is in memory any longer."""
        self.count(0)
        self._held.go_on()

    def holds_too_much(self) -> bool:
        return self._pool is not None and self._pool.holds_too_much(is_batch=True)

    def pause(self) -> None:
        """Read no more of the answer, until `resume`."""
        if self._responder.on_pause is not None:
            self._responder.on_pause()

    def resume(self) -> None:
        if self._responder.on_resume is not None:
            self._responder.on_resume()

    def _weigh(self) -> None:
        if self._left < 0:
            self.cut()
        elif not self._done.done() and self.holds_too_much():
            self._held.add(self)

    def _end(self, instead: bytes = b"") -> None:
        if not self._done.done():
            self._outlet.flush()
            self._pieces = [instead] if instead else self._pieces
            self._done.set_result(None)

    # what writes the answer sees

    def may_keep_alive(self) -> bool:
        return False

    def body_let_go(self) -> None:
        """The file has it."""

    def answered(self, *, keep_alive: bool) -> None:
        self._end()

    def break_off(self, *, reset: bool) -> None:
        self._end(BROKEN)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._pieces.append(bytes(data))
        self._left -= len(data)
        self.count(self._held_bytes + len(data))
        if self._left < 0 or self.holds_too_much():
            asyncio.get_running_loop().call_soon(self._weigh)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        for data in list_of_data:
            self.write(data)

    def is_closing(self) -> bool:
        return self._done.done()

    def get_write_buffer_size(self) -> int:
        return 0
