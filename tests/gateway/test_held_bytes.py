"""What clients have the gateway hold, and for how long, is what the config says."""

from __future__ import annotations

import asyncio

from gateway.config.memory_bounds import MEMORY_MAX_LEAST, bounds_of
from tests.gateway.capture import DONE, STREAM_END, STREAM_HEAD, Peer, Seen, Upstream, chunk, token
from tests.gateway.live import Starter, chat, until
from tests.http.http_raw import dripped

CHAT = "/v1/chat/completions"
BOUNDS = bounds_of(MEMORY_MAX_LEAST, 1)


async def test_without_a_head_a_connection_lives_as_long_as_the_config_says(start: Starter, quick_sweep: None) -> None:
    """`tests/http` has each way to send too slowly."""
    limits = {"client_head_s": 0.1, "client_idle_s": 1000, "client_body_s": 1000}
    async with start("sim:demo", limits=limits) as live:
        assert {name: getattr(live.server.limits, name) for name in limits} == limits
        assert await dripped(live.gateway.port, b"GET /version HTTP/1.1\r\nHost: x\r\nA: ", b"a") == [408]


async def test_a_body_counts_until_its_answer_begins(start: Starter) -> None:
    begin, end = asyncio.Event(), asyncio.Event()

    async def script(seen: Seen, peer: Peer) -> None:
        await begin.wait()
        await peer.send(STREAM_HEAD + chunk(token("a")))
        await end.wait()
        await peer.send(chunk(DONE) + STREAM_END)

    async with Upstream(script) as upstream, start(upstream.url) as live:
        asked = asyncio.ensure_future(live.ask(CHAT, chat("x" * 10_000, stream=True), key="k"))
        await until(lambda: upstream.requests)
        assert live.server.bodies_bytes > 10_000
        begin.set()
        await until(lambda: not live.server.bodies_bytes)
        assert not asked.done()
        end.set()
        assert (await asked).status == 200
        await until(live.holds_nothing)


async def test_answers_beyond_what_is_kept_are_relayed_as_they_come(start: Starter) -> None:
    part = BOUNDS.answers_bytes // 3
    go_on = asyncio.Event()

    first, last = b'{"text":"' + b"x" * part, b'","usage":{"prompt_tokens":1,"completion_tokens":9}}'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(first + last)

    async def script(seen: Seen, peer: Peer) -> None:
        await peer.send(head + first)
        await go_on.wait()
        await peer.send(last)

    async with Upstream(script) as upstream, start(upstream.url, memory_max=MEMORY_MAX_LEAST) as live:
        pool = live.gateway.pools[0]
        asked = [asyncio.ensure_future(live.ask(CHAT, chat(), key=f"k{number}")) for number in range(5)]
        await until(lambda: len(upstream.requests) == 5)
        await until(lambda: 0 < pool.answers_bytes <= BOUNDS.answers_bytes and not pool.holds_too_much)
        go_on.set()
        answers = await asyncio.gather(*asked)
        assert {(each.status, len(each.json["text"])) for each in answers} == {(200, part)}
        assert pool.answers_bytes == 0
        await until(live.holds_nothing)
