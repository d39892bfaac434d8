"""What does an engine answer to a stored line? Asked as any request of its tenant is, without a socket."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable

from backends.client.outbox import Outbox, Outlet
from gateway.http.headers import Header
from gateway.http.responder import Responder
from gateway.keys.identity import Principal
from gateway.proxy.pipeline import JSON, Pipeline
from gateway.proxy.request_context import RequestContext

BROKEN = b"HTTP/1.0 502 \r\n\r\n"
"""Stands for an answer that broke off."""


class StoredRequest(asyncio.Transport):
    """One request and what is written as its answer: its connection, in memory."""

    def __init__(self, request_id: str, path: str, fields: list[Header], body: bytes, answer_bytes_max: int) -> None:
        super().__init__()
        context = self.context = RequestContext("", path, [JSON, *fields])
        context.method, context.target = "POST", path.encode()
        context.id, context.body, context.is_batch = request_id, body, True
        self._outlet = Outlet(Outbox(), self)
        # HTTP/1.0: what has no known length is not chunked, and ends with the connection.
        self._responder = Responder(self, self._outlet, "POST", True, False)
        self._left = answer_bytes_max
        self._pieces: list[bytes] = []
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def answer(self, pipeline: Pipeline, principal: Principal) -> tuple[int, float, bytes]:
        """The status, in how many seconds to come again (0: nothing is said), and the body."""
        self.context.comes_from(principal)
        try:
            pipeline.ask(self.context, self._responder)
            await self._done
        finally:
            self._responder.disconnected()
        head, _, body = b"".join(self._pieces).partition(b"\r\n\r\n")
        again = re.search(rb"\r\nretry-after-ms: (\d+)", head)
        return int(head[9:12]), int(again[1]) / 1000 if again else 0.0, body

    def cut(self) -> None:
        """Wait no longer for the answer."""
        self._responder.disconnected()
        self._end(BROKEN)

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
        if self._left < 0:
            asyncio.get_running_loop().call_soon(self.cut)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        for data in list_of_data:
            self.write(data)

    def is_closing(self) -> bool:
        return self._done.done()

    def get_write_buffer_size(self) -> int:
        return 0
