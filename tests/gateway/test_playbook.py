"""The engine does this, the client sees that, and the tenant pays so much: answers of any kind, whole, cut or silent.

An answer that is cut is a failure that the client sees, however the engine framed it: an error while nothing went out,
a broken connection or an event of error afterwards. It is charged for what came.
"""

from __future__ import annotations

import json
from itertools import product

import pytest

from gateway.proxy.relay import JsonEndCheck
from tests.backends.corpus import ILL_FRAMED, TRUNCATED
from tests.gateway.capture import (
    BEGUN,
    DONE,
    STREAM_END,
    STREAM_HEAD,
    answer,
    chunk,
    messages_stream,
    named,
    responses_stream,
    streamed,
    token,
    usage_event,
)
from tests.gateway.live import Starter, events
from tests.gateway.playbook import BESIDE, FRAMINGS, QUEUED, STREAMED, STREAMS, Sent, in_pieces, stage, stream, whole

FAILED = ("failed", "backend_failed")
COMPLETED = ("completed", "")
RELAYED = {"response_buffer_bytes_max": 1024}
"""So that an answer in one piece goes out as it comes."""

SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n\x81\x02hi"

# --- answers in one piece ---

WHOLE = json.dumps({"choices": [{"message": {"content": "x" * 3000}}], "usage": {"prompt_tokens": 7}}).encode()
CUTS = {
    "nothing": b"",
    "amid a text": WHOLE[:1000],
    "amid a member": WHOLE[:-3],
    "after an inner object": WHOLE[: WHOLE.index(b"}") + 1],
    "without its last byte": WHOLE[:-1],
    "two at once": WHOLE + WHOLE,
}
FINE: dict[str, tuple[bytes, bytes]] = {
    "JSON": (WHOLE, b"application/json"),
    "with space around it": (b"\n" + WHOLE + b"\r\n ", b"application/json"),
    "NaN": (b'{"logprobs":[NaN,-Infinity]}', b"application/json"),
    "half a surrogate pair": (b'{"text":"\\ud83d"}', b"application/json"),
    "no UTF-8": (b'{"text":"\xff"}', b"application/json"),
    "deep": (b"[" * 9000 + b"]" * 9000, b"application/json"),
    "a word": (b"null", b"application/json"),
    "of another shape": (b'{"choices":3,"usage":[]}', b"application/vnd.new+json"),
    "lines": (WHOLE + b"\n" + WHOLE, b"application/x-ndjson"),
    "sound": (b"[RIFF{", b"audio/mpeg"),
    "text": (b"{ said she", b"text/plain"),
}


@pytest.mark.parametrize("framing", FRAMINGS)
async def test_a_cut_answer_is_an_error_where_nothing_has_gone_out(start: Starter, framing: str) -> None:
    async with stage(start) as on:
        for path, (cut, data) in product(QUEUED, CUTS.items()):
            played = await on.play(path, whole(framing, data))
            assert played.end == (502, *FAILED), (path, cut)
            assert "the engine broke off" in played.got.error["message"], (path, cut)
            assert 1000 <= int(played.got.headers["retry-after-ms"]) <= 1100, "the engine is in service"


async def test_what_is_no_http_or_ends_too_early_is_a_502(start: Starter) -> None:
    ill = {name: raw for name, raw in ILL_FRAMED.items() if not raw.startswith(b"HTTP/1.1 1")}
    rows = {**dict.fromkeys([*ill.values(), SWITCH], False), **dict.fromkeys(TRUNCATED.values(), True)}
    async with stage(start) as on:
        for raw, closes in rows.items():
            played = await on.play("/v1/chat/completions", Sent(raw, closes))
            assert played.end == (502, *FAILED), raw[:99]
            assert played.got.error["code"] == "backend_failed", raw[:99]
            assert (await on.play("/v1/chat/completions", Sent(answer(WHOLE)))).end == (200, *COMPLETED), raw[:99]


@pytest.mark.parametrize("framing", FRAMINGS)
async def test_a_cut_answer_breaks_off_where_some_has_gone_out(start: Starter, framing: str) -> None:
    async with stage(start, **RELAYED) as on:
        for path, data in product((*QUEUED, *BESIDE), (WHOLE[:2000], CUTS["amid a member"])):
            played = await on.play(path, whole(framing, data))
            assert played.end == (None, *FAILED), (path, data[-9:])
        for path in BESIDE:
            assert (await on.play(path, whole(framing, CUTS["amid a text"]))).end == (None, *FAILED), path


