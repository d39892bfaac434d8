"""What an engine has cached is found again, costs its tenant nothing, is not seen by others, and attracts its like."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from typing import Any

import msgspec
import pytest

from backends.simulated.simulated_server import SimulatedServer
from gateway.config.sections.keys import hash_key
from gateway.request import apis
from gateway.request.body.form import read_form
from gateway.request.body.payload import read_json
from gateway.request.prompt import BLOCK_BYTES, BLOCKS_MAX, prefix_hashes
from gateway.storage.redis.redis_connection import PUBLISHED_BYTES_MAX
from gateway.storage.redis.redis_store import pool_key
from policies.replicas.messages import PrefixReport
from policies.replicas.prefixes import VERSION
from tests.gateway.capture import Upstream, answer, replies
from tests.gateway.live import CHAT, MODEL, SMALL, WAIT_S, Live, Starter, chat, long_chat, simulated, until
from tests.kit.forms import FORM, UPLOAD
from tests.kit.pairs import pair
from tests.kit.turns import ask, index_of, text
from tests.ports import free_port
from tests.redis_server import RedisServer
from tests.waiting import eventually

DOCUMENT = "".join(f"Sentence {number} of a long document. " for number in range(200))
POLICIES = ["dlpm", "d2lpm"]

TENANTS = [
    {"name": name, "keys": [{"hash": hash_key(f"key-of-{name}"), "apps": ["default"]}]} for name in ("one", "other")
]


async def cached_tokens(
    live: Live, question: str, *, tenant: str = "one", document: str = DOCUMENT, **fields: Any
) -> int | None:
    """Ask about a document; how many prompt tokens its tenant was not charged for, as the engine reported."""
    body = chat(f"{document} {question}", max_tokens=4, **fields)
    answer = await live.ask(CHAT, body, key=f"key-of-{tenant}")
    assert answer.status == 200
    service = live.charged[answer.headers["x-request-id"]]
    assert 0 < service.output <= 4
    assert service.prompt > len(document) / 4
    return service.cached


@pytest.mark.interpreted_only("watches what the policy is charged")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_had_cached_is_not_charged(start: Starter, policy: str, stream: bool) -> None:
    async with simulated() as sim, start(sim.url, tenants=TENANTS, policy=policy) as live:
        charged: list[float] = []
        noted = live.engine.policy.charge

        def charge(request: Any, service: Any, now: float, *, final: bool) -> None:
            noted(request, service, now, final=final)
            if final:
                assert len(request.prefix) == -(
                    -len(f'[{{"role": "user", "content": "{DOCUMENT} 1?"}}]') // BLOCK_BYTES
                )
                charged.append(request.progress.charged)

        live.engine.policy.charge = charge  # type: ignore[method-assign]
        assert await cached_tokens(live, "1?", stream=stream) == 0
        again = await cached_tokens(live, "2?", stream=stream)
        assert again is not None
        assert again > len(DOCUMENT) / 4 - 32
        assert charged[1] < charged[0] / 10


@pytest.mark.parametrize("policy", ["dlpm", "fcfs"])
async def test_tenants_do_not_see_what_others_asked_unless_they_share(start: Starter, policy: str) -> None:
    async with simulated() as sim:
        async with start(sim.url, tenants=TENANTS, policy=policy) as live:
            assert await cached_tokens(live, "1?") == 0
            assert await cached_tokens(live, "2?", tenant="other") == 0
            salted = await cached_tokens(live, "3?", tenant="other", cache_salt="mine")
            assert (salted or 0) > 0, "a salt of the client is not believed"
        shared = [{"name": "pool", "backends": [{"url": sim.url}], "isolate_caches": "never"}]
        async with start(sim.url, tenants=TENANTS, policy=policy, pools=shared) as live:
            assert await cached_tokens(live, "1?") == 0
            assert (await cached_tokens(live, "2?", tenant="other") or 0) > 0


@pytest.mark.parametrize(
    ("engines", "shared", "apart"), [("openai", False, False), ("openai vllm", False, True), ("vllm", True, False)]
)
async def test_the_index_knows_whose_prompt_it_is_where_an_engine_does(
    start: Starter, engines: str, shared: bool, apart: bool
) -> None:
    backends = [{"url": f"http://127.0.0.1:{free_port()}", "engine": kind} for kind in engines.split()]
    async with start(
        pools=[{"name": "p", "backends": backends, "isolate_caches": "never" if shared else "where_possible"}],
        policy="dlpm",
    ) as live:
        pool = live.gateway.pools[0]
        payload = read_json(json.dumps(chat(DOCUMENT)).encode(), apis.CHAT)
        one, other = pool.hash_prefix(payload, "one"), pool.hash_prefix(payload, "other")
        assert one
        assert set(one).isdisjoint(other) if apart else one == other
        assert pool.hash_prefix(read_form(UPLOAD, FORM.encode(), apis.AUDIO), "one") == ()  # not all clips are alike


async def test_an_interrupted_answer_is_charged_by_the_estimate(start: Starter) -> None:
    async with simulated() as sim, start(sim.url, tenants=TENANTS, policy="dlpm") as live:
        assert await cached_tokens(live, "1?") == 0
        prefixes = live.engine.policy.prefixes
        assert prefixes is not None
        known = len(prefixes)
        body = chat(f"{DOCUMENT} 2?", stream=True, max_tokens=1000, ignore_eos=True)
        async with live.post(CHAT, body, key="key-of-one") as response:
            request_id = response.headers["x-request-id"]
            await response.content.readany()
        await until(live.holds_nothing)
        assert live.charged[request_id].cached is None
        assert len(prefixes) >= known, "it says nothing of what the engine has cached"


def test_a_block_s_hash_stands_for_all_before_it_and_blocks_of_long_prompts_are_coarser() -> None:
    prompt = bytes(range(256)) * 40
    whole = prefix_hashes(prompt, b"m")
    assert len(whole) == len(set(whole)) == len(prompt) // BLOCK_BYTES
    assert prefix_hashes(prompt + b"more", b"m")[: len(whole)] == whole
    assert not set(prefix_hashes(prompt, b"n")) & set(whole)
    assert not set(prefix_hashes(b"x" + prompt[1:], b"m")) & set(whole)
    assert prefix_hashes(b"short", b"m") != prefix_hashes(b"shorter", b"m")
    assert prefix_hashes(b"", b"m") == ()
    prompt = b"".join(b"%07d " % number for number in range(50_000))
    longest = prefix_hashes(prompt[: BLOCK_BYTES * BLOCKS_MAX], b"m")
    longer = prefix_hashes(prompt, b"m")
    assert len(longest) == BLOCKS_MAX >= len(longer) - 1 > BLOCKS_MAX // 2
    assert longer[0] == longest[0], "engines that hold a prompt are looked up by its first block"
    assert set(longer[: BLOCKS_MAX // 16]) <= set(longest)


# --- where a request went and why ---


async def asked_about(live: Live, question: str) -> dict[str, Any]:
    """Ask about the document; the line of the log."""
    before = live.log.read_bytes().count(b"\n") if live.log.exists() else 0
    got = await live.ask(CHAT, chat(f"{DOCUMENT} {question}", max_tokens=4))
    assert got.status == 200
    line = (await live.lines(before + 1))[-1]
    assert line["request_id"] == got.headers["x-request-id"]
    return line


async def prompt_tokens(live: Live) -> dict[str, float]:
    """Return what is counted of prompts by kind, of all engines together."""
    counts: dict[str, float] = Counter()
    for labels, value in (await live.metrics()).items():
        if labels[0] == "fairgate_backend_prompt_tokens_total":
            counts[labels[2]] += value
    return dict(counts)


async def test_the_log_explain_and_metrics_say_where_a_request_went_why_and_what_was_found(start: Starter) -> None:
    async with simulated(time_scale=0) as one, simulated(time_scale=0) as two, start(one.url, two.url) as live:
        lines = [await asked_about(live, f"{number}?") for number in range(3)]
        first, second, _ = lines
        assert (first["placed"], first["tokens_cached"], first["tokens_cached_expected"]) == ("rendezvous", 0, 0)
        assert (second["placed"], second["backend"]) == ("cached", first["backend"])
        assert second["tokens_cached"] > 0.9 * second["tokens_in"]
        assert abs(second["tokens_cached_expected"] - second["tokens_cached"]) < 0.2 * second["tokens_in"]
        why = (await live.get(f"/explain/{second['request_id']}", admin=True)).json
        assert why["decision"] == {
            "dispatched_to": second["backend"],
            "placed": "cached",
            "tokens_cached_expected": second["tokens_cached_expected"],
        }
        assert why["reason"].endswith("no engine has more of its prompt cached, and it is done soonest there")
        counted = await prompt_tokens(live)
        assert ("fairgate_backend_prompt_tokens_total", first["backend"], "input", "pool") in await live.metrics()
        assert counted == {
            "input": sum(line["tokens_in"] for line in lines),
            "cached": sum(line["tokens_cached"] for line in lines),
            "expected": sum(line["tokens_cached_expected"] for line in lines),
            "wrong": sum(abs(line["tokens_cached_expected"] - line["tokens_cached"]) for line in lines),
        }
        assert counted["wrong"] > 0, "blocks do not end where the engine's end"
        refused = await live.ask(CHAT, chat(n=0))
        assert refused.status == 400
        line = (await live.lines(4))[-1]
        assert (line["backend"], line["placed"], line["tokens_cached_expected"]) == ("", "", 0)


async def test_an_answer_that_does_not_say_what_was_cached_counts_as_wrong(start: Starter) -> None:
    usage = b'{"usage":{"prompt_tokens":1700,"completion_tokens":2}}'
    async with (
        Upstream(replies(answer(usage))) as one,
        Upstream(replies(answer(usage))) as two,
        start(one.url, two.url) as live,
    ):
        expected = sum([(await asked_about(live, f"{number}?"))["tokens_cached_expected"] for number in range(2)])
        assert expected > 0
        counted = await prompt_tokens(live)
        assert (counted["cached"], counted["wrong"]) == (0, expected)


async def test_requests_go_where_their_adapter_runs(start: Starter) -> None:
    served: dict[str, Any] = {"models": (MODEL, "lora"), "adapters": ("lora",)}
    async with simulated(**served) as one, simulated(**served) as two, start(one.url, two.url) as live:
        async with live.post(CHAT, {**long_chat(), "model": "lora"}) as running:
            await running.content.readany()
            for number in range(12):
                body = {**chat(f"{number}? {DOCUMENT}", max_tokens=2), "model": "lora"}
                assert (await live.ask(CHAT, body)).status == 200
            lines = await live.lines(12)
            [home] = [name for name, ledger in live.engine.backends.items() if ledger.adapters]
            assert {line["backend"] for line in lines} == {home}
        await until(live.holds_nothing)
        assert not any(ledger.adapters for ledger in live.engine.backends.values())


async def test_an_engine_that_has_restarted_has_nothing_cached(start: Starter) -> None:
    async with simulated(time_scale=0) as one, simulated(time_scale=0) as two, start(one.url, two.url) as live:
        prefixes = live.engine.policy.prefixes
        assert prefixes is not None
        first = await asked_about(live, "1?")
        assert (await asked_about(live, "2?"))["tokens_cached_expected"] > 0
        [home] = [sim for sim in (one, two) if sim.url.endswith(first["backend"])]
        scrapes = home.server.scrapes
        await until(lambda: home.server.scrapes > scrapes + 1)  # a scrape begins when what the last one said is known
        await home.server.stop()
        again = SimulatedServer(SMALL, model_names=home.server.model_names, time_scale=0)
        await again.start("127.0.0.1", home.port)
        try:
            await until(lambda: not len(prefixes))
            after = await asked_about(live, "3?")
            assert (after["placed"], after["tokens_cached_expected"], after["tokens_cached"]) == ("rendezvous", 0, 0)
        finally:
            await again.stop()


# --- two gateways with one Redis ---


CHANNEL = pool_key("pool", "news:0")


async def listening(redis: RedisServer, gateways: int) -> None:
    """Until so many gateways would hear of a prompt."""
    async with asyncio.timeout(WAIT_S), redis.client() as client:
        while (await client.execute_command("PUBSUB", "NUMSUB", CHANNEL))[1] != gateways:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_what_others_publish_is_ignored_and_said_once(start: Starter, caplog: pytest.LogCaptureFixture) -> None:
    def said() -> int:
        return sum("gateway's report of prompts" in record.message for record in caplog.records)

    async with pair(start, 2) as (redis, _, first, second):
        await listening(redis, 2)
        of_tomorrow = PrefixReport(VERSION + 1, "other", {"backend": [(1, 2)]}, {})
        for content in (b"", b"garbage", msgspec.msgpack.encode(of_tomorrow), msgspec.msgpack.encode([1, "other"])):
            await redis.command("PUBLISH", CHANNEL, content)
        await until(lambda: said() == 2)
        await redis.command("PUBLISH", CHANNEL, b"x" * (PUBLISHED_BYTES_MAX + 100_000))
        await listening(redis, 0)  # too much at once: both have given up their connections
        await listening(redis, 2)
        await ask(first, text(1, 100))
        await until(lambda: len(index_of(second)) > 0)
        assert said() == 2, "each gateway once"


async def test_without_redis_each_goes_on_and_they_hear_each_other_again(start: Starter) -> None:
    async with pair(start, 2) as (redis, _, first, second):
        await listening(redis, 2)
        await ask(first, text(0, 100))
        await until(lambda: len(index_of(second)) > 0)
        heard = len(index_of(second))
        await redis.kill()
        await ask(first, text(1, 100))
        assert len(index_of(second)) == heard
        assert await redis.start()
        await listening(redis, 2)
        numbers = itertools.count(2)

        async def is_heard() -> bool:  # what is said while it is not known yet that Redis is back is lost
            await ask(first, text(next(numbers), 100))
            return len(index_of(second)) > heard

        await eventually(is_heard)


async def test_without_rights_to_the_channel_the_rest_is_shared(
    start: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    async with RedisServer() as redis, simulated() as a, simulated() as b:
        rights = "~fairgate:* resetchannels +info +eval +evalsha +@read +@write +time"
        await redis.command("ACL", "SETUSER", "gate", "on", ">pw", *rights.split())
        async with start(a.url, b.url, state=f"redis://gate:pw@127.0.0.1:{redis.port}/0") as live:
            await ask(live, text(1, 100))
            await until(lambda: any("&fairgate:*" in record.message for record in caplog.records))
            await ask(live, text(2, 100))
            assert live.gateway.store_state() == "shared"
        assert sum("&fairgate:*" in record.message for record in caplog.records) == 1
