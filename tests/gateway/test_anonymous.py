"""Whoever has shown no key holds no more than one head, and not for long, however they send it.

That nothing is held of their bodies, `test_routes.py` shows.
"""

from __future__ import annotations

import asyncio

from gateway.config.sections.keys import hash_key
from tests.gateway.capture import Upstream, replies
from tests.gateway.live import Starter, chat
from tests.http.http_raw import dripped, statuses_of
from tests.kit.usage import OK

TENANTS = [{"name": "t", "keys": [hash_key("k")]}]
HEAD = b"GET /version HTTP/1.1\r\nHost: x\r\nA: "
HEAD_BYTES_MAX = 65536


async def test_without_a_head_a_connection_lives_as_long_as_the_config_says(start: Starter, quick_sweep: None) -> None:
    """`tests/http` has each way to send too slowly."""
    limits = {"client_head_s": 0.1, "client_idle_s": 1000, "client_body_s": 1000}
    async with Upstream(replies(OK)) as upstream, start(upstream.url, limits=limits, tenants=TENANTS) as live:
        assert {name: getattr(live.server.limits, name) for name in limits} == limits
        assert await dripped(live.gateway.port, HEAD, b"a") == [408]
        assert (await live.ask("/v1/chat/completions", chat())).status == 200


async def test_of_a_head_without_end_no_more_is_held_than_a_head_may_have(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url, tenants=TENANTS) as live:
        reader, writer = await asyncio.open_connection("127.0.0.1", live.gateway.port)
        writer.write(HEAD + b"a" * (HEAD_BYTES_MAX - len(HEAD)))
        assert (await live.ask("/v1/chat/completions", chat())).status == 200  # as long as that one waits for the rest
        assert not reader.at_eof()
        writer.write(b"a")
        assert statuses_of(await reader.read()) == [431]
        emptied = await dripped(live.gateway.port, b"", b"\r\n" * 100_000 + b"GET\n")
        assert emptied == [400], "empty lines are not held at all"
        writer.close()
