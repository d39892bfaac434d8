"""What clients have the gateway hold, and for how long, is what the config says, and of what is over nothing stays."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.bounds import ENDS, stream, whole
from gateway.config.memory_bounds import MEMORY_MAX_LEAST, MemoryBounds
from gateway.proxy.batches.stored_request import StoredRequest
from gateway.proxy.exchange import Exchange
from gateway.proxy.request_context import RequestContext
from tests.gateway.capture import BEGUN, DONE, OK, STREAM_END, Peer, Seen, Upstream, answer, chunk, replies
from tests.gateway.live import CHAT, MODEL, Live, Starter, chat, until
from tests.http.http_raw import dripped
from tests.kit.batching import TENANTS, client, counts, jsonl, line
from tests.waiting import eventually

BOUNDS = MemoryBounds(MEMORY_MAX_LEAST, 1)


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
        await peer.send(BEGUN)
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
        await until(lambda: 0 < pool.answers_bytes <= BOUNDS.answers_bytes)
        go_on.set()
        answers = await asyncio.gather(*asked)
        assert {(each.status, len(each.json["text"])) for each in answers} == {(200, part)}
        assert pool.answers_bytes == 0


# --- names that clients invent ---

CALLS = answer(b'{"choices":[{"finish_reason":"tool_calls"}],"usage":{"prompt_tokens":7,"completion_tokens":2}}')
POOLS, ASKED, AT_ONCE = 20, 160, 20


async def test_every_table_of_a_running_gateway_has_its_bound(start: Starter) -> None:
    async with Upstream(replies(CALLS)) as upstream:
        backends = [{"url": f"{upstream.url}/{number}"} for number in range(2)]
        pools = [{"name": "first", "models": [MODEL], "backends": backends}]
        pools += [
            {"name": f"p{number}", "models": [f"m{number}"], "backends": [{"url": f"{upstream.url}/of/{number}"}]}
            for number in range(1, POOLS)
        ]
        async with start(pools=pools, memory_max=MEMORY_MAX_LEAST, quota={"tokens_per_day": 10**9}) as live:
            for begun in range(0, ASKED, AT_ONCE):
                answers = [
                    live.ask("/v1/chat/completions", chat(f"question {n}", user=f"u{n}"), key=f"key {n}")
                    for n in range(begun, begun + AT_ONCE)
                ]
                assert {each.status for each in await asyncio.gather(*answers)} == {200}
            await until(live.holds_nothing)
            bounds = MemoryBounds(MEMORY_MAX_LEAST, POOLS)
            gateway, engine = live.gateway, live.engine
            backlog = engine.policy.order.backlog
            assert backlog is not None
            assert backlog.remembered() == bounds.size("flows") // 2 * 2 < ASKED
            assert len(engine.recent._decided) == bounds.size("decisions") < ASKED
            assert len(engine.requests.lengths._populations) == bounds.size("lengths") < ASKED  # type: ignore[attr-defined]
            assert engine.policy.prefixes is not None
            assert engine.policy.prefixes._blocks_max == bounds.blocks
            assert engine.interactions.settings.open_max == bounds.size("interactions")
            assert engine.interactions.paces.apps_max == bounds.size("paces")
            assert engine.quotas is not None
            assert engine.quotas.day._members_max == engine.quotas.minute._members_max == bounds.size("quotas")
            assert gateway.recent._ends.maxlen == bounds.size("ends")
            assert gateway.shared.claims is not None
            assert gateway.shared.claims._flows_max == bounds.size("texts")
            limits = live.server.limits
            assert (limits.bodies_bytes_max, limits.connections_max) == (bounds.bodies_bytes, bounds.connections)
            assert engine.limits.queue_bytes_max == bounds.queue_bytes


# --- nothing of a request that is over waits for the cyclic collector, which looks at what is old almost never ---

OF_A_REQUEST = (StoredRequest, RequestContext, Exchange)
TIMES = 12


@pytest.fixture(scope="module")
def _frozen() -> Iterator[None]:
    """What was there before is not looked through for each test."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def _uncollected(_frozen: None) -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> Counter[str]:
    """Objects of requests, by their class."""
    return Counter([type(each).__name__ for each in gc.get_objects() if isinstance(each, OF_A_REQUEST)])


async def is_little() -> bool:
    """Connections and tables have the latest."""
    return alive().total() < TIMES // 2


async def script(seen: Seen, peer: Peer) -> None:
    do = seen.body.split(b"do-")[1].split(b" ")[0].decode()
    if do in ENDS:
        await peer.send(stream(ENDS[do]))
    elif do == "never":
        await asyncio.Event().wait()
    elif do != "closes":
        await peer.send(whole("hi", "200 OK" if do == "whole" else "500 Internal Server Error"))
    if do in ("cut", "closes"):
        peer.writer.close()


async def ask(live: Live, do: str) -> None:
    """One after another; of `never` the client goes away as soon as an engine has the request."""
    body = chat(f"do-{do} " + "x" * 10_000, stream=do in ENDS, model="none" if do == "unknown" else "simulated")
    for _ in range(TIMES):
        asked = asyncio.ensure_future(live.ask(CHAT, body))
        if do == "never":
            await until(lambda: live.engine.dispatched)
            asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(live.holds_nothing)


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize("do", [*ENDS, "whole", "status", "closes", "unknown", "never"])
async def test_of_a_request_nothing_stays(start: Starter, do: str) -> None:
    async with Upstream(script) as upstream, start(upstream.url, tenants=TENANTS) as live:
        await ask(live, do)
        await eventually(is_little)


@pytest.mark.usefixtures("_uncollected")
async def test_of_a_line_of_a_batch_nothing_stays(start: Starter, tmp_path: Path) -> None:
    async with (
        Upstream(replies(OK)) as upstream,
        start(upstream.url, tenants=TENANTS, usage=str(tmp_path / "u.db")) as live,
        client(live.url) as api,
    ):
        done = await api.finished(jsonl(*map(line, range(TIMES))))
        assert counts(done) == (TIMES, TIMES, 0)
        await eventually(is_little)
