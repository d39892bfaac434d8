"""In an engine's place: a server that keeps the exact bytes of every request and answers what a test says."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from ssl import SSLContext
from types import TracebackType
from typing import Any, Self

from tests.gateway.live import MODEL, until

CONTEXT_TOKENS = 4096
_CONTROL_PLANE = (b"GET /health ", b"GET /v1/models ", b"GET /metrics", b"GET /v1/fairgate/steps ")


@dataclass
class Seen:
    """One request as it came."""

    head: bytes
    body: bytes

    @property
    def line(self) -> bytes:
        return self.head.split(b"\r\n", 1)[0]

    @property
    def headers(self) -> dict[str, str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:-2]
        return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}

    @property
    def unsalted(self) -> bytes:
        """The body without the salt of its tenant, which the gateway puts in front."""
        return re.sub(rb'^(\s*\{)"cache_salt":"[0-9a-f]{24}",', rb"\1", self.body)

    @property
    def json(self) -> Any:
        return json.loads(self.unsalted)


class Peer:
    """The connection a request came on."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def gone(self) -> None:
        """Returns when the gateway has closed the connection."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass

    def reset(self) -> None:
        """End the connection with RST, unless it is closed already."""
        if self.writer.is_closing():
            return
        linger = struct.pack("ii", 1, 0)
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()


Script = Callable[[Seen, Peer], Awaitable[None]]


class Listener:
    """A server on a free port that talks on every connection as `talk` says."""

    def __init__(self, ssl: SSLContext | None = None) -> None:
        self._ssl = ssl
        self._serving: set[asyncio.Task[None] | None] = set()
        self.faults: list[Exception] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 26, ssl=self._ssl)
        self.url = f"{'http' if self._ssl is None else 'https'}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.close()
        for task in self._serving:
            assert task is not None
            task.cancel()
        await until(lambda: not self._serving)
        if error is None and self.faults:
            raise self.faults[0]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.add(asyncio.current_task())
        try:
            await self.talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        except Exception as error:
            self.faults.append(error)
        finally:
            writer.close()
            self._serving.discard(asyncio.current_task())

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError


class Upstream(Listener):
    """Answers the control plane itself (healthy, one model, no metrics); everything else is for the script."""

    def __init__(self, script: Script, ssl: SSLContext | None = None, *, context_tokens: int = CONTEXT_TOKENS) -> None:
        super().__init__(ssl)
        self._script = script
        self._context_tokens = context_tokens
        self.asked_for_metrics = asyncio.Event()
        self.requests: list[Seen] = []
        self.unread: list[bytes] = []
        """What was left of connections that ended within a request."""

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        while not writer.is_closing():
            try:
                seen = await _read(reader)
            except asyncio.IncompleteReadError as error:
                self.unread += [error.partial] if error.partial else []
                return
            if seen.head.startswith(_CONTROL_PLANE):
                if b"/metrics" in seen.line:
                    self.asked_for_metrics.set()
                await peer.send(_control_plane(seen, self._context_tokens))
                continue
            self.requests.append(seen)
            await self._script(seen, peer)


async def _read(reader: asyncio.StreamReader) -> Seen:
    """One request, by the one framing that its head gives: what follows it is the next one."""
    head = await reader.readuntil(b"\r\n\r\n")
    seen = Seen(head, b"")
    if "chunked" in seen.headers.get("transfer-encoding", "").lower():
        while size := int(await reader.readuntil(b"\r\n"), 16):
            seen.body += (await reader.readexactly(size + 2))[:-2]
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass  # trailers
    else:
        digits = seen.headers.get("content-length", "").lstrip("0")  # a proxy may pass thousands of zeros
        seen.body = await reader.readexactly(int(digits or "0"))
    return seen


def _control_plane(seen: Seen, context_tokens: int) -> bytes:
    if seen.head.startswith((b"GET /metrics", b"GET /v1/fairgate/steps")):
        return answer(b"", status=b"404 Not Found")
    card = {"id": MODEL, "object": "model", "owned_by": "vllm", "max_model_len": context_tokens}
    cards = json.dumps({"object": "list", "data": [card]}).encode()
    return answer(cards if b"/v1/models" in seen.line else b"")


def answer(body: bytes, *more: bytes, status: bytes = b"200 OK", kind: bytes = b"application/json") -> bytes:
    """A whole answer of known length, with more header lines."""
    lines = [b"HTTP/1.1 " + status, b"Content-Type: " + kind, b"Content-Length: %d" % len(body), *more]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


OK = answer(b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}')
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM_END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def token(text: str, finish: str | None = None) -> bytes:
    """One event of a chat stream."""
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}
    value = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def usage_event(prompt: int, output: int) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    value = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    return b"data: " + json.dumps({**value, "choices": [], "usage": usage}, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
BEGUN = STREAM_HEAD + chunk(token("a"))
"""A stream after its first token."""
STREAM = BEGUN + chunk(DONE) + STREAM_END
"""A whole stream of one token."""


def streamed(*pieces: bytes) -> bytes:
    """A whole stream, each of these pieces in a chunk of its own."""
    return STREAM_HEAD + b"".join(chunk(each) for each in pieces if each) + STREAM_END


def named(name: str, **fields: Any) -> bytes:
    """One event of a Responses or Messages stream."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), json.dumps({"type": name, **fields}).encode())


def responses_stream(*deltas: str) -> list[bytes]:
    done = {"status": "completed", "output": [], "usage": {"input_tokens": 11, "output_tokens": len(deltas)}}
    return [
        named("response.created", response={"status": "in_progress"}),
        *(named("response.output_text.delta", delta=delta) for delta in deltas),
        named("response.completed", response=done),
    ]


def messages_stream(*deltas: str) -> list[bytes]:
    return [
        named("message_start", message={"id": "m", "usage": {"input_tokens": 11, "output_tokens": 0}}),
        named("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        *(named("content_block_delta", index=0, delta={"type": "text_delta", "text": delta}) for delta in deltas),
        named("content_block_stop", index=0),
        named("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": len(deltas)}),
        named("message_stop"),
    ]


async def silent(seen: Seen, peer: Peer) -> None:
    """A script that answers nothing."""
    await peer.gone()


def replies(whole: bytes) -> Script:
    """A script that answers every request with the same bytes."""

    async def script(seen: Seen, peer: Peer) -> None:
        await peer.send(whole)

    return script