@pytest.mark.parametrize("limits", [{}, RELAYED], ids=["buffered", "relayed"])
async def test_what_is_whole_or_no_json_passes(start: Starter, limits: dict[str, int]) -> None:
    paths = ("/v1/chat/completions", "/v1/new", "/tokenize")
    async with stage(start, **limits) as on:
        for path, framing, (name, (body, kind)) in product(paths, (FRAMINGS[1], FRAMINGS[4]), FINE.items()):
            played = await on.play(path, whole(framing, body, kind))
            assert (played.end, played.got.body) == ((200, *COMPLETED), body), (path, framing, name)


def test_space_behind_an_answer_is_no_part_of_it() -> None:
    ending = JsonEndCheck([(b"content-type", b"application/json")])
    for data, is_missing in ((b" \n", False), (b" {", True), (b'"a":1', True), (b"} ", False), (b"\r\n", False)):
        ending.feed(data)
        assert ending.is_missing is is_missing


# --- streams ---

TOKENS = [token("a"), token("b"), token("c")]
EVENTS: dict[str, list[bytes]] = {
    "/v1/chat/completions": [*TOKENS, token("", "stop"), usage_event(11, 3), DONE],
    "/v1/completions": [*TOKENS, token("", "stop"), usage_event(11, 3), DONE],
    "/v1/responses": responses_stream("a", "b", "c"),
    "/v1/messages": messages_stream("a", "b", "c"),
}
ENDINGS = (DONE, b"response.completed", b"message_stop")


async def test_a_stream_that_said_so_has_ended_though_its_transport_breaks(start: Starter) -> None:
    async with stage(start) as on:
        for path in STREAMED:
            sent = b"".join(EVENTS[path])
            played = await on.play(path, Sent(STREAM_HEAD + chunk(sent), closes=True), stream=True)
            assert (played.end, played.tokens) == ((200, *COMPLETED), (11, 3)), path
            assert b"error" not in played.got.body


@pytest.mark.parametrize("framing", STREAMS)
async def test_a_stream_that_says_so_has_ended(start: Starter, framing: str) -> None:
    async with stage(start) as on:
        for path in STREAMED:
            played = await on.play(path, STREAMS[framing](b"".join(EVENTS[path])), stream=True)
            assert (played.end, played.tokens) == ((200, *COMPLETED), (11, 3)), path
            assert b"error" not in played.got.body
        # Many servers send no last event, and client libraries ask for none: it is enough that all choices say why.
        for path, left_out in product((path for path in STREAMED if path != "/v1/responses"), (1, 2)):
            sent = b"".join(EVENTS[path][: -1 if path == "/v1/messages" else -left_out])
            played = await on.play(path, STREAMS[framing](sent), stream=True)
            assert played.end == (200, *COMPLETED), path
            assert played.got.body == sent.replace(usage_event(11, 3), b""), path


@pytest.mark.parametrize("framing", STREAMS)
async def test_a_stream_that_does_not_say_so_is_a_broken_one(start: Starter, framing: str) -> None:
    """An error that the client sees, charged for what came; each event before it is whole JSON."""
    async with stage(start) as on:
        for path in STREAMED:
            parts = EVENTS[path]
            tokens = max(at for at, part in enumerate(parts) if b'"c"' in part)
            kept = b"".join(parts[: tokens + 1])
            for cut, sent in {
                "after an event": kept,
                "amid an event": kept + parts[tokens][:-9],
                "amid the last event": b"".join(parts[:-1]) + parts[-1][:-5],
                "without a last line end": kept + parts[tokens][:-1],
            }.items():
                played = await on.play(path, STREAMS[framing](sent), stream=True)
                assert played.end == (200, *FAILED), (path, cut)
                assert not [ending for ending in ENDINGS if ending in played.got.body], (path, cut)
                last = events(played.got.body)[-1]
                assert last["error"]["message"], (path, cut)
                if path == "/v1/messages":
                    assert played.got.body.rpartition(b"event: ")[2].startswith(b"error\n"), cut
                    assert last["type"] == "error", cut
                else:
                    assert last["error"]["code"] == "backend_failed", (path, cut)
                assert played.tokens[0] > 0, (path, cut)
                assert played.tokens[1] in (3, 4), (path, cut)


