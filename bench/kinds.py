"""One request of each kind that is counted, the engine that answers it, and the client that sends it.

All three are in one process with the gateway, and nothing comes in pieces: a chunk of a stream is sent when the client
has the one before.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

MODEL: Final = "bench"
ANSWER_ID: Final = "chatcmpl-0123456789abcdef0123456789abcdef"
CREATED: Final = 1_790_000_000
TAIL_EVENTS: Final = 4
"""Role, finish, usage and `[DONE]` of a stream."""
CHUNKS: Final = 100
TURNS: Final = 20
WORDS: Final = "the quick answer to every question is a good deal longer than the question itself was "
TOOL: Final = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads a file of the repository and says what is in it. " * 4,
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


@dataclass(frozen=True, slots=True)
class Kind:
    """`body`: of its request of this number; no two of them are alike."""

    name: str
    body: Callable[[int], bytes]


def _question(size: int, *, stream: bool = False) -> Callable[[int], bytes]:
    def body(number: int) -> bytes:
        text = (f"{number:06d}: " + WORDS * (size // len(WORDS) + 1))[: size - 130]
        fields = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 100, "stream": stream}
        return json.dumps(fields).encode()

    return body


def agent_call(number: int) -> bytes:
    """A question, and calls of tools with their results, the last of which goes on with the answer."""
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": "You help with repositories. " * 10},
        {"role": "user", "content": f"{number:06d}: what is in this repository, and what does it do?"},
    ]
    while len(turns) < TURNS:
        id_ = f"call_{number:06d}{len(turns):018d}"
        called = {"id": id_, "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a.py"}'}}
        turns.append({"role": "assistant", "content": None, "tool_calls": [called]})
        turns.append({"role": "tool", "tool_call_id": id_, "content": WORDS * 2})
    fields = {"model": MODEL, "messages": turns, "tools": [TOOL, TOOL], "max_tokens": 100, "stream": False}
    return json.dumps(fields).encode()


KINDS: Final = (
    Kind("1 kB", _question(1000)),
    Kind(f"stream of {CHUNKS}", _question(1000, stream=True)),
    Kind(f"agent, {TURNS} turns", agent_call),
    Kind("64 kB", _question(64_000)),
)


class Client(asyncio.Protocol):
    """A kept connection to the gateway, which sends one request after another."""

    def __init__(self, port: int, key: str) -> None:
        self._head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer {key}\r\n"
        self._got = b""
        self._ended: asyncio.Future[bytes] | None = None
        self.on_piece: Callable[[], None] = lambda: None
        """Something of an answer has come."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def ask(self, body: bytes) -> asyncio.Future[bytes]:
        """Send a request; what comes back has its answer once that is whole."""
        self._got = b""
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(f"{self._head}content-length: {len(body)}\r\n\r\n".encode() + body)
        return self._ended

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, _, body = self._got.partition(b"\r\n\r\n")
        if b"chunked" in head:
            is_whole = body.endswith(b"\r\n0\r\n\r\n")
        else:
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            is_whole = len(body) == length
        if not is_whole:
            self.on_piece()
        elif self._ended is not None:
            self._ended.set_result(self._got)


def events(count: int) -> list[str]:
    """Return a stream as vLLM sends it, `count` events of about 250 bytes."""

    def chunk(**fields: Any) -> str:
        head = {"id": ANSWER_ID, "object": "chat.completion.chunk", "created": CREATED, "model": MODEL}
        return f"data: {json.dumps(head | {'choices': [], 'usage': None} | fields, separators=(',', ':'))}\n\n"

    def choice(delta: dict[str, str], finish: str | None = None) -> list[dict[str, Any]]:
        ends = {"logprobs": None, "finish_reason": finish, "stop_reason": None, "token_ids": None}
        return [{"index": 0, "delta": delta, **ends}]

    words = count - TAIL_EVENTS
    content = [chunk(choices=choice({"content": f" word{n:02d}"})) for n in range(words)]
    used = {"prompt_tokens": 170, "total_tokens": 170 + words, "completion_tokens": words}
    first = chunk(choices=choice({"role": "assistant", "content": ""}))
    last = chunk(choices=choice({"content": ""}, "length"))
    return [first, *content, last, chunk(usage=used), "data: [DONE]\n\n"]


def completion() -> str:
    """Return an answer of about 600 bytes that is not streamed."""
    content = "a word and another " * 12
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "tool_calls": []}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    used = {"prompt_tokens": 170, "total_tokens": 230, "completion_tokens": 60, "prompt_tokens_details": None}
    head = {"id": ANSWER_ID, "object": "chat.completion", "created": CREATED, "model": MODEL}
    return json.dumps(head | {"choices": [choice], "usage": used})


def _streamed() -> list[bytes]:
    """Return a stream's pieces. Usage comes with the end: a client that did not ask for usage does not see it."""
    *some, usage, done = [event.encode() for event in events(CHUNKS)]
    return [*some, usage + done]


class Engine(asyncio.Protocol):
    """A connection of an engine that knows one question and answers it in one piece, or chunk by chunk."""

    _whole = completion().encode()
    _events: Final = _streamed()

    def __init__(self, of: Answering) -> None:
        self._of = of
        self._got = b""
        self._left: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, end, body = self._got.partition(b"\r\n\r\n")
        if not end:
            return
        length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0] or b"0")
        if len(body) < length:
            return
        self._got = b""
        if head.startswith(b"GET /health "):
            self._answer(b"{}")
        elif head.startswith(b"GET /v1/models "):
            models = {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 32768}]}
            self._answer(json.dumps(models).encode())
        elif not head.startswith(b"POST "):
            self._transport.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        elif b'"stream": true' in body:
            self._left = self._events[:0:-1]
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            self._transport.write(head + _chunk(self._events[0]))
            self._of.streaming = self
        else:
            self._answer(self._whole)

    def next_chunk(self) -> None:
        if self._left:
            chunk = _chunk(self._left.pop())
            self._transport.write(chunk if self._left else chunk + b"0\r\n\r\n")

    def _answer(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % len(body) + body)


class Answering:
    """An engine on a free port."""

    url = ""
    streaming: Engine | None = None

    def next_chunk(self) -> None:
        """The client has all that was streamed: on with it."""
        if self.streaming is not None:
            self.streaming.next_chunk()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@asynccontextmanager
async def engine() -> AsyncIterator[Answering]:
    """Run an engine that answers at once, and does not report its load."""
    made = Answering()
    server = await asyncio.get_running_loop().create_server(lambda: Engine(made), "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
