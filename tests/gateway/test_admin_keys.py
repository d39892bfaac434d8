"""Keys without Redis: made, listed and revoked by HTTP and by command, in effect at every gateway of one database."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.config.model import hash_key, new_key
from tests.gateway.capture import Upstream, answer, replies
from tests.gateway.live import MODEL, WAIT_S, Answer, Live, Starter, chat, until
from tests.gateway.test_command_line import config_file, run
from tests.postgres_server import PostgresServer

OK = answer(b'{"usage":{"prompt_tokens":7,"completion_tokens":2}}')
TOKEN = "an-operator's-token"
NAMED = new_key()
TENANTS = [{"name": "alice", "weight": 2.0, "keys": [hash_key(NAMED)]}, {"name": "bob"}]


@pytest.fixture(params=["sqlite", "postgresql"])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    if request.param == "sqlite":
        yield str(tmp_path / "usage.db")
    else:
        async with PostgresServer() as server:
            yield server.url


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.keys.issued.POLL_S", 0.01)


async def admin(live: Live, method: str, path: str, body: Any = None, *, token: str = TOKEN) -> Answer:
    url = f"http://127.0.0.1:{live.gateway.admin_port}{path}"
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    async with live.http.request(method, url, data=data, headers={"authorization": f"Bearer {token}"}) as response:
        return await Answer.of(response)


async def answers(live: Live, key: str, status: int, **headers: str) -> None:
    """Until it does. Not too often: wrong keys close an address."""
    async with asyncio.timeout(WAIT_S):
        while (await live.ask("/v1/chat/completions", chat(), key=key, **headers)).status != status:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_keys_are_made_and_revoked_at_every_gateway(start: Starter, url: str) -> None:
    fields: dict[str, Any] = {"tenants": TENANTS, "usage": url, "admin_token": TOKEN}
    async with (
        Upstream(replies(OK)) as upstream,
        start(upstream.url, **fields) as one,
        start(upstream.url, **fields) as two,
    ):
        terms = {"tenant": "bob", "apps": ["chat", "batch"], "models": [MODEL], "expires": "9000-01-31", "weight": 4}
        made = await admin(one, "POST", "/keys", terms)
        assert made.status == 201
        key = made.json["key"]
        assert made.json == {**terms, "hash": hash_key(key), "key": key}
        for live in (one, two):
            await answers(live, key, 200, x_fairgate_app="batch")
        asked = (await one.ask("/v1/chat/completions", chat(), key=key)).headers["x-request-id"]
        await until(lambda: asked in one.log.read_text())
        line = (await one.lines(1))[-1]
        assert (line["tenant"], line["weight"], line["app"]) == ("bob", 4.0, "chat")

        listed = (await admin(two, "GET", "/keys")).json["keys"]
        assert listed == [
            {"tenant": "alice", "hash": hash_key(NAMED), "apps": ["default"], "from": "config", "revoked": False},
            {**terms, "hash": hash_key(key), "from": "database", "revoked": False},
        ]
        for name in (hash_key(key), hash_key(NAMED)):
            assert (await admin(two, "DELETE", f"/keys/{name}")).json == {"hash": name, "revoked": True}
        for live in (one, two):
            await answers(live, key, 401)
            await answers(live, NAMED, 401)
        assert [each["revoked"] for each in (await admin(one, "GET", "/keys")).json["keys"]] == [True]
        assert (await admin(one, "DELETE", f"/keys/{hash_key(key)}")).status == 404
    async with Upstream(replies(OK)) as upstream, start(upstream.url, **fields) as later:
        await answers(later, NAMED, 401)


async def test_the_command_makes_tenants_that_the_file_does_not_have(start: Starter) -> None:
    url = str(start.directory / "usage.db")
    async with Upstream(replies(OK)) as upstream, start(upstream.url, tenants=[], usage=url) as live:
        config = config_file(start.directory, upstream.url, tenants=[], usage=url)
        code, out, said = await run("keys", "create", "--tenant", "carol", "--weight", "3", "--app", "x", "-c", config)
        assert (code, said) == (0, "")
        key = out.split()[1]
        await answers(live, key, 200)
        line = (await live.lines(1))[-1]
        assert (line["tenant"], line["weight"], line["app"]) == ("carol", 3.0, "x")
        assert (await run("keys", "list", "-c", config))[1] == f"{hash_key(key)}  database carol apps=x weight=3\n"
        assert (await run("keys", "revoke", "-c", config, given=key.encode() + b"\n"))[1].endswith("revoked\n")
        await answers(live, key, 401)
        code, _, said = await run("keys", "create", "--tenant", "carol", "-c", config)
        assert (code, "has no tenant named 'carol', and the key brings no weight" in said) == (2, True)


async def test_keys_stay_known_while_the_database_is_gone(start: Starter) -> None:
    async with PostgresServer() as server, Upstream(replies(OK)) as upstream:
        fields: dict[str, Any] = {"tenants": TENANTS, "usage": server.url, "admin_token": TOKEN}
        async with start(upstream.url, **fields) as live:
            key = (await admin(live, "POST", "/keys", {"tenant": "bob"})).json["key"]
            await answers(live, key, 200)
            await server.crash()
            got = await admin(live, "POST", "/keys", {"tenant": "bob"})
            assert (got.status, "127.0.0.1" in got.json["error"]) == (503, True)
            assert (await live.ask("/v1/chat/completions", chat(), key=key)).status == 200
            await server.start()
            usage = live.gateway.usage
            assert usage is not None
            second = await admin(live, "POST", "/keys", {"tenant": "bob"})
            await answers(live, second.json["key"], 200)
            await until(lambda: usage.fault is None)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "send JSON such as"),
        ([], 400, "send JSON such as"),
        ({"tenant": 1}, 400, "send JSON such as"),
        ({"tenant": "eve"}, 400, "has no tenant named 'eve', and the key brings no weight"),
        ({"tenant": "a b", "weight": 1}, 400, "can have no tenant whose name is not 1 to 128 characters"),
        ({"tenant": "", "weight": 1}, 400, "can have no tenant whose name is not"),
        ({"tenant": "bob", "weight": 0}, 400, "weight: Input should be greater than 0"),
        ({"tenant": "bob", "weight": "3"}, 400, "weight: Input should be a valid number"),
        ({"tenant": "bob", "expires": "soon"}, 400, "expires: should be a day such as"),
        ({"tenant": "bob", "apps": []}, 400, "apps: "),
        ({"tenant": "bob", "hash": "sha256:00"}, 400, "'hash' is none of: tenant, expires"),
    ],
)
async def test_a_key_that_cannot_be_made_says_why(start: Starter, body: Any, status: int, said: str) -> None:
    fields: dict[str, Any] = {"tenants": TENANTS, "usage": str(start.directory / "u.db"), "admin_token": TOKEN}
    async with start("http://127.0.0.1:1", **fields) as live:
        got = await admin(live, "POST", "/keys", body)
        assert got.status == status
        assert said in got.json["error"]
        assert len((await admin(live, "GET", "/keys")).json["keys"]) == 1


async def test_nobody_makes_keys_without_the_token_or_a_place_for_them(start: Starter) -> None:
    usage = str(start.directory / "u.db")
    async with start("http://127.0.0.1:1", tenants=TENANTS, usage=usage) as live:
        for method, path in (("GET", "/keys"), ("POST", "/keys"), ("DELETE", f"/keys/{hash_key(NAMED)}")):
            got = await admin(live, method, path, {"tenant": "bob"} if method == "POST" else None)
            assert (got.status, "set admin_token" in got.json["error"]) == (403, True)
    async with start("http://127.0.0.1:1", tenants=TENANTS, usage=usage, admin_token=TOKEN) as live:
        assert (await admin(live, "POST", "/keys", {"tenant": "bob"}, token="wrong")).status == 401
    async with start("http://127.0.0.1:1", tenants=TENANTS, admin_token=TOKEN) as live:
        got = await admin(live, "GET", "/keys")
        assert (got.status, "neither `usage:` nor" in got.json["error"]) == (404, True)
