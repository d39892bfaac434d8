"""The tenants' listener: HTTP/1.1 without a task per request, since this code runs for every token.

A connection reads one request, hands it to the handler with a `Responder`, and reads on when the answer has ended. One
sweep per second over the connections serves as all of their timers.
"""

from __future__ import annotations

import asyncio
import heapq
import secrets
from collections.abc import Callable, Sequence
from operator import itemgetter
from socket import socket
from typing import Any, Final, Protocol, cast

from backends.client.outbox import Outbox
from gateway.http.accounts import Account, Accounts, ServerLimits
from gateway.http.addresses import TrustedProxies, household
from gateway.http.errors import ApiError, Reason
from gateway.http.headers import Head, Header
from gateway.http.http_request import HttpRequest
from gateway.http.responder import Responder
from gateway.http.sockets import listener_of_all_families, waiting_connections

Handler = Callable[[Any, Responder], None]
"""Called with a whole request, which is of the server's `kind`."""
HeadHook = Callable[[Any], tuple[int, list[Header], bytes] | None]
"""Called when a head is complete, before the body is read. A returned answer is sent, and the body is not read."""
RefusedHook = Callable[[Any, ApiError], None]
"""Called with each request that is refused before the handler. Little is known of an unreadable one."""

BUSY_RETRY_S: Final = 2.0
_IDLEST: Final = 256
"""Idle connections found by one search, since a search looks at all connections."""
_LOOKS: Final = 16
"""Searches between two sweeps at most."""
_SWEEP_S: Final = 1.0
_BACKLOG: Final = 1024


class OpenConnection(Protocol):
    """An open connection, as the state sees it."""

    deadline: float
    tenant: str

    def idle_since(self) -> float: ...
    def is_asking(self) -> bool: ...
    def has_begun(self) -> bool: ...
    def expire(self) -> None: ...
    def close_if_idle(self) -> None: ...
    def cut(self) -> None: ...


