"""How tests ask a pool: one request, and what came of it."""

from __future__ import annotations

from collections.abc import Callable

from backends.client.upstream import UpstreamPool
from backends.upstream_errors import UpstreamError
from tests.backends.raw_server import BODY, REQUEST, Recorder

Open = Callable[..., UpstreamPool]


async def ask(pool: UpstreamPool, head: bytes = REQUEST, body: bytes = BODY) -> tuple[Recorder, UpstreamError | None]:
    recorder = Recorder()
    pool.send(head, body, recorder)
    return recorder, await recorder.end()
