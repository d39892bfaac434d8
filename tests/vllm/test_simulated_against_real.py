"""Does the engine model do what a real vLLM does with the same requests?

Compared against tokens generated, not against time: the machine's speed must not decide.
"""

from __future__ import annotations

import asyncio
import bisect
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from backends.simulated.calls import read_prompt
from backends.simulated.engine_model import EngineModel, EngineRequest
from backends.simulated.engine_profiles import profile
from tests.faulty_engine import FaultyEngine

pytestmark = pytest.mark.vllm

PROFILE = profile("tiny-cpu")
_GAUGES = ("generation_tokens_total", "kv_cache_usage_perc", "num_preemptions_total", "num_requests_running")


@dataclass(frozen=True)
class Job:
    """One request of the trace, by its lengths in tokens."""

    prompt_tokens: int
    output_tokens: int


@dataclass
class Run:
    """What one engine did with a trace. `occupancy` is (tokens generated since the start, fraction of KV held)."""

    occupancy: list[tuple[float, float]] = field(default_factory=list)
    completed: list[int] = field(default_factory=list)
    preemptions: int = 0
    duration_s: float = 0.0

    def usage_at(self, tokens: float) -> float:
        index = bisect.bisect_left(self.occupancy, (tokens, 0.0))
        return self.occupancy[min(index, len(self.occupancy) - 1)][1]


def trace(seed: int) -> list[Job]:
    """Two plugs that fill the KV, one long prompt that they keep out, and 40 requests behind it.

    While the plugs run, all others queue up in one known order; when they end, the engine has twice the work that fits.
    So neither the arrival times nor the machine's speed have a say in what follows.
    """
    draw = random.Random(seed)
    plug = Job(3648, 400)
    return [plug, plug, Job(900, 20)] + [Job(draw.randint(20, 400), draw.randint(20, 400)) for _ in range(40)]


def token_ids(job: int, seed: int, count: int) -> list[int]:
    """A prompt that shares no prefix with another."""
    draw = random.Random(seed * 1000 + job)
    return [draw.randint(3, 500) for _ in range(count)]


def run_model(jobs: list[Job]) -> Run:
    engine = EngineModel(PROFILE)
    run = Run()
    for i, job in enumerate(jobs):
        engine.submit(EngineRequest(str(i), job.prompt_tokens, job.output_tokens))
    now = 0.0
    while engine.has_work:
        step = engine.step(now)
        now += step.duration_s
        gauges = engine.gauges()
        run.occupancy.append((gauges.generation_tokens_total, gauges.kv_usage))
        run.completed += [int(name) for name in step.finished]
        run.preemptions = gauges.preemptions_total
    run.duration_s = now
    return run


async def scrape(session: aiohttp.ClientSession, base: str) -> dict[str, float]:
    query = "&".join(f"name[]=vllm:{name}" for name in _GAUGES)
    async with session.get(f"{base}/metrics/?{query}") as answer:
        lines = (await answer.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.split("{")[0].removeprefix("vllm:"): float(value) for name, value in pairs}


def streamed(prompt: list[int], job: Job) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": job.output_tokens, "ignore_eos": True, "stream": True}


async def run_real(base: str, jobs: list[Job], seed: int) -> Run:
    run = Run()
    loop = asyncio.get_running_loop()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        before = await scrape(session, base)

        async def read(i: int, answer: aiohttp.ClientResponse) -> None:
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
            run.completed.append(i)

        async def watch() -> None:
            while True:
                page = await scrape(session, base)
                tokens = page["generation_tokens_total"] - before["generation_tokens_total"]
                run.occupancy.append((tokens, page["kv_cache_usage_perc"]))
                await asyncio.sleep(0.02)

        started = loop.time()
        watcher = asyncio.create_task(watch())
        readers = []
        for i, job in enumerate(jobs):
            answer = await session.post(
                f"{base}/v1/completions", json=streamed(token_ids(i, seed, job.prompt_tokens), job)
            )
            assert answer.status == 200, await answer.text()
            readers.append(asyncio.create_task(read(i, answer)))
        assert not run.completed, "a plug ended before all requests had arrived: the comparison means nothing"
        await asyncio.gather(*readers)
        run.duration_s = loop.time() - started
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        after = await scrape(session, base)
    run.preemptions = int(after["num_preemptions_total"] - before["num_preemptions_total"])
    return run


