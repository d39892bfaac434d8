"""A large body of any kind is read in slices, in memory of its own size, and nobody waits for it."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import uvloop

from gateway.config.sections.apps import InteractionRules
from gateway.http.errors import ApiError, Reason
from gateway.request.apis import CHAT, RESPONSES
from gateway.request.body.json_ranges import DEPTH_MAX
from gateway.request.body.large_body import TURNS_MAX, read_large_json
from gateway.request.body.payload import LARGE_BODY_BYTES, STEERING, read_json
from gateway.request.body.read import AT_ONCE_BYTES_MAX, is_quick
from gateway.request.body.readings import Reading, Readings
from gateway.request.body.slices import WINDOW_BYTES, Slices, at_once
from gateway.request.interaction_claim import ClaimReader
from tests.claims import claim_of
from tests.gateway.capture import Upstream, answer, replies
from tests.gateway.live import MODEL, Live, Starter, chat, until
from tests.gateway.test_headers_and_fields import STEERING as STEERING_FIELDS
from tests.request.large_bodies import FLOW, KINDS, Kind, is_read_at_once, read_at_once, reading

OK = answer(b'{"usage":{"prompt_tokens":3,"completion_tokens":1}}')
PATH = "/v1/chat/completions"
SIZE = 1 << 19
DENSE_SIZE = 1 << 20
"""Of turns that are a few bytes each: as many as are kept take more than a body of half a megabyte."""


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def start(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Starter:
    monkeypatch.setattr("gateway.telemetry.access_log.FLUSH_S", 0.005)
    return Starter(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_it_takes_memory_of_its_own_size_and_many_slices(name: str) -> None:
    kind, size = KINDS[name], DENSE_SIZE if name in ("tiny turns", "lists") else SIZE
    body = kind[1](size)
    gc.collect()
    tracemalloc.start()
    slices = 0
    refused: ApiError | None = None
    try:
        for _ in reading(kind, body):
            slices += 1
    except ApiError as error:
        refused = error
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert len(body) + peak_bytes <= 3 * len(body)
    if refused is None:
        assert slices >= size // (2 * WINDOW_BYTES)
    else:
        assert refused.status == 400
        assert len(refused.message) < 300


@pytest.mark.interpreted_only("counts the calls of one slice, which compiled code does not report")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_no_slice_of_it_does_more_than_a_little(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what a slice calls, of Python and of C: a clock would measure the machine's other work."""
    calls = most = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    work = reading(kind, kind[1](1 << 18))
    try:
        while True:
            calls = 0
            sys.setprofile(count)
            next(work)
            sys.setprofile(None)
            most = max(most, calls)
    except (StopIteration, ApiError):
        pass
    finally:
        sys.setprofile(None)
    assert most < 20_000  # some milliseconds


@pytest.mark.interpreted_only("counts calls, which compiled code does not report")
def test_what_is_read_at_one_go_does_no_more_than_some_slices() -> None:
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    in_slices = set()
    for name, kind in KINDS.items():
        body = kind[1](AT_ONCE_BYTES_MAX - 100_000)
        if not is_read_at_once(kind, body):
            in_slices.add(name)
            continue
        calls = 0
        sys.setprofile(count)
        try:
            read_at_once(kind, body)
        except ApiError:
            pass
        finally:
            sys.setprofile(None)
        assert calls < 100_000, name
    assert in_slices >= {"turns", "tiny turns", "parts of results", "half results", "small images", "items", "prompts"}
    assert not in_slices & {"one long text", "long turns", "quotes", "backslashes", "line ends", "marked text", "image"}


@pytest.mark.parametrize("begin", ["{", "{ ", "{\n", "{\t", "{\r"])
def test_objects_are_counted_however_they_are_written(begin: str) -> None:
    turns = f'{{"messages": [{begin}"role": "user", "content": "a"}}' + f", {begin}}}" * 100_000 + "]}"
    assert not is_quick(turns.encode(), CHAT)


