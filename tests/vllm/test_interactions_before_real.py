"""Agents that send no header of ours: the calls behind one answer are found before a real engine, and are seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gateway.live import Answer, Live, Starter

QUESTION: dict[str, Any] = {"role": "user", "content": "which file has the time of the day"}
TOKENS = 6
"""A model of random weights never stops by itself: each answer is cut, which is final for all but raw completions. So
an interaction rests after it, and the next call goes on with it."""


@pytest.fixture
def start(tmp_path: Path) -> Starter:
    return Starter(tmp_path)


async def chat(live: Live, messages: list[Any]) -> tuple[Answer, list[Any]]:
    """One call, and the messages of the next: what was answered asks for a tool, and the tool has answered."""
    body = {"model": "tiny", "messages": messages, "max_tokens": TOKENS, "ignore_eos": True}
    got = await live.ask("/v1/chat/completions", body)
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    said = {"role": "assistant", "content": got.json["choices"][0]["message"]["content"], "tool_calls": [call]}
    return got, [*messages, said, {"role": "tool", "tool_call_id": "c1", "content": "it is in the last one"}]


async def messages_api(live: Live, messages: list[Any]) -> tuple[Answer, list[Any]]:
    """The same as Anthropic's clients send it."""
    got = await live.ask("/v1/messages", {"model": "tiny", "messages": messages, "max_tokens": TOKENS})
    use = {"type": "tool_use", "id": "c1", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "it is in the last one"}
    return got, [*messages, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]


async def responses(live: Live, items: list[Any]) -> tuple[Answer, list[Any]]:
    """The same with the Responses API, whose client sends all items with each call."""
    got = await live.ask("/v1/responses", {"model": "tiny", "input": items, "max_output_tokens": 16})
    call = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "it is in the last one"}
    return got, [*items, call, result]


@pytest.mark.parametrize("speak", [chat, messages_api, responses])
async def test_tool_turns_go_on_with_the_open_interaction(real_vllm: str, start: Starter, speak: Any) -> None:
    async with start(real_vllm) as live:
        turns: list[Any] = [QUESTION]
        inside = []
        for _ in range(3):
            got, turns = await speak(live, turns)
            assert got.status == 200, got.body
            explained = (await live.get(f"/explain/{got.headers['x-request-id']}", admin=True)).json
            inside.append(explained["inside_an_interaction"])
        other, _ = await speak(live, [{**QUESTION, "content": "and what can you say of the other one"}])
        assert other.status == 200
        *own, another = await live.lines(4)
        assert inside == [False, True, True]
        assert [line["stage"] for line in own] == [1, 2, 3]
        assert len({line["interaction"] for line in own} - {""}) == 1
        assert another["interaction"] not in ("", own[0]["interaction"]), "another question begins another one"
        assert (await live.metrics())["fairgate_open_interactions",] == 0


async def test_a_prompt_that_extends_an_earlier_one_goes_on_with_its_interaction(
    real_vllm: str, start: Starter
) -> None:
    async with start(real_vllm) as live:
        prompt, inside = "the time of the day is " * 20, []
        for _ in range(3):
            body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True}
            got = await live.ask("/v1/completions", body)
            assert got.status == 200, got.body
            explained = (await live.get(f"/explain/{got.headers['x-request-id']}", admin=True)).json
            inside.append((explained["inside_an_interaction"], explained["stage"]))
            prompt += got.json["choices"][0]["text"] + " which way"
        assert inside == [(False, 1), (True, 2), (True, 3)]
        assert (await live.metrics())["fairgate_open_interactions",] == 1


async def test_what_is_said_to_follow_an_answer_goes_on_with_its_interaction(real_vllm: str, start: Starter) -> None:
    async with start(real_vllm) as live:
        body: dict[str, Any] = {"model": "tiny", "input": [QUESTION], "max_output_tokens": 16, "store": True}
        inside = []
        for _ in range(3):
            got = await live.ask("/v1/responses", body)
            assert got.status == 200, got.body
            explained = (await live.get(f"/explain/{got.headers['x-request-id']}", admin=True)).json
            inside.append((explained["inside_an_interaction"], explained["stage"]))
            result = {"type": "function_call_output", "call_id": "c1", "output": "it is in the last one"}
            body |= {"previous_response_id": got.json["id"], "input": [result]}
        assert inside == [(False, 1), (True, 2), (True, 3)]
        assert (await live.metrics())["fairgate_open_interactions",] == 0
