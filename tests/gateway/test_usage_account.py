"""Nothing that an engine says, or leaves out, makes an answer cost nothing, or more than it can have been."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.capture import (
    DONE,
    STREAM_END,
    STREAM_HEAD,
    Upstream,
    answer,
    chunk,
    messages_stream,
    named,
    replies,
    token,
)
from tests.gateway.live import MODEL, Starter, chat

CHAT = "/v1/chat/completions"
CONTEXT = 4096
UNBELIEVABLE: dict[str, Any] = {
    "missing": {},
    "null": {"prompt_tokens": None, "completion_tokens": None},
    "text": {"prompt_tokens": "11", "completion_tokens": "3"},
    "float": {"prompt_tokens": 11.5, "completion_tokens": 3.5},
    "negative": {"prompt_tokens": -11, "completion_tokens": -3},
    "boolean": {"prompt_tokens": True, "completion_tokens": True},
    "a list": {"prompt_tokens": [1], "completion_tokens": [1]},
    "no object": None,
    "a number": 5,
    "text instead of an object": "many",
    "details of a wrong kind": {"prompt_tokens_details": 5, "completion_tokens_details": []},
    "deep": {"prompt_tokens": json.loads("[" * 500 + "]" * 500)},
}


def whole(text: str, usage: Any, **more: Any) -> bytes:
    """A chat answer; with `more` behind its usage, as vLLM puts prompt_logprobs there."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return json.dumps({"id": "c", "choices": [choice], "usage": usage, **more}, separators=(",", ":")).encode()


async def charged(start: Starter, path: str, body: Any, sent: bytes, **limits: int) -> tuple[int, int, int]:
    """Prompt, output and cached tokens as one answer was logged."""
    async with Upstream(replies(sent)) as upstream, start(upstream.url, limits=limits) as live:
        got = await live.ask(path, body)
        assert got.status == 200
        [line] = await live.lines(1)
        assert line["outcome"] == "completed"
        assert live.holds_nothing()
        return line["tokens_in"], line["tokens_out"], line["tokens_cached"]


@pytest.mark.parametrize("usage", UNBELIEVABLE.values(), ids=UNBELIEVABLE)
async def test_a_whole_answer_whose_usage_is_no_usage_is_charged_by_its_text(start: Starter, usage: Any) -> None:
    prompt, output, _ = await charged(start, CHAT, chat("word " * 40), answer(whole("word " * 400, usage)))
    assert 40 <= prompt <= 80
    assert 400 <= output <= 600


@pytest.mark.parametrize("usage", UNBELIEVABLE.values(), ids=UNBELIEVABLE)
async def test_a_stream_whose_usage_is_no_usage_is_charged_by_what_was_counted(start: Starter, usage: Any) -> None:
    last = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    sent = STREAM_HEAD + chunk(token("a") * 30 + last + DONE) + STREAM_END
    prompt, output, _ = await charged(start, CHAT, chat("word " * 40, stream=True), sent)
    assert 40 <= prompt <= 80
    assert output in (30, 31)


async def test_an_event_of_which_one_field_is_unreadable_still_tells_the_usage(start: Starter) -> None:
    last = b'data: {"choices":[],"error":[],"usage":{"prompt_tokens":11,"completion_tokens":25}}\n\n'
    sent = STREAM_HEAD + chunk(token("a") * 30 + last + DONE) + STREAM_END
    assert (await charged(start, CHAT, chat(stream=True), sent))[:2] == (11, 25)


async def test_a_whole_answer_of_which_one_field_is_unreadable_still_tells_the_usage(start: Starter) -> None:
    body = b'{"choices":[{"finish_reason":7}],"usage":{"prompt_tokens":11,"completion_tokens":25}}'
    assert (await charged(start, CHAT, chat(), answer(body)))[:2] == (11, 25)


@pytest.mark.parametrize("deep", [1000, 200_000])
async def test_a_whole_answer_that_is_nested_too_deep_to_read_is_charged(start: Starter, deep: int) -> None:
    body = b'{"choices":[],"tools":' + b"[" * deep + b"]" * deep
    body += b',"usage":{"prompt_tokens":11,"completion_tokens":25}}'
    assert (await charged(start, CHAT, chat(), answer(body)))[:2] == (11, 25)


async def test_a_stream_with_an_event_that_is_nested_too_deep_to_read_is_charged(start: Starter) -> None:
    deep = b'data: {"choices":[],"x":' + b"[" * 5000 + b"]" * 5000
    deep += b',"usage":{"prompt_tokens":11,"completion_tokens":25}}\n\n'
    sent = STREAM_HEAD + chunk(token("a") + deep + DONE) + STREAM_END
    assert (await charged(start, CHAT, chat(stream=True), sent))[:2] == (11, 25)


