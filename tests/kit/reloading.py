"""A gateway whose file is written anew and read again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from gateway.config.load import load_config
from gateway.config.sections.keys import hash_key
from gateway.pool.engine_addresses import Resolver, resolve
from tests.gateway.live import Answer, Live, Simulated, Starter, chat, events, until

ALICE, BOB = "key-of-alice-0123456789abcdef", "key-of-bob-0123456789abcdef"


class Reloadable:
    """A gateway with a file, and what is written there."""

    def __init__(self, path: Path, live: Live, fields: dict[str, Any]) -> None:
        self.path = path
        self.live = live
        self.fields = fields

    def write(self, **fields: Any) -> None:
        self.fields = {**self.fields, **fields}
        self.path.write_text(json.dumps(self.fields))  # JSON is YAML too

    async def reload(self, **fields: Any) -> Answer:
        self.write(**fields)
        return await self.post("/reload")

    async def post(self, path: str, **headers: str) -> Answer:
        url = self.live.admin_url + path
        async with self.live.http.post(url, headers=headers) as response:
            return await Answer.of(response)

    async def changed(self, **fields: Any) -> list[str]:
        """What is said to have changed."""
        got = await self.reload(**fields)
        assert (got.status, got.json["outcome"]) == (200, "changed"), got.body
        found: list[str] = got.json["changes"]
        return found

    def ask(self, key: str = ALICE, **fields: Any) -> asyncio.Task[Answer]:
        body = chat(**{"max_tokens": 20, "ignore_eos": True, **fields})
        return asyncio.ensure_future(self.live.ask("/v1/chat/completions", body, key=key))

    async def streams(self, count: int) -> list[asyncio.Task[Answer]]:
        """So many long ones, once all of them wait or run."""
        before = len(self.live.gateway.pools[0].dispatcher)
        asked = [self.ask(stream=True, max_tokens=300) for _ in range(count)]
        await until(lambda: len(self.live.gateway.pools[0].dispatcher) == before + count)
        return asked


def backends(*engines: Simulated, **fields: Any) -> list[dict[str, Any]]:
    return [{"url": engine.url, "name": f"e{n}", **fields} for n, engine in enumerate(engines)]


def pool(*engines: Simulated, **fields: Any) -> list[dict[str, Any]]:
    return [{"name": "pool", "backends": backends(*engines, **fields)}]


@asynccontextmanager
async def reloadable(
    directory: Path, *engines: Simulated, resolver: Resolver = resolve, **fields: Any
) -> AsyncIterator[Reloadable]:
    path, log = directory / "fairgate.yaml", directory / "access.log"
    config = {
        "listen": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "access_log": str(log),
        "tenants": [
            {"name": "alice", "keys": [hash_key(ALICE)]},
            {"name": "bob", "keys": [hash_key(BOB)]},
        ],
        "pools": pool(*engines),
        **fields,
    }
    path.write_text(json.dumps(config))
    async with Starter(directory)(load=partial(load_config, path), resolver=resolver, **config) as live:
        yield Reloadable(path, live, config)


def is_whole(answer: Answer) -> bool:
    return answer.status == 200 and events(answer.body)[-1] == "[DONE]"
