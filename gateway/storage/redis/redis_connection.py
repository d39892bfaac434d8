"""A connection to Redis for the keys of one hash tag: one command at a time, one attempt each.

A Cluster node that lacks the keys names the right node (MOVED). The connection follows, so it needs no map of the
slots.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections.abc import Callable, Sequence
from typing import Any

from redis._parsers import _AsyncHiredisParser
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    InvalidResponse,
    MovedError,
    NoScriptError,
    ResponseError,
)

from gateway.storage.in_time import finish_in_time
from gateway.storage.store_errors import StoreError, StoreRefused, StoreUnavailable
from policies.replicas.schedule import DEADLINE_S

Argument = str | bytes | int

CONNECT_S = 1.0
"""Timeout of a new connection, with TLS and authentication."""
PAUSE_S = 0.05
PAUSE_S_MAX = 1.0
"""Longest pause after failures. The pause doubles with each failure, and ends with the first success."""
MOVES_MAX = 3
"""Nodes that one command may be sent on to."""
NODES_MAX = 16
WAITING_MAX = 16
"""Commands that wait for the connection. Only callers that gave up and called again exceed it."""
SILENT_S = 5.0
"""Silence after which a subscription is probed; after as long again it is given up."""
PUBLISHED_BYTES_MAX = 16 << 20
"""Bound on one message of other gateways. The last `ENDS_MAX` ended requests with the longest names are below it."""

_PASSES = {
    "LOADING", "BUSY", "OOM", "MISCONF", "NOREPLICAS", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "ASK", "MOVED",
    "UNKILLABLE", "NOSCRIPT",
}  # fmt: skip
"""Error codes that are temporary, or that are fixed in Redis alone."""
_PASSWORD = "the url should hold its user and password: redis://USER:${REDIS_PASSWORD}@HOST:PORT"
_ADVICE = {
    "WRONGPASS": _PASSWORD,
    "NOAUTH": _PASSWORD,
    "NOPERM": "its user needs ~fairgate:* &fairgate:* +info +eval +evalsha +@read +@write +time +publish +subscribe",
    "READONLY": "it is a replica of another Redis: give the address of the primary",
    "WRONGTYPE": "something else has written keys that begin with fairgate: give another database",
    "UNSOUND": "restart this gateway: it has counted what cannot be",
}
"""Advice to the operator, by error code."""
_CODE = re.compile(r"(?:^|[-\s])([A-Z]{3,})\b")

_DENIED = re.compile(r"(?i)user executing the script can't|no permissions to")
_IN_SCRIPT = re.compile(r" script: [0-9a-f]{40}, on @.*")

Node = tuple[str, int]


class _BoundedParser(_AsyncHiredisParser):
    """A parser that holds at most `PUBLISHED_BYTES_MAX` of an answer, since published messages may have any size."""

    async def read_from_socket(self) -> bool:
        await super().read_from_socket()  # type: ignore[no-untyped-call]
        if self._reader.len() > PUBLISHED_BYTES_MAX:  # type: ignore[attr-defined]
            raise ConnectionError(f"publishes more than {PUBLISHED_BYTES_MAX} bytes at once")
        return True


class RedisConnection:
    """A connection to the server that has the keys of one tag."""

    def __init__(self, url: str, where: str) -> None:
        """Create a closed connection. `where` is the URL without its password, for messages."""
        self.where = where
        self.fault: str | None = None
        self.answered = 0
        self.failed = 0
        self._options: dict[str, Any] = dict(parse_url(url))
        self.database = int(self._options.get("db", 0))
        """Number of the database. Channels, unlike keys, are common to all databases of a server."""
        self._kind: type[AbstractConnection] = self._options.pop("connection_class", Connection)
        self._configured_node: Node = (self._options.get("host", "localhost"), self._options.get("port", 6379))
        self._nodes = [self._configured_node]
        """Servers that may have the keys: the URL's server, and servers that it has named."""
        self._at = 0
        self._connection: AbstractConnection | None = None
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._pause_s = 0.0
        self._again_s = float("-inf")

    async def ask(self, *words: Argument, otherwise: Sequence[Argument] | None = None) -> Any:
        """Send a command and return the answer; `otherwise` is sent if the server does not know the script.

        Raise StoreUnavailable, or StoreRefused for a permanent error. The call must not be cancelled.
        """
        if self._waiting >= WAITING_MAX:
            raise StoreUnavailable(f"{self.where}: {WAITING_MAX} commands wait already")
        self._waiting += 1
        try:
            async with self._lock:
                if asyncio.get_running_loop().time() < self._again_s:
                    raise StoreUnavailable(self.fault or self.where)
                answer = await self._attempt(words, otherwise)
        finally:
            self._waiting -= 1
        self.fault, self._pause_s = None, 0.0
        self.answered += 1
        return answer

    async def tls_mismatch(self) -> str | None:
        """Return advice if exactly one side speaks TLS, otherwise None."""
        if "path" in self._options:
            return None
        expects_tls = issubclass(self._kind, SSLConnection)
        options: dict[str, Any] = {}
        if not expects_tls:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            options = {"ssl": context, "ssl_handshake_timeout": CONNECT_S}
        try:
            async with asyncio.timeout(2 * CONNECT_S):
                reader, writer = await asyncio.open_connection(*self._configured_node, **options)
                try:
                    writer.write(b"PING\r\n")
                    answers = await reader.read(1) in (b"+", b"-")
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return None
        if not answers:
            return None
        if expects_tls:
            return "does not speak TLS; write redis:// instead of rediss://"
        return "expects TLS; write rediss:// instead of redis://"

    def check_files(self) -> None:
        """Raise StoreRefused if the URL's certificate files are unusable."""
        if not issubclass(self._kind, SSLConnection):
            return
        try:
            self._new_connection(self._configured_node).ssl_context.get()  # type: ignore[attr-defined]
        except OSError as error:
            files = ", ".join([str(self._options[name]) for name in _FILES if name in self._options])
            raise StoreRefused(f"{self.where}: cannot use the files of its url ({files}): {error}") from error

    async def subscribe(self, channel: str, received: Callable[[bytes], None]) -> None:
        """Receive a channel's messages on a separate connection until cancelled. Raise StoreError when the connection
        ends."""
        connection = self._new_connection(self._configured_node, parser_class=_BoundedParser)
        try:
            async with asyncio.timeout(CONNECT_S):
                await connection.connect()  # type: ignore[no-untyped-call]
                await connection.send_command("SUBSCRIBE", channel)
            await _listen(connection, channel, received)
        except Exception as error:  # an invalid answer can raise anything in redis-py
            raise self._failure(error) from error
        finally:
            await connection.disconnect(nowait=True)

    def _failure(self, error: Exception) -> StoreError:
        """Return the typed error of a failure, with advice if the failure is permanent."""
        text, advice = _described(error)
        what = f"{self.where}: {text}"
        return StoreUnavailable(what) if advice is None else StoreRefused(f"{what}; {advice}")

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.disconnect(nowait=True)
            self._connection = None

    async def _attempt(self, words: Sequence[Argument], otherwise: Sequence[Argument] | None) -> Any:
        """Send a command, or `otherwise` if the server does not have its script, and return the answer.

        After a failure, pause longer each time and go to the next node. Raise StoreError.
        """
        try:
            try:
                return await self._answer(words)
            except NoScriptError:
                if otherwise is None:
                    raise
                return await self._answer(otherwise)
        except Exception as error:  # an invalid answer can raise anything in redis-py
            failure = self._failure(error)
            self.fault = f"{self.where}: {_described(error)[0]}"
            self.failed += 1
            self._pause_s = min(max(PAUSE_S, 2 * self._pause_s), PAUSE_S_MAX)
            self._again_s = asyncio.get_running_loop().time() + self._pause_s
            if self._connection is not None:
                await self._connection.disconnect(nowait=True)
            self._use_node((self._at + 1) % len(self._nodes))
            raise failure from error

    async def _answer(self, words: Sequence[Argument]) -> Any:
        """Send a command and return the answer, following MOVED to the server that has the keys."""
        for _ in range(MOVES_MAX):
            connection = await self._connected()
            try:
                return await finish_in_time(_run_command(connection, words), DEADLINE_S)
            except MovedError as moved:
                await connection.disconnect(nowait=True)
                self._follow(moved)
        raise ConnectionError(f"sent from node to node {MOVES_MAX} times")

    async def _connected(self) -> AbstractConnection:
        """Return an open connection to the present server."""
        if self._connection is None:
            self._connection = self._new_connection(self._nodes[self._at])
        connection = self._connection
        if connection.is_connected and await connection.can_read():
            await connection.disconnect(nowait=True)  # closed by the server while idle
        if not connection.is_connected:
            await finish_in_time(connection.connect(), CONNECT_S, "connection")  # type: ignore[no-untyped-call]
        return connection

    def _new_connection(self, node: Node, **more: Any) -> AbstractConnection:
        """Return a connection to a server, not yet open."""
        options = {**self._options, **more, "retry": Retry(NoBackoff(), 0), "protocol": 2, "driver_info": None}
        if "path" not in options:
            options["host"], options["port"] = node
        return self._kind(**options, socket_timeout=None, socket_connect_timeout=None)

    def _follow(self, moved: MovedError) -> None:
        node = (moved.host or self._nodes[self._at][0], int(moved.port))
        if node not in self._nodes:
            self._nodes = [self._configured_node, *self._nodes[1:][-NODES_MAX:], node]
        self._use_node(self._nodes.index(node))

    def _use_node(self, at: int) -> None:
        """Use the server at this place of `_nodes` from the next command on."""
        if at != self._at:
            self._at, self._connection = at, None