BROKEN_CHUNKS = {
    "chunk size": b"zz\r\n",
    "chunk by bare LF": b"5\nhello\n",
    "chunk longer than it says": b"2\r\nhello\r\n0\r\n\r\n",
    "chunk extension without end": b"1;" + b"a" * 300_000,
    "last chunk by bare LF": b"0\n\n",
}


async def test_a_stream_whose_framing_breaks_is_a_broken_one(start: Starter) -> None:
    async with stage(start) as on:
        for name, raw in BROKEN_CHUNKS.items():
            sent = Sent(STREAM_HEAD + chunk(b"".join(TOKENS)), later=raw)
            played = await on.play("/v1/chat/completions", sent, stream=True)
            assert (played.end, played.tokens[1]) == ((200, *FAILED), 3), name
            assert played.got.body.startswith(b"".join(TOKENS)), name
            assert events(played.got.body)[3]["error"]["code"] == "backend_failed", name
            assert len(events(played.got.body)) == 4, name


@pytest.mark.parametrize("before", [b"", TOKENS[0] + TOKENS[1]], ids=["at once", "after two tokens"])
async def test_an_error_in_a_stream_is_passed_on_and_is_about_the_request(start: Starter, before: bytes) -> None:
    sent = before + b'data: {"error":{"message":"no","type":"BadRequestError","param":null,"code":400}}\n\n' + DONE
    async with stage(start) as on:
        played = await on.play("/v1/chat/completions", stream(sent), stream=True)
        assert played.got.body == sent
        assert played.line["outcome"] == "failed"
        assert played.tokens[1] == before.count(b"data: ")


def of_choice(index: int, text: str, finish: str | None = None) -> bytes:
    return token(text, finish).replace(b'"index":0', b'"index":%d' % index)


FOREIGN = [b'data: {"type":"new","part":1}\n\n', b'event: x\ndata: {"part":2}\n\n', b"data: three\n\n"]


async def test_each_choice_has_to_say_why(start: Starter) -> None:
    rows = [
        (of_choice(0, "a", "stop") + of_choice(1, "b", "length"), COMPLETED),
        (of_choice(1, "b", "stop") + of_choice(0, "a") * 3 + of_choice(0, "", "stop"), COMPLETED),
        (of_choice(0, "a", "stop") + of_choice(1, "b"), FAILED),
        (of_choice(0, "a", "stop") + of_choice(0, "", "stop") + of_choice(1, "b"), FAILED),
        (of_choice(0, "a", "") + of_choice(1, "b", ""), FAILED),
    ]
    async with stage(start) as on:
        for sent, end in rows:
            assert (await on.play("/v1/chat/completions", stream(sent), stream=True, n=2)).end == (200, *end), sent


async def test_a_stream_without_an_event_is_no_answer_and_costs_nothing(start: Starter) -> None:
    statuses = {b"": 502, b": keep-alive\n\n": 200, b"data: {": 502, b"\n\n": 200}
    async with stage(start) as on:
        for path, (sent, status) in product(STREAMED, statuses.items()):
            played = await on.play(path, stream(sent), stream=True)
            assert (played.end, played.tokens) == ((status, *FAILED), (0, 0)), (path, sent)
            assert b"backend_failed" in played.got.body, (path, sent)


async def test_how_a_format_that_is_not_known_ends_is_not_known_either(start: Starter) -> None:
    async with stage(start) as on:
        for first in range(3):
            sent = b"".join(FOREIGN[first:] + FOREIGN[:first])
            played = await on.play("/v1/completions", stream(sent), stream=True)
            assert (played.end, played.tokens[1], played.got.body) == ((200, *COMPLETED), 3, sent), first
        for first in (0, 2):  # among events that are known it makes the stream no other
            sent = Sent(streamed(FOREIGN[first], token("a") * 3))
            played = await on.play("/v1/chat/completions", sent, stream=True)
            assert played.end == (200, *FAILED)
            assert played.got.body.startswith(FOREIGN[first] + token("a") * 3)
            assert played.got.body.endswith(b'"code":"backend_failed"}}\n\n')


async def test_what_passes_without_admission_ends_as_it_ends(start: Starter) -> None:
    sent = named("response.created") + named("anything")
    async with stage(start) as on:
        played = await on.fetch("/v1/responses/r1?stream=true", stream(sent))
        assert (played.end, played.got.body) == ((200, *COMPLETED), sent)
        played = await on.fetch("/v1/responses/r1", Sent(answer(b"")))
        assert played.end == (200, *COMPLETED), "it may be empty"


