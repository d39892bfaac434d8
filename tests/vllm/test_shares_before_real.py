"""Tenants of the weights 4 and 1 get tokens 4 to 1: before a vLLM, and before a vLLM and a llama.cpp in one pool."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from docs.examples.tiny_gguf import make_model
from tests.gateway.live import MODEL, Live, Starter, until
from tests.gateway.load import tenants
from tests.kit.floods import Flood, answered, ratio_of
from tests.llama_server import LlamaServer

SLOTS, CONTEXT = 6, 2048
CLIENTS = {"one": 60, "four": 180}
"""More than all engines run, also while a whole batch ends at once: both tenants always have a request waiting."""
OUTPUT_TOKENS, ANSWERS = 120, 1500


async def ratio(live: Live) -> float:
    """Return how often the service of the tenant `one` the tenant `four` gets, while both always want more."""
    backends = live.gateway.pools[0].backends.values()
    await until(lambda: all(each.in_service and each.models for each in backends))
    one, four = (Flood.at(live, name, clients, output_tokens=OUTPUT_TOKENS) for name, clients in CLIENTS.items())
    # At first `four` also gets back what `one` had while its clients were the only ones.
    await answered(four, one, more=600)
    found = await ratio_of(four, one, more=ANSWERS)
    await asyncio.gather(one.end(), four.end())
    await until(live.holds_nothing)
    return found


async def test_on_a_vllm(real_vllm: str, start: Starter) -> None:
    async with start(real_vllm, tenants=tenants(one=1, four=4), aliases={MODEL: "tiny"}) as live:
        assert 3.8 <= await ratio(live) <= 4.2


async def test_on_a_vllm_and_a_llama_cpp_in_one_pool(real_vllm: str, start: Starter, tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    make_model(model)
    async with LlamaServer(model, slots=SLOTS, context=SLOTS * CONTEXT) as llama:
        urls = [real_vllm, llama.url]
        async with start(*urls, tenants=tenants(one=1, four=4), aliases={MODEL: "tiny"}) as live:
            assert 3.8 <= await ratio(live) <= 4.2
            kinds = [backend.adapter.name for backend in live.gateway.pools[0].backends.values()]
            assert kinds == ["vllm", "llama.cpp"]
            served = Counter(line["backend"] for line in await live.lines(ANSWERS))
            assert all(served[url.removeprefix("http://")] >= ANSWERS / 20 for url in urls), served
