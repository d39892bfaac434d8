"""Nothing that an engine says, or leaves out, makes an answer cost nothing, or more than it can have been."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

from tests.gateway.capture import DONE, answer, messages_stream, named, token
from tests.gateway.live import CHAT, Starter
from tests.gateway.playbook import Sent, Stage, stage, stream

CONTEXT = 4096
WORDS = [{"role": "user", "content": "word " * 40}]
RELAYED = {"response_buffer_bytes_max": 4096}
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


def whole(text: str, usage: Any, **more: Any) -> Sent:
    """A chat answer; with `more` behind its usage, as vLLM puts prompt_logprobs there."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    value = {"id": "c", "choices": [choice], "usage": usage, **more}
    return Sent(answer(json.dumps(value, separators=(",", ":")).encode()))


def streamed(tokens: int, usage: Any) -> Sent:
    last = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    return stream(token("a") * tokens + last + DONE)


async def charged(on: Stage, sent: Sent, path: str = CHAT, **fields: Any) -> tuple[int, int, int]:
    """Prompt, output and cached tokens as one answer was logged."""
    played = await on.play(path, sent, **fields)
    assert played.end == (200, "completed", ""), sent.raw[:200]
    return *played.tokens, played.line["tokens_cached"]


async def test_an_answer_whose_usage_is_no_usage_or_lacks_a_count_is_charged_by_what_it_has(start: Starter) -> None:
    async with stage(start) as on:
        for name, usage in UNBELIEVABLE.items():
            prompt, output, _ = await charged(on, whole("word " * 400, usage), messages=WORDS)
            assert (40 <= prompt <= 80, 400 <= output <= 600) == (True, True), name
            prompt, output, _ = await charged(on, streamed(30, usage), messages=WORDS, stream=True)
            assert (40 <= prompt <= 80, output in (30, 31)) == (True, True), name
        prompt, output, _ = await charged(on, whole("word " * 400, {"completion_tokens": 7}), messages=WORDS)
        assert (40 <= prompt <= 80, output) == (True, 7)
        without_end = stream(b"".join(event for event in messages_stream(*"abcde") if b"message_delta" not in event))
        assert (await charged(on, without_end, "/v1/messages", stream=True))[:2] == (11, 5)


USAGE = b'"usage":{"prompt_tokens":11,"completion_tokens":25}'
DEEP = [b'"x":' + b"[" * deep + b"]" * deep for deep in (1000, 5000, 200_000)]
READABLE: list[tuple[Sent, bool]] = [
    (stream(token("a") * 30 + b'data: {"choices":[],"error":[],%b}\n\n' % USAGE + DONE), True),
    (stream(token("a") + b'data: {"choices":[],%b,%b}\n\n' % (DEEP[1], USAGE) + DONE), True),
    (Sent(answer(b'{"choices":[{"finish_reason":7}],%b}' % USAGE)), False),
    (Sent(answer(b'{"choices":[],%b,%b}' % (DEEP[0], USAGE))), False),
    (Sent(answer(b'{"choices":[],%b,%b}' % (DEEP[2], USAGE))), False),
]


async def test_usage_is_read_beside_what_cannot_be_read_or_is_nested_too_deep(start: Starter) -> None:
    async with stage(start) as on:
        for sent, is_stream in READABLE:
            assert (await charged(on, sent, stream=is_stream))[:2] == (11, 25), sent.raw[:200]


async def test_no_count_is_believed_beyond_what_was_allowed(start: Starter) -> None:
    async with stage(start) as on:
        for huge, is_stream in product((10**9, 10**18, 10**30, 10**300), (False, True)):
            usage = {"prompt_tokens": huge, "completion_tokens": huge, "prompt_tokens_details": {"cached_tokens": huge}}
            sent = streamed(1, usage) if is_stream else whole("word", usage)
            for fields, sequences, most in (({"max_tokens": 100}, 1, 100), ({"n": 2}, 2, 2 * CONTEXT)):
                prompt, output, cached = await charged(on, sent, stream=is_stream, **fields)
                assert cached <= prompt <= sequences * CONTEXT, huge
                assert 0 < output <= most, huge


async def test_each_part_is_what_it_can_be(start: Starter) -> None:
    usage = {"prompt_tokens": 11, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 400}}
    async with stage(start) as on:
        assert await charged(on, whole("x", usage)) == (11, 3, 11), "the cached part is part of the prompt"
        usage = {"prompt_tokens": 6000, "completion_tokens": 10**6}
        sent = Sent(answer(json.dumps({"data": [], "usage": usage}).encode()))
        found = await charged(on, sent, "/v1/embeddings", input=["Hello", "there"])
        assert found[:2] == (6000, 0), "what generates nothing is charged no output"


BEHIND: dict[str, Any] = {
    "prompt_logprobs": {"prompt_logprobs": [{"1": {"logprob": -0.5, "decoded_token": '"{\\'}}] * 3000},
    "a long text": {"metadata": {"x": '\\"}]' * 30_000}},
    "another usage": {"tools": [{"usage": {"prompt_tokens": 0, "completion_tokens": 0}}], "x": "y" * 100_000},
    "a text like one": {"x": '"usage":{"prompt_tokens":0,"completion_tokens":0}', "y": "z" * 100_000},
    "a text that ends like one": {"x": 'say "usage', "y": "z" * 100_000},
}


async def test_an_answer_longer_than_the_buffer_is_charged_wherever_its_usage_is(start: Starter) -> None:
    usage = {"prompt_tokens": 11, "completion_tokens": 25}
    async with stage(start, **RELAYED) as on:
        for name, more in BEHIND.items():
            before = Sent(answer(json.dumps({**more, "choices": [], "usage": usage}).encode() + b" " * 10_000))
            for sent in (whole("x", usage, **more), before):
                assert (await charged(on, sent))[:2] == (11, 25), name
        prompt, output, _ = await charged(on, whole("word " * 2000, None), messages=WORDS)
        assert (40 <= prompt <= 80, 2000 <= output <= CONTEXT) == (True, True), "without usage, by its length"


async def test_a_last_event_too_long_to_hold_is_charged_wherever_its_usage_is(start: Starter) -> None:
    usage = {"input_tokens": 11, "output_tokens": 25}
    output = [{"type": "message", "content": 'a "usage":{} {[ \\' * 30_000}]
    echo = {"metadata": {"usage": {"input_tokens": 0, "output_tokens": 0}}, "x": "y" * 300_000}
    done = {"status": "completed", "output": output, "usage": usage, **echo}
    async with stage(start) as on:
        sent = stream(named("response.completed", response=done))
        assert (await charged(on, sent, "/v1/responses", stream=True))[:2] == (11, 25)