def rank_correlation(first: list[int], second: list[int]) -> float:
    """Spearman's: 1 for the same order, 0 for unrelated ones."""
    place = {job: rank for rank, job in enumerate(second)}
    n = len(first)
    distance = sum((rank - place[job]) ** 2 for rank, job in enumerate(first))
    return 1 - 6 * distance / (n * (n * n - 1))


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_under_kv_pressure_the_model_follows_the_engine(real_vllm: str, seed: int) -> None:
    jobs = trace(seed)
    model, real = run_model(jobs), await run_real(real_vllm, jobs, seed)

    under_way = [(tokens, usage) for tokens, usage in real.occupancy if tokens]
    errors = [abs(usage - model.usage_at(tokens)) * PROFILE.usable_blocks for tokens, usage in under_way]
    equal = sum(error < 0.5 for error in errors) / len(errors)
    order = rank_correlation(model.completed, real.completed)
    print(
        f"\nseed {seed}: {len(errors)} samples, {equal:.0%} equal, worst {max(errors):.0f} blocks of "
        f"{PROFILE.usable_blocks}; order {order:.4f}; preemptions {model.preemptions} and {real.preemptions}; "
        f"seconds {model.duration_s:.2f} and {real.duration_s:.2f}"
    )

    assert len(errors) >= 20
    assert max(usage for _, usage in under_way) > 0.95, "the trace made no KV pressure"
    # Room for one pair of requests that reach the real engine in the other order, and for ties within a step.
    assert equal >= 0.9
    assert sum(errors) / len(errors) < 0.01 * PROFILE.usable_blocks
    assert order > 0.99
    assert real.preemptions >= 5
    assert abs(model.preemptions - real.preemptions) <= 2


@pytest.fixture
async def look_alike() -> AsyncIterator[str]:
    """The URL of a simulated engine, which answers as fast as it can."""
    server = FaultyEngine(PROFILE, model_names=("tiny",), time_scale=0.0)
    yield f"http://127.0.0.1:{await server.start()}"
    await server.stop()


async def completion(session: aiohttp.ClientSession, base: str, prompt: list[int]) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    async with session.post(f"{base}/v1/completions", json=body) as answer:
        usage = (await answer.json())["usage"]
        assert isinstance(usage, dict)
        return usage


async def test_prefix_hits_are_the_same_tokens(real_vllm: str, look_alike: str) -> None:
    """Whole blocks only, and never the last token: for every length around the block boundaries."""
    whole = token_ids(0, 77, 200)
    async with aiohttp.ClientSession() as session:
        for length in (200, 200, 193, 192, 191, 129, 128, 65, 64, 33, 32, 31):
            real = await completion(session, real_vllm, whole[:length])
            simulated = await completion(session, look_alike, whole[:length])
            assert simulated["prompt_tokens"] == real["prompt_tokens"] == length
            cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in (simulated, real)]
            assert cached[0] == cached[1], f"prompt of {length} tokens"


_MESSAGES = [{"role": "user", "content": "hello world"}]
_USAGE = {"max_tokens": 8, "stream_options": {"include_usage": True}}
_STREAMS = [
    ("/v1/chat/completions", {"messages": _MESSAGES, **_USAGE}),
    ("/v1/chat/completions", {"messages": _MESSAGES, "n": 2, **_USAGE}),
    ("/v1/completions", {"prompt": "hello", **_USAGE}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 40}),
    ("/v1/messages", {"messages": _MESSAGES, "max_tokens": 40}),
]


