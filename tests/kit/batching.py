"""Batches by the official client, and an engine that answers their lines."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from typing import Any

import openai

from gateway.config.sections.keys import hash_key
from tests.gateway.capture import Peer, Script, Seen, Upstream, answer, replies
from tests.gateway.live import MODEL, Live, Starter
from tests.kit.usage import database_at
from tests.waiting import eventually

CHAT: Any = "/v1/chat/completions"
TENANTS: list[dict[str, Any]] = [
    {"name": "alice", "keys": [{"hash": hash_key("k"), "apps": ["chat", "night"]}]},
    {"name": "bob", "keys": [hash_key("b")]},
]
OK = answer(b'{"usage":\n{"prompt_tokens":7,"completion_tokens":2}}')
ANSWERS = replies(OK)


class Client(openai.AsyncOpenAI):
    """The official client, and what tests ask of batches by it."""

    async def made(self, content: bytes, endpoint: Any = CHAT, **fields: Any) -> Any:
        file = await self.files.create(file=("ask.jsonl", content), purpose="batch")
        return await self.made_of(file.id, endpoint, **fields)

    async def made_of(self, file: str, endpoint: Any = CHAT, **fields: Any) -> Any:
        return await self.batches.create(input_file_id=file, endpoint=endpoint, completion_window="24h", **fields)

    async def finished(self, content: bytes, endpoint: Any = CHAT, **fields: Any) -> Any:
        """The batch of these lines, once it is over."""
        return await self.over((await self.made(content, endpoint, **fields)).id)

    async def over(self, batch: str) -> Any:
        return await self.when(batch, is_over)

    async def when(self, batch: str, is_so: Callable[[Any], object]) -> Any:
        """The batch, once this is so."""
        found: list[Any] = []

        async def now() -> object:
            found[:] = [await self.batches.retrieve(batch)]
            return is_so(found[0])

        await eventually(now)
        return found[0]

    async def lines_of(self, file: str) -> list[Any]:
        return [json.loads(each) for each in (await self.files.content(file)).text.splitlines()]


def client(url: str, key: str = "k", **headers: str) -> Client:
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return Client(base_url=url + "/v1", api_key=key, max_retries=0, default_headers=fields)


@asynccontextmanager
async def batching(
    start: Starter, script: Script = ANSWERS, **fields: Any
) -> AsyncIterator[tuple[Upstream, Live, Client]]:
    """An engine, a gateway that keeps batches in a file of its own, and a client of alice."""
    fields = {"tenants": TENANTS, "usage": str(start.directory / "u.db"), **fields}
    async with Upstream(script) as upstream, start(upstream.url, **fields) as live, client(live.url) as api:
        yield upstream, live, api


def line(number: int, url: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"Say {number}"}], "max_tokens": 4}
    return {"custom_id": f"item-{number}", "method": "POST", "url": url, "body": body | fields}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def is_over(batch: Any) -> bool:
    return batch.status in ("completed", "failed", "expired", "cancelled")


def counts(batch: Any) -> tuple[int, int, int]:
    return batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed


def change(url: str, statement: str, *values: object) -> None:
    with closing(database_at(url)) as database, database.transaction() as step:
        step.do(statement, values)


def holding(held: asyncio.Event, numbers: set[int]) -> Script:
    """An engine that keeps the answers to these lines until the event."""

    async def script(seen: Seen, peer: Peer) -> None:
        if number_of(seen) in numbers:
            await held.wait()
        await peer.send(OK)

    return script


async def items_of(live: Live) -> list[float]:
    """How many lines were answered, and how many failed, as the metrics say."""
    metrics = await live.metrics()
    return [metrics["fairgate_batch_items_total", each] for each in ("completed", "failed")]


def number_of(seen: Seen) -> int:
    found = re.search(rb"Say (\d+)", seen.body)
    assert found is not None
    return int(found[1])
