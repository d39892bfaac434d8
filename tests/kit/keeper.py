"""An engine that keeps responses, and what a client asks it."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

from tests.gateway.capture import STREAM_END, STREAM_HEAD, Peer, Seen, Upstream, answer, chunk, named
from tests.gateway.live import MODEL, Live

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
ASKED = {"model": MODEL, "input": "x", "max_output_tokens": 50}
USAGE = {"input_tokens": 7, "output_tokens": 3}
numbers = itertools.count()


class Keeper(Upstream):
    """An engine that keeps responses, as vLLM does if it is told to."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.kept: set[str] = set()
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def _answer(self, seen: Seen, peer: Peer) -> None:
        method, path, _ = seen.line.decode().split(" ")
        steps = path.split("/")
        asked = seen.json if seen.body else {}
        id = steps[3] if len(steps) > 3 else asked.get("previous_response_id")
        if path.startswith(RESPONSES) and id is not None and id not in self.kept:
            await peer.send(answer(b'{"error":{"message":"of the engine"}}', status=b"404 Not Found"))
        elif path == RESPONSES:
            await self._create(asked, peer)
        else:
            await peer.send(answer(json.dumps({"id": id, "method": method}).encode()))

    async def _create(self, asked: dict[str, Any], peer: Peer) -> None:
        id = f"resp_{next(numbers)}"
        self.kept.add(id)
        whole = {"id": id, "object": "response", "model": MODEL, "status": "completed", "usage": USAGE}
        begun = whole | {"status": "queued", "usage": None}
        if not asked.get("stream"):
            await self.goes_on.wait()
            await peer.send(answer(json.dumps(begun if asked.get("background") else whole).encode()))
            return
        await peer.send(STREAM_HEAD + chunk(named("response.created", response=begun)))
        await self.goes_on.wait()
        await peer.send(chunk(named("response.completed", response=whole)) + STREAM_END)


def pools(*engines: Keeper, **more: Any) -> list[dict[str, Any]]:
    backends = [{"name": name, "url": each.url, **more} for name, each in zip("ab", engines, strict=False)]
    return [{"name": "pool", "backends": backends}]


async def respond(live: Live, engine: str = "", key: str = "k", **fields: Any) -> str:
    """Have this engine make a response; its id."""
    [pool] = live.gateway.pools
    for name, backend in pool.backends.items():
        pool.drain(backend, bool(engine) and name != engine)
    async with live.post(RESPONSES, ASKED | fields, key=key) as response:
        text = await response.text()
    for backend in pool.backends.values():
        pool.drain(backend, False)
    assert response.status == 200, text
    return str(json.loads(text)["id"]) if not fields.get("stream") else text.split('"id": "')[1].split('"')[0]