class HttpServer:
    """The listener of one process and event loop, at any number of addresses, and what its connections share."""

    loop: asyncio.AbstractEventLoop

    def __init__(
        self,
        accept: Callable[[HttpServer], asyncio.BaseProtocol],
        handler: Handler,
        limits: ServerLimits,
        *,
        on_refused: RefusedHook,
        on_head: HeadHook | None = None,
        proxies: TrustedProxies | None = None,
        kind: type[HttpRequest] = HttpRequest,
    ) -> None:
        """Create a server without addresses. `accept` makes the protocol of a new connection, and `kind` is the class
        of its requests."""
        self._accept = accept
        self._listeners: list[asyncio.Server] = []
        self._arriving: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.handler = handler
        self.kind = kind
        self.limits = limits
        self.on_head = on_head
        self.on_refused = on_refused
        self.proxies = proxies or TrustedProxies()
        self.tenants = Accounts("this tenant", limits.client_connections_max, limits.client_bodies_bytes_max)
        self.addresses = Accounts("your address", limits.client_connections_max, limits.client_bodies_bytes_max)
        self.outbox = Outbox()
        self.stopping = False
        self.now = 0.0
        """The loop's clock at the last sweep: exact enough for timeouts, and free to read."""
        self.bodies_bytes = 0
        self.connections: dict[OpenConnection, None] = {}  # by age
        self.all_gone = asyncio.Event()
        self.answers: dict[OpenConnection, int] = {}
        """Unsent bytes by connection, for clients that read too slowly."""
        self.answers_bytes = 0
        self._idlest: list[tuple[float, OpenConnection]] = []
        """Idle connections found when room was needed, the longest idle last."""
        self._looks_left = _LOOKS
        self._id_prefix = f"req_{secrets.token_hex(6)}"
        self._requests = 0

    # addresses

    async def listen(self, host: str, port: int, *, sock: socket | None = None) -> int:
        """Listen on an address and return its port, which the system chooses if `port` is 0. Raise OSError if it is
        taken.

        `sock`: a socket that already listens, used in place of the address.
        """
        self.loop = asyncio.get_running_loop()
        if self._timer is None:
            self._sweep()
        sock = sock or listener_of_all_families(host, port)
        where: dict[str, Any] = {"host": host, "port": port} if sock is None else {"sock": sock}
        listener = await self.loop.create_server(lambda: self._accept(self), backlog=_BACKLOG, **where)
        self._listeners.append(listener)
        sockets: Sequence[socket] = cast(Any, listener).sockets  # a tuple for asyncio, a list for uvloop
        return int(sockets[0].getsockname()[1])

    def stop_accepting(self) -> None:
        """Take no new connections, and close open ones after their next answer, so that their clients go elsewhere.

        Connections that the kernel has accepted are taken first: one may hold a request, which a proxy must not send
        again.
        """
        self.stopping = True
        for listener in self._listeners:
            sockets: Sequence[socket] = cast(Any, listener).sockets
            for accepted in [each for one in sockets for each in waiting_connections(one.fileno())]:
                taken = self.loop.create_task(self.loop.connect_accepted_socket(lambda: self._accept(self), accepted))
                self._arriving.add(taken)
                taken.add_done_callback(self._arriving.discard)
            listener.close()
        self._listeners.clear()

    def awaits_requests(self, *, has_begun: bool = False) -> bool:
        """Return whether a connection waits for a request, for the rest of one, or for the end of an answer.

        `has_begun`: count only connections on which a part of a request has come.
        """
        connections = self.connections
        if any(connection.has_begun() for connection in connections):
            return True
        return not has_begun and (bool(self._arriving) or any(connection.is_asking() for connection in connections))

    def close_idle(self) -> None:
        """Close the connections that wait for a further request."""
        for connection in list(self.connections):
            if not connection.is_asking():
                connection.close_if_idle()

    async def close(self, deadline_s: float) -> None:
        """Let running answers end for at most `deadline_s`, then abort the rest."""
        self.stop_accepting()
        if self._arriving:
            await asyncio.wait(self._arriving)
        for connection in list(self.connections):
            connection.close_if_idle()
        await self._wait_until_empty(deadline_s)
        for connection in list(self.connections):
            connection.cut()
        await self._wait_until_empty(_SWEEP_S)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _wait_until_empty(self, limit_s: float) -> None:
        self.all_gone.clear()
        if self.connections:
            try:
                await asyncio.wait_for(self.all_gone.wait(), limit_s)
            except TimeoutError:
                pass

    # what connections share

    def set(self, limits: ServerLimits, proxies: TrustedProxies) -> None:
        """Replace limits and proxies. For open connections only the limits that are counted over all connections
        change."""
        self.limits = limits
        self.proxies = proxies
        for accounts in (self.tenants, self.addresses):
            accounts.set(limits.client_connections_max, limits.client_bodies_bytes_max)

    def next_request_id(self) -> str:
        """Return a unique id: the prefix names this process, the number the request."""
        self._requests += 1
        return f"{self._id_prefix}{self._requests}"

    def unread_request(self, peer: str, path: str = "", headers: Sequence[Header] = ()) -> HttpRequest:
        """Return a request object for a request that was not read. Its path and header fields may be unknown."""
        request = self.kind(peer, Head(path, list(headers)))
        request.id = self.next_request_id()
        return request

    def admit(self, connection: OpenConnection, peer: str) -> Account | None:
        """Count a new connection and return the account of its address, None for a trusted proxy.

        If there are too many connections, the longest idle one is closed. Raise ApiError if none is idle, or if the
        address has too many.
        """
        self.connections[connection] = None
        if not (len(self.connections) <= self.limits.connections_max or self._make_room()):
            raise ApiError(Reason.SERVER_BUSY, "Too many connections.", retry_after_s=BUSY_RETRY_S)
        return None if self.proxies.trusts(peer) else self.addresses.connect(household(peer))

    def _make_room(self) -> bool:
        """Close the connection that has been idle longest. Return whether there was one."""
        if not self._idlest and self._looks_left:
            self._looks_left -= 1
            idle = [(since, c) for c in list(self.connections)[:-1] if (since := c.idle_since()) <= self.now]
            self._idlest = heapq.nsmallest(_IDLEST, idle, key=itemgetter(0))
            self._idlest.reverse()
        while self._idlest:
            since, connection = self._idlest.pop()
            if connection in self.connections and connection.idle_since() == since:
                connection.cut()
                return True
        return False

    def forget(self, connection: OpenConnection, account: Account | None) -> None:
        """Forget a lost connection and its account."""
        if account is not None:
            self.addresses.disconnect(account)
        self.connections.pop(connection, None)
        if not self.connections:
            self.all_gone.set()

    def holds_answer(self, connection: OpenConnection, unsent_bytes: int) -> None:
        """Set the unsent bytes of a connection. If the sum over all connections exceeds its bound, abort the largest
        connection of the tenant with most unsent bytes."""
        self.answers_bytes += unsent_bytes - self.answers.pop(connection, 0)
        if unsent_bytes:
            self.answers[connection] = unsent_bytes
            if self.answers_bytes > self.limits.answers_bytes_max:
                self.loop.call_soon(self._most_unsent().cut)

    def _most_unsent(self) -> OpenConnection:
        """Return the slow reader with most unsent bytes, of the tenant with most."""
        of_tenants: dict[str, int] = {}
        for each, held_bytes in self.answers.items():
            of_tenants[each.tenant] = of_tenants.get(each.tenant, 0) + held_bytes
        most = max(of_tenants, key=of_tenants.__getitem__)
        return max([each for each in self.answers if each.tenant == most], key=self.answers.__getitem__)

    def _sweep(self) -> None:
        """Expire the connections whose deadline has passed, every `_SWEEP_S`."""
        self.now = now = self.loop.time()
        self._looks_left = _LOOKS
        for connection in [c for c in self.connections if c.deadline <= now]:
            connection.expire()
        self._timer = self.loop.call_later(_SWEEP_S, self._sweep)