async def _run_command(connection: AbstractConnection, words: Sequence[Argument]) -> Any:
    await connection.send_command(*words)
    return await connection.read_response()


async def _listen(connection: AbstractConnection, channel: str, received: Callable[[bytes], None]) -> None:
    while True:
        try:
            kind, *_, content = await _next_message(connection)
        except TimeoutError:
            await connection.send_command("SUBSCRIBE", channel)
            kind, *_, content = await _next_message(connection)
        if kind == b"message":
            received(content)


async def _next_message(connection: AbstractConnection) -> Any:
    async with asyncio.timeout(SILENT_S):
        return await connection.read_response(disconnect_on_error=False)


_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


def _described(error: BaseException) -> tuple[str, str | None]:
    """Return the error in words, and what an operator has to do, or None for a temporary error."""
    cause = error.__context__ if isinstance(error, ConnectionError) else error
    if isinstance(cause, ssl.SSLCertVerificationError):
        advice = "name the certificate of its authority in the url: rediss://HOST:PORT?ssl_ca_certs=FILE"
        return f"its certificate is not trusted: {cause.verify_message}", advice
    if isinstance(cause, ssl.SSLError):
        advice = "does it speak this version of TLS, and take this certificate?"
        return f"TLS failed: {cause.reason or cause}", advice
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return os.strerror(cause.errno), None
    if isinstance(cause, InvalidResponse):
        return "answers something that is not Redis's protocol", "is it the right port?" if cause is error else None
    text = _IN_SCRIPT.sub("", str(error)) or type(error).__name__
    status, is_answer = getattr(error, "status_code", None) or "", isinstance(error, ResponseError)
    if status or is_answer:
        text = f"answers {status} {text}" if status else f"answers {text}"
    inside = _CODE.search(str(error)) if status in ("", "ERR") else None
    code = status if inside is None else inside[1]
    if _DENIED.search(str(error)):
        code = "NOPERM"
    if isinstance(error, AuthenticationError):
        code = "WRONGPASS"
    is_permanent = is_answer and code not in _PASSES
    return text, _ADVICE.get(code, "is it a Redis, with this database?" if is_permanent else None)