async def test_an_event_that_went_out_in_part_is_not_ended_for_the_engine(start: Starter) -> None:
    """What the client has of it cannot be taken back: only a broken connection shows that there is more."""
    async with stage(start) as on:
        played = await on.play("/v1/chat/completions", stream(token("a") + token("x" * 400_000)[:-9]), stream=True)
        assert played.end == (None, *FAILED)
        assert played.tokens[1] >= 1


# --- answers of any kind ---

TEXT, LINES = [b"Once upon", b" a time"], [b'{"message":{"content":"a"},"done":false}\n', b'{"done":true}\n']
KINDS: dict[bytes, list[bytes]] = {
    b"audio/pcm": [b"\x01" * 4000] * 3,
    b"Audio/MPEG": [b"ID3" * 900, b"\0" * 9],
    b"application/x-ndjson": LINES,
    b"application/jsonl": LINES,
    b"text/plain; charset=utf-8": TEXT,
}
NAMES_OF_EVENTS = (
    b"Text/Event-Stream", b"TEXT/EVENT-STREAM; Charset=UTF-8", b"text/plain", b"application/octet-stream",
    b"application/json", b"Application/JSON; charset=utf-8", None,
)  # fmt: skip
BEGINNINGS = (b": hi\n\n", b"\xef\xbb\xbf", b"\n", b"event: x\n", b"id: 1\n", b"retry: 5\n\n")
CHAT_EVENTS = EVENTS["/v1/chat/completions"]
SEEN_OF_CHAT = b"".join(CHAT_EVENTS).replace(usage_event(11, 3), b"")


async def test_what_is_no_json_goes_on_as_it_comes(start: Starter) -> None:
    async with stage(start) as on:
        for path, is_stream, (kind, parts) in product(("/v1/new", "/v1/completions"), (False, True), KINDS.items()):
            played = await on.play(path, in_pieces(kind, *parts), stream=is_stream)
            assert (played.end, played.got.body) == ((200, *COMPLETED), b"".join(parts)), (path, kind)
            assert played.got.headers["content-type"] == kind.decode()
        played = await on.play("/v1/completions", Sent(answer(b"hello", kind=b"text/plain")))
        assert (played.got.body, played.got.headers["content-length"]) == (b"hello", "5")


async def test_a_stream_of_events_is_one_by_any_name_and_may_begin_in_any_way(start: Starter) -> None:
    async with stage(start) as on:
        for kind, begun in (*product(NAMES_OF_EVENTS, [b""]), *product([b"application/json"], BEGINNINGS)):
            sent = in_pieces(kind, begun + CHAT_EVENTS[0], *CHAT_EVENTS[1:])
            played = await on.play("/v1/chat/completions", sent, stream=True)
            assert (played.end, played.tokens, played.got.body) == ((200, *COMPLETED), (11, 3), begun + SEEN_OF_CHAT)
            assert played.got.headers.get("content-type", "") == (kind or b"").decode()


async def test_json_is_json_by_any_spelling_and_where_a_stream_was_asked_for(start: Starter) -> None:
    async with stage(start) as on:
        for kind, is_stream in product(
            (b"application/json", b"APPLICATION/JSON", b"application/problem+json; charset=utf-8"), (False, True)
        ):
            played = await on.play("/v1/chat/completions", whole("chunks", b'{"choices":[]', kind), stream=is_stream)
            assert played.end == (502, *FAILED), kind
        sent = whole("chunks", b'{"data":"data:","usage":{"prompt_tokens":7,"completion_tokens":2}}', b"text/plain")
        played = await on.play("/v1/chat/completions", sent, stream=True)
        assert (played.end, played.tokens) == ((200, *COMPLETED), (7, 2))
        assert sent.raw.endswith(chunk(played.got.body) + STREAM_END)


# --- nothing more ---


async def test_an_engine_that_falls_silent_is_given_up(start: Starter) -> None:
    async with stage(start, upstream_silence_s=0.1) as on:
        for path in ("/v1/chat/completions", "/tokenize"):
            played = await on.play(path, Sent(b""))
            assert played.end == (504, "failed", "backend_timeout"), path
            assert played.got.error["code"] == "backend_timeout", path
        played = await on.play("/v1/chat/completions", Sent(BEGUN), stream=True)
        assert (played.end, played.tokens[1]) == ((200, "failed", "backend_timeout"), 1)
        assert events(played.got.body)[-1]["error"]["code"] == "backend_timeout"