async def test_what_an_engine_leaves_out_is_our_own_count(start: Starter) -> None:
    """One of the two counts, and a message that never comes to its usage."""
    body = whole("word " * 400, {"completion_tokens": 7})
    prompt, output, _ = await charged(start, CHAT, chat("word " * 40), answer(body))
    assert (40 <= prompt <= 80, output) == (True, 7)
    stream = [event for event in messages_stream(*"abcde") if b"message_delta" not in event]
    sent = STREAM_HEAD + chunk(b"".join(stream)) + STREAM_END
    asked = {"model": MODEL, "max_tokens": 50, "stream": True, "messages": []}
    assert (await charged(start, "/v1/messages", asked, sent))[:2] == (11, 5)


@pytest.mark.parametrize("huge", [10**9, 10**18, 10**30, 10**300])
@pytest.mark.parametrize("stream", [False, True])
async def test_no_count_is_believed_beyond_what_was_allowed(start: Starter, stream: bool, huge: int) -> None:
    usage = {"prompt_tokens": huge, "completion_tokens": huge, "prompt_tokens_details": {"cached_tokens": huge}}
    sent = answer(whole("word", usage))
    if stream:
        last = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
        sent = STREAM_HEAD + chunk(token("a") + last + DONE) + STREAM_END
    prompt, output, cached = await charged(start, CHAT, chat(stream=stream, max_tokens=100), sent)
    assert prompt <= CONTEXT
    assert 0 < output <= 100
    assert cached <= prompt
    prompt, output, cached = await charged(start, CHAT, chat(stream=stream, n=2), sent)
    assert prompt <= 2 * CONTEXT
    assert 0 < output <= 2 * CONTEXT
    assert cached <= prompt


async def test_the_cached_part_is_part_of_the_prompt(start: Starter) -> None:
    usage = {"prompt_tokens": 11, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 400}}
    assert await charged(start, CHAT, chat(), answer(whole("x", usage))) == (11, 3, 11)


async def test_what_generates_nothing_is_charged_no_output(start: Starter) -> None:
    usage = {"prompt_tokens": 6000, "completion_tokens": 10**6}
    asked = {"model": MODEL, "input": ["Hello", "there"]}
    sent = answer(json.dumps({"data": [], "usage": usage}).encode())
    assert (await charged(start, "/v1/embeddings", asked, sent))[:2] == (6000, 0)


BEHIND: dict[str, Any] = {
    "prompt_logprobs": {"prompt_logprobs": [{"1": {"logprob": -0.5, "decoded_token": '"{\\'}}] * 3000},
    "a long text": {"metadata": {"x": '\\"}]' * 30_000}},
    "another usage": {"tools": [{"usage": {"prompt_tokens": 0, "completion_tokens": 0}}], "x": "y" * 100_000},
    "a text like one": {"x": '"usage":{"prompt_tokens":0,"completion_tokens":0}', "y": "z" * 100_000},
    "a text that ends like one": {"x": 'say "usage', "y": "z" * 100_000},
}


@pytest.mark.parametrize("more", BEHIND.values(), ids=BEHIND)
@pytest.mark.parametrize("first", [False, True], ids=["usage behind it", "usage before it"])
async def test_an_answer_longer_than_the_buffer_is_charged_wherever_its_usage_is(
    start: Starter, more: dict[str, Any], first: bool
) -> None:
    usage = {"prompt_tokens": 11, "completion_tokens": 25}
    body = whole("x", usage, **more)
    if not first:
        body = json.dumps({**more, "choices": [], "usage": usage}).encode() + b" " * 10_000
    sent = answer(body)
    got = await charged(start, CHAT, chat(), sent, response_buffer_bytes_max=4096)
    assert got[:2] == (11, 25)


async def test_an_answer_longer_than_the_buffer_without_usage_is_charged_by_its_length(start: Starter) -> None:
    sent = answer(whole("word " * 2000, None))
    prompt, output, _ = await charged(start, CHAT, chat("word " * 40), sent, response_buffer_bytes_max=4096)
    assert 40 <= prompt <= 80
    assert 2000 <= output <= CONTEXT


async def test_a_last_event_too_long_to_hold_is_charged_wherever_its_usage_is(start: Starter) -> None:
    usage = {"input_tokens": 11, "output_tokens": 25}
    output = [{"type": "message", "content": 'a "usage":{} {[ \\' * 30_000}]
    echo = {"metadata": {"usage": {"input_tokens": 0, "output_tokens": 0}}, "x": "y" * 300_000}
    done = {"status": "completed", "output": output, "usage": usage, **echo}
    sent = STREAM_HEAD + chunk(named("response.completed", response=done)) + STREAM_END
    got = await charged(start, "/v1/responses", {"model": MODEL, "input": "x", "stream": True}, sent)
    assert got[:2] == (11, 25)