async def events(base: str, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """(event name, data) of one stream, equal neighbours in shape folded: chunks and tokens are not one to one."""
    whole = {"model": "tiny", "stream": True, "ignore_eos": True, **body}
    async with aiohttp.ClientSession() as session, session.post(base + path, json=whole) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        text = (await answer.read()).decode()
    found: list[tuple[str, Any]] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        found.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found


def missing_in(real: Any, simulated: Any, at: str = "") -> list[str]:
    """Where does the look-alike say something that the engine does not, or in another type?"""
    if isinstance(simulated, dict):
        if not isinstance(real, dict):
            return [f"{at}: {real!r} in the engine"]
        unknown = [f"{at}.{key}" for key in simulated if key not in real]
        return unknown + [
            place for key in simulated if key in real for place in missing_in(real[key], simulated[key], f"{at}.{key}")
        ]
    if isinstance(simulated, list):
        if not isinstance(real, list):
            return [f"{at}: {real!r} in the engine"]
        return [place for a, b in zip(real, simulated, strict=False) for place in missing_in(a, b, f"{at}[]")]
    if simulated is None or real is None:
        return []
    return [] if type(real) is type(simulated) else [f"{at}: {simulated!r}, in the engine {real!r}"]


def kinds(stream: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """One of each consecutive kind of event; deltas of the same kind fold into one."""

    def kind(event: tuple[str, Any]) -> tuple[str, ...]:
        name, data = event
        if data == "[DONE]":
            return ("[DONE]",)
        choices = data.get("choices")
        if choices:
            return ("role" if "role" in choices[0].get("delta", {}) else "chunk",)
        return (name, "usage" if choices == [] else "")

    folded: list[tuple[str, Any]] = []
    for event in stream:
        if not folded or kind(folded[-1]) != kind(event):
            folded.append(event)
    return folded


@pytest.mark.parametrize(("path", "body"), _STREAMS)
async def test_streams_have_the_engines_shape(real_vllm: str, look_alike: str, path: str, body: dict[str, Any]) -> None:
    simulated, real = kinds(await events(look_alike, path, body)), kinds(await events(real_vllm, path, body))
    if body.get("n") == 2:  # the two choices interleave differently
        simulated, real = simulated[:1] + simulated[-3:], real[:1] + real[-3:]
    assert [name for name, _ in simulated] == [name for name, _ in real]
    for (_, ours), (_, theirs) in zip(simulated, real, strict=True):
        assert missing_in(theirs, ours) == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", b'{"model":"nope","messages":[]}'),
        ("/v1/chat/completions", b'{"model":"tiny"}'),
        ("/v1/chat/completions", b"{bad"),
        ("/v1/chat/completions", b"[]"),
        ("/v1/chat/completions", b'{"model":"tiny","messages":[{"role":"user","content":"h"}],"max_tokens":0}'),
        ("/v1/chat/completions", b'{"model":"tiny","messages":[{"role":"user","content":"h"}],"max_tokens":99999}'),
        ("/v1/chat/completions", b'{"model":"tiny","messages":[{"role":"user","content":"h"}],"max_tokens":"x"}'),
        ("/v1/completions", b'{"model":"tiny","prompt":[' + b"7," * 4096 + b"7]}"),
        ("/v1/messages", b'{"model":"nope","max_tokens":2,"messages":[{"role":"user","content":"hello"}]}'),
    ],
)
async def test_errors_are_the_engines(real_vllm: str, look_alike: str, path: str, body: bytes) -> None:
    answers = []
    async with aiohttp.ClientSession() as session:
        for target in (look_alike, real_vllm):
            headers = {"Content-Type": "application/json"}
            async with session.post(target + path, data=body, headers=headers) as answer:
                answers.append((answer.status, await answer.json()))
    (our_status, ours), (their_status, theirs) = answers
    assert our_status == their_status
    for key in ("type", "param", "code"):
        assert ours["error"].get(key) == theirs["error"].get(key), key


def test_the_model_counts_token_ids_as_the_engine_does() -> None:
    """The comparison above rests on it: a prompt of ids has as many tokens as ids in both."""
    assert read_prompt(b"".join(i.to_bytes(4) for i in range(77)), 32).tokens == 77
