"""Nothing of a request that is over waits for the cyclic collector, which looks at what is old almost never."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.bounds import ENDS, stream, whole
from gateway.proxy.batches.stored_request import StoredRequest
from gateway.proxy.exchange import Exchange
from gateway.proxy.request_context import RequestContext
from tests.gateway.capture import Peer, Seen, Upstream, replies
from tests.gateway.live import Live, Starter, chat, until
from tests.kit.batching import CHAT, OK, TENANTS, client, counts, is_over, jsonl, line, made, when
from tests.waiting import eventually

OF_A_REQUEST = (StoredRequest, RequestContext, Exchange)
ASKED = 12


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
    return alive().total() < ASKED // 2


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
    for _ in range(ASKED):
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
        done = await when(api, (await made(api, jsonl(*map(line, range(ASKED))))).id, is_over)
        assert counts(done) == (ASKED, ASKED, 0)
        await eventually(is_little)
