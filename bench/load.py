"""A load generator that costs little, because it shares the machine with what it measures.

One `Connection` is one HTTP/1.1 keep-alive connection that carries one request at a time. Replies are parsed by
httptools; server-sent events are counted by their `data: ` prefix, never decoded.
"""

import asyncio
import json
import os
import random
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

EVENT = b"data: "
DONE = b"data: [DONE]"
ERROR_EVENT = b'data: {"error"'
# Servers close idle connections, vLLM's after 5 s: a request on one that is about to go is lost.
REUSE_WITHIN_S = 2.0
# Enough of the end of a stream to hold the usage event and [DONE].
TAIL_BYTES = 1024
AGAIN_AFTER_S, AGAIN_AFTER_S_MAX = 0.05, 5.0
PROMPT_TOKENS = re.compile(rb'"prompt_tokens":\s*(\d+)')
CACHED_TOKENS = re.compile(rb'"cached_tokens":\s*(\d+)')

# Words that are one token each in the tiny model, so that lengths in words are lengths in tokens.
WORDS = """
    about after all also and any are back because been before but can could did down each even first for from good
    great had has have her him his how into its just life like little long made make man many may more most much must
    new off one only other our out over people said see she should some state still such than that the them then there
    these they this those through time too two very was way well were what when where which who will with word work
    world would year you
"""
VOCABULARY = tuple(WORDS.split())


MODEL = os.environ.get("FAIRGATE_BENCH_MODEL", "tiny")
"""Every engine of our own serves this one. `bench.gpu` names the model of somebody else's."""


@dataclass(frozen=True, slots=True)
class Request:
    """A client's request: lengths in words and tokens, and the sender. An answer's length varies by this part."""

    words_in: int
    tokens_out: int
    stream: bool = True
    key: str = ""
    user: str = ""
    usage: bool = False
    model: str = MODEL
    vary: float = 0.0

    def body(self, rng: random.Random) -> bytes:
        """The JSON body, with a prompt nobody has sent before, so that no prefix cache shortens the work."""
        fields: dict[str, object] = {
            "model": self.model,
            "messages": [{"role": "user", "content": " ".join(rng.choices(VOCABULARY, k=self.words_in))}],
            "max_tokens": max(1, round(self.tokens_out * (1 + self.vary * rng.uniform(-1, 1)))),
            "ignore_eos": True,
            "stream": self.stream,
        }
        if self.user:
            fields["user"] = self.user
        if self.usage and self.stream:
            fields["stream_options"] = {"include_usage": True}
        return json.dumps(fields).encode()

    def encode(self, host: str, rng: random.Random) -> bytes:
        """The whole HTTP request."""
        body = self.body(rng)
        auth = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n{auth}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class Reply:
    """A reply as it comes in: status, events so far, and when the first one came (loop time, seconds)."""

    __slots__ = (
        "body",
        "broken",
        "error",
        "events",
        "first_s",
        "retry_after",
        "sent_s",
        "sse",
        "status",
        "tail",
    )

    def __init__(self, sent_s: float) -> None:
        self.sent_s = sent_s
        self.first_s = 0.0
        self.status = 0
        self.retry_after = ""
        self.events = 0
        self.sse = False
        self.error = False
        self.broken = False
        self.tail = b""
        self.body = b""

    @property
    def failure(self) -> str:
        """Why the reply is not whole, in a few words; empty if it is: 200 and, of a stream, a clean [DONE]."""
        if self.broken:
            return f"connection lost after {self.events} events" if self.status else "connection lost before a reply"
        if self.status != 200:
            return f"status {self.status}: {self.body[:200].decode(errors='replace')}"
        if self.error:
            return "error event"
        if self.sse and not self.tail.rstrip().endswith(DONE):
            return f"no [DONE] after {self.events} events"
        return ""

    @property
    def ok(self) -> bool:
        return not self.failure

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first event (of a reply that is not streamed: to its body)."""
        return self.first_s - self.sent_s

    @property
    def again_after_s(self) -> float:
        """How long a client waits before it sends a failed request again: as it is told to, but not for long."""
        return min(float(self.retry_after), AGAIN_AFTER_S_MAX) if self.retry_after.isdigit() else AGAIN_AFTER_S

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens by the usage at the end of the reply; 0 when it states none."""
        return self._stated(PROMPT_TOKENS)

    @property
    def cached_tokens(self) -> int:
        """Return the prompt tokens that the engine found in its prefix cache, by the usage."""
        return self._stated(CACHED_TOKENS)

    def _stated(self, number: re.Pattern[bytes]) -> int:
        stated = number.findall(self.tail if self.sse else self.body)
        return int(stated[-1]) if stated else 0

    def feed(self, data: bytes, now_s: float) -> None:
        """Takes one piece of the body, cut anywhere."""
        if not self.sse:
            self.body += data
            self.first_s = self.first_s or now_s
            return
        # A prefix may be cut in two, so the end of the last piece is looked at again, less what it counted itself.
        seam = self.tail[1 - len(EVENT) :]
        new = (seam + data).count(EVENT)
        if new:
            self.events += new
            self.first_s = self.first_s or now_s
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        if ERROR_EVENT in self.tail:
            self.error = True