def test_code_in_a_text_is_no_object() -> None:
    code = 'if (a) {\n  b = {"c": `${d}`};\n}\n' * 20_000
    assert is_quick(json.dumps(chat(code)).encode(), CHAT)
    assert not is_quick(json.dumps(chat(code * 2)).encode(), CHAT), "too long"


def _large(**fields: Any) -> dict[str, Any]:
    return chat("word " * 100_000, **fields)


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        (_large(), _large()),
        (_large(stream=True), _large(stream_options={"include_usage": True}, stream=True)),
        (
            _large(stream=True, stream_options={"a": 1}),
            _large(stream=True, stream_options={"a": 1, "include_usage": True}),
        ),
        (
            _large(stream=True, stream_options=None, temperature=0.5),
            _large(stream=True, stream_options={"include_usage": True}, temperature=0.5),
        ),
        (_large(**STEERING_FIELDS, seed=1), _large(seed=1)),
        ({**STEERING_FIELDS, **_large(stream=True)}, _large(stream=True, stream_options={"include_usage": True})),
    ],
    ids=["plain", "streamed", "with options", "without options", "steering behind", "steering before"],
)
async def test_it_reaches_the_engine_as_a_small_one_does(
    start: Starter, asked: dict[str, Any], sent: dict[str, Any]
) -> None:
    routes = [{"path": "/v1/unheard-of", "treatment": "generate"}]
    async with Upstream(replies(OK)) as upstream, start(upstream.url, routes=routes) as live:
        assert len(json.dumps(asked)) > LARGE_BODY_BYTES
        for path in (PATH, "/v1/unheard-of"):
            limit = {"max_tokens": 5}
            context = "the prompt has about 125"
            got = await live.ask(path, {**asked, **limit})
            assert got.status == 400
            assert context in got.error["message"]
        assert (await live.ask("/tokenize", asked)).status == 200
        found = upstream.requests[0].json
        found.pop("stream_options", None)
        wanted = {name: value for name, value in sent.items() if name != "stream_options"}
        assert found == wanted
        payload = at_once(read_large_json(json.dumps(asked).encode(), CHAT))
        if payload.stream:
            payload.ask_usage()
        at_once(payload.seal())
        assert json.loads(payload.body) == sent


async def test_it_is_admitted_and_answered(start: Starter) -> None:
    body = chat("see", extra="x" * 1_000_000, stream=True)
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        assert (await live.ask(PATH, json.dumps(body).encode())).status == 200
        assert upstream.requests[0].json == {**body, "stream_options": {"include_usage": True}}
        [line] = await live.lines(1)
        assert (line["outcome"], line["model"]) == ("completed", MODEL)
        assert live.holds_nothing()


def _slow() -> bytes:
    """A body whose reading takes hundreds of slices."""
    return KINDS["quotes"][1](8 << 20)


