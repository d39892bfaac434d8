"""An engine that says nothing of its load, and answers one request after the other, is sent few at a time."""

from __future__ import annotations

import asyncio

import pytest

from gateway.proxy.exchange import Exchange
from policies.capacity.slots import FIRST_SLOTS
from tests.gateway.capture import STREAM_END, STREAM_HEAD, Peer, Seen, Upstream, chunk, token
from tests.gateway.live import MODEL, Starter, chat

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}],"model":"%b"}\n\n' % MODEL.encode()


async def test_the_role_alone_is_no_sign_that_the_engine_has_begun(start: Starter) -> None:
    turn, inside, most_inside = asyncio.Lock(), 0, 0

    async def one_by_one(seen: Seen, peer: Peer) -> None:
        """As `transformers serve`: each stream gets its role at once and its tokens in its turn, and no `[DONE]`."""
        nonlocal inside, most_inside
        inside += 1
        most_inside = max(most_inside, inside)
        await peer.send(STREAM_HEAD + chunk(ROLE))
        async with turn:
            await peer.send(chunk(token("a")))
            await asyncio.sleep(0)
            inside -= 1
            await peer.send(chunk(token("b", "length")) + STREAM_END)

    async with Upstream(one_by_one) as engine:
        pool = {"name": "pool", "backends": [{"url": engine.url, "engine": "openai"}]}
        async with start(pools=[pool]) as live:

            async def ask_often() -> None:
                for _ in range(4):
                    assert (await live.ask("/v1/chat/completions", chat(stream=True))).status == 200

            await asyncio.gather(*[ask_often() for _ in range(40)])
            target = live.gateway.pools[0].config.capacity.waiting_target
            assert most_inside <= FIRST_SLOTS + 2 * target


@pytest.mark.parametrize(("kind", "is_start"), [("vllm", True), ("openai", False)])
async def test_an_answer_begins_once(start: Starter, kind: str, is_start: bool) -> None:
    """With its role where that comes with the first token, otherwise with the first token."""
    goes_on = asyncio.Event()

    async def in_pieces(seen: Seen, peer: Peer) -> None:
        await peer.send(STREAM_HEAD + chunk(ROLE))
        await goes_on.wait()
        await peer.send(chunk(token("a")) + chunk(token("b", "length")) + STREAM_END)

    async with Upstream(in_pieces) as engine:
        pool = {"name": "pool", "backends": [{"url": engine.url, "engine": kind}]}
        async with start(pools=[pool]) as live, live.post("/v1/chat/completions", chat(stream=True)) as response:
            assert ROLE.strip() in await response.content.readany()
            [exchange] = live.gateway.pools[0].dispatcher.exchanges()
            assert isinstance(exchange, Exchange)
            begun_s = exchange.context.first_token_s
            goes_on.set()
            await response.read()
            assert (begun_s is not None, exchange.context.first_token_s == begun_s) == (is_start, is_start)
