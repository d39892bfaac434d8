"""The whole gateway before a real vLLM: the official client, vLLM's own benchmark, and what the engine's gauges say."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from tests.gateway.live import Live, Starter
from tests.waiting import WAIT_S

HELLO: list[Any] = [{"role": "user", "content": "the time of the day is good for you"}]
VLLM = Path(os.environ.get("FAIRGATE_VLLM_VENV", Path.home() / ".cache" / "fairgate" / "vllm")) / "bin" / "vllm"


def client(live: Live) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="k", max_retries=0)


async def gauge(url: str, name: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics/?name[]=vllm:{name}") as response:
        lines = [line for line in (await response.text()).splitlines() if line.startswith(f"vllm:{name}")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def test_the_openai_client_works_and_usage_is_the_engine_s(real_vllm: str, start: Starter) -> None:
    async with start(real_vllm) as live, client(live) as api:
        assert [model.id async for model in api.models.list()] == ["tiny"]
        whole = await api.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=12, extra_body={"ignore_eos": True}
        )
        assert whole.usage is not None
        stream = await api.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=12, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = [chunk async for chunk in stream]
        assert all(chunk.usage is None for chunk in chunks), "the client did not ask for usage"
        assert chunks[-1].choices[0].finish_reason == "length"
        response = await api.responses.create(model="tiny", input="what is it", max_output_tokens=16)
        assert response.usage is not None
        text = await api.completions.create(model="tiny", prompt="what is it", max_tokens=5)
        assert text.usage is not None
        lines = (await live.lines(5))[1:]
    prompt_tokens = whole.usage.prompt_tokens
    expected = [
        (prompt_tokens, 12),
        (prompt_tokens, 12),
        (response.usage.input_tokens, response.usage.output_tokens),
        (text.usage.prompt_tokens, text.usage.completion_tokens),
    ]
    assert [(line["tokens_in"], line["tokens_out"]) for line in lines] == expected
    assert {line["outcome"] for line in lines} == {"completed"}


async def test_anthropic_messages_pass(real_vllm: str, start: Starter) -> None:
    body = {"model": "tiny", "max_tokens": 8, "messages": HELLO}
    async with start(real_vllm) as live:
        whole = await live.ask("/v1/messages", body)
        assert whole.json["type"] == "message"
        stream = await live.ask("/v1/messages", {**body, "stream": True})
        assert b"event: message_stop" in stream.body


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_frees_the_engine(real_vllm: str, start: Starter, stream: bool) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 3000, "ignore_eos": True, "stream": stream}
    async with start(real_vllm) as live:
        asking = asyncio.create_task(live.ask("/v1/chat/completions", body))
        async with asyncio.timeout(WAIT_S):
            while await gauge(real_vllm, "num_requests_running") < 1:  # noqa: ASYNC110 (another process's state)
                await asyncio.sleep(0.01)
            asking.cancel()
            while await gauge(real_vllm, "num_requests_running") > 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert live.holds_nothing()
        (line,) = await live.lines(1)
        assert line["outcome"] == "abandoned"
        assert line["tokens_in"] > 0


async def test_the_engine_judges_a_prompt_that_is_a_little_too_long(real_vllm: str, start: Starter) -> None:
    async with start(real_vllm) as live, client(live) as api:
        with pytest.raises(openai.BadRequestError, match="context length"):
            await api.completions.create(model="tiny", prompt="of the " * 2500, max_tokens=5)
        assert live.holds_nothing()
        (line,) = await live.lines(1)
        assert (line["outcome"], line["tokens_in"], line["tokens_out"]) == ("refused", 0, 0)


async def test_a_burst_does_not_fill_the_engine_s_queue(real_vllm: str, start: Starter) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 40, "ignore_eos": True, "stream": True}
    async with start(real_vllm) as live:
        asking = asyncio.gather(*(live.ask("/v1/chat/completions", body, key=f"k{n % 3}") for n in range(200)))
        waiting = []
        while not asking.done():
            waiting.append(await gauge(real_vllm, "num_requests_waiting"))
        answers = await asking
        assert {answer.status for answer in answers} == {200}
        assert max(waiting) <= 4, "the target is 2"
        assert live.holds_nothing()


async def test_vllm_bench_serve_runs_through_the_gateway(real_vllm: str, start: Starter, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    async with start(real_vllm) as live:
        command = [VLLM, "bench", "serve", "--backend", "openai-chat", "--base-url", live.url]
        command += ["--endpoint", "/v1/chat/completions", "--model", "tiny", "--dataset-name", "random"]
        command += ["--tokenizer", VLLM.parent.parent / "tiny", "--random-input-len", "40", "--random-output-len", "20"]
        command += ["--num-prompts", "60", "--max-concurrency", "40", "--ignore-eos"]
        command += ["--save-result", "--result-filename", result, "--header", "Authorization=Bearer k"]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=environment
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()[-2000:]
        measured = json.loads(result.read_text())
        assert (measured["completed"], measured.get("failed", 0)) == (60, 0)
        assert live.holds_nothing()