async def _send(live: Live, body: bytes, path: str = PATH) -> asyncio.StreamWriter:
    """On a connection of its own; returns once it is being read."""
    _, writer = await asyncio.open_connection("127.0.0.1", live.gateway.port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    pipeline = live.gateway._pipeline
    assert pipeline is not None
    await until(lambda: pipeline.reading)
    return writer


async def test_others_are_served_while_it_is_read(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        writers = [await _send(live, _slow())]
        assert (await live.ask(PATH, chat())).status == 200
        pipeline = live.gateway._pipeline
        assert pipeline is not None
        assert pipeline.reading == 1
        writers[0].close()


async def test_a_client_that_goes_away_meanwhile_leaves_nothing_behind(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        writer = await _send(live, _slow())
        writer.transport.abort()
        [line] = await live.lines(1)
        assert (line["outcome"], line["reason"]) == ("abandoned", "client_disconnected")
        pipeline = live.gateway._pipeline
        assert pipeline is not None
        assert pipeline.reading == 0
        assert pipeline._readings._begun_bytes == 0
        assert live.holds_nothing()
        assert not upstream.requests


async def test_a_client_that_goes_away_at_any_slice_holds_no_place_beside_the_queue(start: Starter) -> None:
    body = json.dumps({**STEERING_FIELDS, "prompt": "a" * (8 << 20), "model": MODEL}).encode()
    limits = {"unqueued_max": 1}
    async with Upstream(replies(OK)) as upstream, start(upstream.url, limits=limits) as live:
        pipeline = live.gateway._pipeline
        assert pipeline is not None
        pipeline._readings._is_scheduled = True  # so it does not go on by itself
        for slices in range(0, 400, 4):  # sealing takes nine and more
            writer = await _send(live, body, "/tokenize")
            [[reading]] = pipeline._readings._waiting.values()
            steps = sum(1 for _ in itertools.islice(reading.work, slices))
            pipeline._readings.cancel(reading)
            writer.transport.abort()
            if steps < slices:
                break
        assert steps < slices
        await live.lines(slices // 4 + 1)
        assert (await live.ask("/tokenize", {"model": MODEL})).status == 200


async def test_a_gateway_that_stops_says_so(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        reader, writer = await asyncio.open_connection("127.0.0.1", live.gateway.port)
        body = _slow()
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        pipeline = live.gateway._pipeline
        assert pipeline is not None
        await until(lambda: pipeline.reading)
        pipeline.give_up(ApiError(Reason.DRAINING, "shutting down", retry_after_s=1.0))
        assert (await reader.readline()).startswith(b"HTTP/1.1 503 ")
        [line] = await live.lines(1)
        assert (line["outcome"], line["reason"]) == ("refused", "draining")
        assert pipeline.reading == 0
        writer.close()


# --- whose turn it is ---


def _steps(ended: list[str], name: str, count: int) -> Slices:
    for _ in range(count):
        yield
    ended.append(name)


@pytest.mark.interpreted_only("makes every slice one step")
async def test_tenants_take_turns_however_much_one_of_them_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.request.body.readings.SLICE_S", 0.0)
    ended: list[str] = []
    readings = Readings(100)
    for number in range(5):
        readings.start(Reading("greedy", _steps(ended, f"greedy {number}", 10), 1))
    readings.start(Reading("modest", _steps(ended, "modest", 10), 1))
    await until(lambda: not len(readings))
    assert ended[:2] in (["greedy 0", "modest"], ["modest", "greedy 0"])
    assert len(ended) == 6


async def test_what_is_read_at_once_has_a_bound_and_the_next_one_waits() -> None:
    said: list[str] = []
    most = begun = 0

    def read(name: str, size: int) -> Slices:
        nonlocal most, begun
        begun += size
        most = max(most, begun)
        for _ in range(10):
            yield
        begun -= size
        said.append(name)

    readings = Readings(100)
    for name, size in (("a", 60), ("b", 60), ("c", 30), ("d", 500), ("e", 30), ("a", 60)):
        readings.start(Reading(name, read(name, size), size))
    gone = Reading("f", read("gone", 1000), 1000)
    readings.start(gone)
    readings.cancel(gone)
    await until(lambda: not len(readings))
    assert sorted(said) == ["a", "a", "b", "c", "d", "e"]
    assert most == 500, "one that has more than is read at once is read alone"
    assert said.index("b") < said.index("c"), "nothing that is small goes before one that waits for room"
    readings.start(Reading("a", read("last", 100), 100))
    await until(lambda: not len(readings))
    assert said[-1] == "last"


# --- what is read of it ---


def _claims(body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    api = RESPONSES if "input" in body else CHAT
    payload = at_once(read_large_json(data, api)) if len(data) > LARGE_BODY_BYTES else read_json(data, api)
    return claim_of(ClaimReader(InteractionRules(), {}), [], payload, FLOW, generates=True)


@pytest.mark.parametrize("words", [10, 100_000, 1_000_000])
@pytest.mark.parametrize("marked", [False, True])
def test_a_conversation_that_grows_large_stays_the_same_interaction(words: int, marked: bool) -> None:
    text = 'say "hi" \\ ' * (words // 10)
    mark = {"cache_control": {"type": "ephemeral"}} if marked else {}
    first = {"role": "user", "content": [{"type": "text", "text": text, **mark}]}
    plain = {"role": "user", "content": text}
    calls = {"role": "assistant", "content": None}
    result = {"role": "tool", "content": "r" * 500_000}
    block = {"role": "user", "content": [{"type": "tool_result", "content": "r" * 500_000}]}
    asked = _claims({"messages": [first]})
    assert asked.begins is True
    for more in (result, block):
        claim = _claims({"messages": [plain if marked else first, calls, more]})
        assert (claim.id, claim.stage, claim.begins) == (asked.id, 2, False)
    assert _claims({"messages": [{"role": "user", "content": text + "!"}]}).id != asked.id


def test_a_long_text_is_a_question() -> None:
    assert _claims({"input": "x" * 500_000}).begins is True
    assert _claims({"input": "x" * 500_000}).id != _claims({"input": "x" * 500_001}).id


@pytest.mark.parametrize("text", ["", "and " * 1000, "and; " * 1000, ";base64 " * 100])
def test_what_is_attached_is_found_among_prose_and_among_code(text: str) -> None:
    said = {"type": "text", "text": text}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for content, attachments in (([said], 0), ([image, said], 1), ([said, image, said, image], 2)):
        body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
        assert read_json(body, CHAT).prompt.attachments == attachments


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[" + b" " * 500_000 + b"]", "must be a JSON object"),
        (b'{"a":1}' + b" " * 500_000 + b"}", "something follows"),
        (b'{"a":1' + b" " * 500_000 + b'"b":2}', "a comma is expected"),
        (b'{"a"' + b" " * 500_000 + b"1}", "a colon is expected"),
        (b"{a" + b" " * 500_000 + b":1}", "a field's name is expected"),
        (b'{"a":' + b" " * 500_000 + b"}", "a value is expected"),
        (b'{"a":1,' + b" " * 500_000 + b"}", "a field's name is expected"),
        (b'{"a":"' + b" " * 500_000, "a string is not closed"),
        (b'{"a":"' + b"\\" * 500_001 + b'"}', "a string is not closed"),
        (b'{"a":[' + b" " * 500_000, "too early"),
        (b'{"a":' + b"[" * (DEPTH_MAX + 1) + b"]" * (DEPTH_MAX + 1) + b"}", "nested deeper"),
        (b'{"n":"x","b":"' + b" " * 500_000 + b'"}', "Expected `int | null`"),
        (b'{"model":5,"b":"' + b" " * 500_000 + b'"}', "Expected `str | null`"),
        (b'{"messages":[' + b"{}," * (TURNS_MAX + 1) + b"{}]}", "turns"),
    ],
)
def test_what_is_wrong_with_a_large_body_is_said(body: bytes, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        at_once(read_large_json(body, CHAT))
    assert refused.value.status == 400
    assert message in refused.value.message


@pytest.mark.parametrize("offset", range(-3, 4))
def test_no_window_s_end_is_taken_for_the_end_of_a_string(offset: int) -> None:
    for unit in (b'\\"', b"\\\\", b"\\u0022", "\U0001f600".encode(), b"a"):
        text = b"a" * (WINDOW_BYTES - 20 + offset) + unit * WINDOW_BYTES
        body = b'{"x":"%b","priority":1,"model":"m"}' % text
        payload = at_once(read_large_json(body, CHAT))
        at_once(payload.seal())
        assert payload.model == "m"
        assert payload.body == b'{"x":"%b","model":"m"}' % text
        assert not STEERING & set(json.loads(payload.body))