class Connection(asyncio.Protocol):
    """A keep-alive connection to one server, reopened when the server has closed it."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self.reply: Reply | None = None
        self.done: asyncio.Future[Reply] | None = None
        self.parser = httptools.HttpResponseParser(self)

    async def send(self, request: bytes, sent_s: float | None = None) -> Reply:
        """Sends and waits for the whole reply. `sent_s` is the time to measure from; None stands for now.

        Never raises for what the network does: a connection that fails or breaks gives a reply that is not ok.
        """
        self.reply = Reply(self.loop.time() if sent_s is None else sent_s)
        self.done = self.loop.create_future()
        try:
            if self.transport is None or self.transport.is_closing():
                self.parser = httptools.HttpResponseParser(self)
                await self.loop.create_connection(lambda: self, self.host, self.port)
        except OSError:
            self.reply.broken = True
            return self.reply
        self.transport.write(request)
        return await self.done

    def close(self) -> None:
        """Drops the connection, whatever is on it."""
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()

    def connection_lost(self, _error: Exception | None) -> None:
        self.transport = None
        if self.done is not None and not self.done.done():
            self.reply.broken = True
            self.done.set_result(self.reply)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self.reply.sse = value.startswith(b"text/event-stream")
        elif name.lower() == b"retry-after":
            self.reply.retry_after = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.reply.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.reply.feed(body, self.loop.time())

    def on_message_complete(self) -> None:
        keep = self.parser.should_keep_alive()
        if not self.done.done():
            self.done.set_result(self.reply)
        if not keep:
            self.close()


class Client:
    """Connections to one URL, with the replies that are on their way."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self.rng = random.Random(20_26)
        self.loop = asyncio.get_running_loop()
        self.idle: list[tuple[float, Connection]] = []
        self.busy: set[Connection] = set()

    async def send(self, request: Request, sent_s: float | None = None) -> Reply:
        """Sends one request on an idle connection or a new one."""
        return await self.raw(request.encode(f"{self.host}:{self.port}", self.rng), sent_s)

    async def get(self, path: str) -> Reply:
        """Send a GET."""
        return await self.raw(f"GET {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n\r\n".encode())

    async def raw(self, request: bytes, sent_s: float | None = None) -> Reply:
        """Sends request bytes as they are."""
        connection = self._connection()
        self.busy.add(connection)
        try:
            reply = await connection.send(request, sent_s)
        finally:
            self.busy.discard(connection)
        if connection.transport is not None:
            self.idle.append((self.loop.time(), connection))
        return reply

    def _connection(self) -> Connection:
        """The connection that was used last, or a new one if that is too long ago."""
        if self.idle:
            since_s, connection = self.idle.pop()
            if connection.transport is not None and self.loop.time() - since_s < REUSE_WITHIN_S:
                return connection
            self._drop_idle()
            connection.close()
        return Connection(self.host, self.port)

    def _drop_idle(self) -> None:
        for _, connection in self.idle:
            connection.close()
        self.idle.clear()

    def abandon(self, started: bool) -> int:
        """Closes what is under way: all of it with `started`, else only replies without a first event."""
        victims = [c for c in self.busy if started or (c.reply is not None and not c.reply.events)]
        for connection in victims:
            connection.close()
        return len(victims)

    def close(self) -> None:
        """Drops every connection, whatever is on it."""
        self.abandon(started=True)
        self._drop_idle()
