"""Keys that are made while a gateway runs: by whom, and when it takes them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pydantic import SecretStr

from gateway.config.sections.keys import KeyConfig, hash_key, new_key
from gateway.config.sections.services import UsageConfig
from gateway.keys.issuance import issue, list_keys, make_keys, revoke, rotate, seconds_of
from gateway.keys.issued import KeyTable, entry
from gateway.usage.thread import CLOSE_S, DatabaseThread
from tests.gateway.capture import OK, Upstream, replies
from tests.gateway.live import WAIT_S, Answer, Live, Starter, chat

TOKEN = "an-operator's-token"
MOMENT = r"2\d{3}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
NAMED = new_key()
TENANTS = [{"name": "alice", "weight": 2.0, "keys": [hash_key(NAMED)]}, {"name": "bob"}]


@asynccontextmanager
async def issuing(start: Starter, **fields: Any) -> AsyncIterator[tuple[Upstream, Live]]:
    """An engine, and a gateway that makes keys and keeps them in a file of its own."""
    fields = {"tenants": TENANTS, "usage": str(start.directory / "usage.db"), "admin_token": TOKEN, **fields}
    async with Upstream(replies(OK)) as upstream, start(upstream.url, **fields) as live:
        yield upstream, live


def table_of(live: Live) -> KeyTable:
    assert live.gateway.keys is not None
    return live.gateway.keys


async def made(live: Live, tenant: str = "bob", **terms: Any) -> str:
    """A new key."""
    keys = make_keys(live.gateway.config, [tenant], terms)
    await issue(table_of(live), keys)
    return keys[0][1]


async def revoked(live: Live, key_hash: str) -> str:
    """A remark on it."""
    return await revoke(table_of(live), live.gateway.config, key_hash)


async def listed(live: Live) -> list[dict[str, Any]]:
    return await list_keys(table_of(live), live.gateway.config)


async def note_key(table: KeyTable, key: KeyConfig, tenant: str) -> None:
    await table.note({key.hash: entry(tenant, key)})


async def rotated(live: Live, key: str, grace: str = "0s", expires: str | None = None) -> str:
    new, config = new_key(), live.gateway.config
    await rotate(
        table_of(live), config, hash_key(key), hash_key(new),
        unix_s=time.time(), grace_s=seconds_of(grace), expires=expires,
    )  # fmt: skip
    return new


async def admin(live: Live, method: str, path: str, body: Any = None, *, token: str = TOKEN) -> Answer:
    url = live.admin_url + path
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    async with live.http.request(method, url, data=data, headers={"authorization": f"Bearer {token}"}) as response:
        return await Answer.of(response)


async def answers(live: Live, key: str, status: int, **headers: str) -> None:
    """Until it does. Not too often: wrong keys close an address."""
    async with asyncio.timeout(WAIT_S):
        while (await live.ask("/v1/chat/completions", chat(), key=key, **headers)).status != status:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@asynccontextmanager
async def database_at(url: str) -> AsyncIterator[DatabaseThread]:
    database = DatabaseThread(UsageConfig(url=SecretStr(url)))
    try:
        yield database
    finally:
        await database.close(CLOSE_S)
