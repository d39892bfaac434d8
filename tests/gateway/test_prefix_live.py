"""What an engine has cached is found again, costs its tenant nothing, and is not seen by others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.config.sections.keys import hash_key
from gateway.request.apis import AUDIO, CHAT
from gateway.request.body.form import read_form
from gateway.request.body.payload import read_json
from gateway.request.prefix_hashes import BLOCK_BYTES, BLOCKS_MAX, prefix_hashes
from tests.gateway.live import Live, Starter, chat, simulated, until
from tests.kit.forms import FORM, UPLOAD
from tests.ports import free_port

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
    answer = await live.ask("/v1/chat/completions", body, key=f"key-of-{tenant}")
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
        payload = read_json(json.dumps(chat(DOCUMENT)).encode(), CHAT)
        one, other = pool.prefix_of(payload, "one"), pool.prefix_of(payload, "other")
        assert one
        assert set(one).isdisjoint(other) if apart else one == other
        assert pool.prefix_of(read_form(UPLOAD, FORM.encode(), AUDIO), "one") == ()  # not all clips are alike


async def test_an_interrupted_answer_is_charged_by_the_estimate(start: Starter) -> None:
    async with simulated() as sim, start(sim.url, tenants=TENANTS, policy="dlpm") as live:
        assert await cached_tokens(live, "1?") == 0
        prefixes = live.engine.policy.prefixes
        assert prefixes is not None
        known = len(prefixes)
        body = chat(f"{DOCUMENT} 2?", stream=True, max_tokens=1000, ignore_eos=True)
        async with live.post("/v1/chat/completions", body, key="key-of-one") as response:
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
