"""The tenants' listener: HTTP/1.1 with no task per request, since whatever runs here runs for every token.

A connection reads one request, hands it to the handler with a `Responder`, and reads on when the answer has ended. All
timers are one sweep per second over the connections.
"""

from __future__ import annotations

import asyncio
import heapq
import secrets
from collections.abc import Sequence
from socket import socket
from typing import Any, Final, cast

from backends.client.outbox import Outbox
from gateway.http.accounts import Account, Accounts
from gateway.http.addresses import TrustedProxies, household
from gateway.http.connection import Connection, Handler, HeadHook, RefusedHook
from gateway.http.errors import ApiError, Reason
from gateway.http.holding import BUSY_RETRY_S
from gateway.http.limits import ServerLimits
from gateway.http.request import HttpRequest
from gateway.http.responder import Responder
from gateway.http.sockets import waiting_connections
from gateway.http.tls.certificates import Certificates
from gateway.http.tls.protocol import TlsProtocol

__all__ = ["Handler", "HeadHook", "HttpRequest", "HttpServer", "RefusedHook", "Responder", "ServerLimits"]

_SWEEP_S: Final = 1.0
_BACKLOG: Final = 1024
_IDLEST: Final = 256
"""How many are found at once when room is needed, since to find them takes a look at all."""
_LOOKS: Final = 16
"""How often between two sweeps, however many come."""


class HttpServer:
    """Serves `handler` on any number of addresses. One per process and event loop."""

    def __init__(
        self,
        handler: Handler,
        *,
        limits: ServerLimits,
        on_head: HeadHook | None = None,
        on_refused: RefusedHook | None = None,
        proxies: TrustedProxies | None = None,
        certificates: Certificates | None = None,
    ) -> None:
        """`certificates`: TLS is spoken on every address, and only TLS."""
        self.handler = handler
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
        self._answers: dict[Connection, int] = {}
        """What clients that read too slowly have not taken of their answers, in bytes."""
        self._answers_bytes = 0
        self._certificates = certificates
        self._listeners: list[asyncio.Server] = []
        self._arriving: set[asyncio.Task[Any]] = set()
        self._connections: dict[Connection | TlsProtocol, None] = {}  # by age
        self._idlest: list[tuple[float, Connection | TlsProtocol]] = []
        """Found when room was needed; the idlest is the last."""
        self._looks_left = _LOOKS
        self._timer: asyncio.TimerHandle | None = None
        self._all_gone = asyncio.Event()
        self._id_prefix = f"req_{secrets.token_hex(6)}"
        self._requests = 0

    def __repr__(self) -> str:
        state = "stopping" if self.stopping else "serving"
        return f"<HttpServer {state}, {len(self._connections)} connections>"

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._connections)

    def set(self, limits: ServerLimits, proxies: TrustedProxies) -> None:
        """From now on these hold: for connections that are open, only what is counted on all of them."""
        self.limits = limits
        self.proxies = proxies
        for accounts in (self.tenants, self.addresses):
            accounts.set(limits.client_connections_max, limits.client_bodies_bytes_max)

    async def listen(self, host: str, port: int, *, sock: socket | None = None) -> int:
        """Listen on an address and return its port (chosen by the system if `port` is 0). OSError if it is taken.

        `sock`: one that listens already, instead.
        """
        self.loop = asyncio.get_running_loop()
        if self._timer is None:
            self._sweep()
        where: dict[str, Any] = {"host": host, "port": port} if sock is None else {"sock": sock}
        listener = await self.loop.create_server(self._accepted, backlog=_BACKLOG, **where)
        self._listeners.append(listener)
        sockets: Sequence[socket] = cast(Any, listener).sockets  # a tuple for asyncio, a list for uvloop
        return int(sockets[0].getsockname()[1])

    def _accepted(self) -> Connection | TlsProtocol:
        if self._certificates is None:
            return Connection(self)
        return TlsProtocol(self, self._certificates.context)

    def next_request_id(self) -> str:
        """An id that no other request has: this process by its prefix, the request by its number."""
        self._requests += 1
        return f"{self._id_prefix}{self._requests}"

    def unread_request(self, peer: str, path: str = "") -> HttpRequest:
        """Stands for a request of which no more is known than who sent it, and perhaps its path."""
        request = HttpRequest("", b"", path, b"", [], b"", "1.1", peer)
        request.id = self.next_request_id()
        return request

    def stop_accepting(self) -> None:
        """Take no new connections, and tell the clients of open ones, with their next answer, to go elsewhere.

        What the kernel has accepted is taken first: it may hold a request, which a proxy must not send again.
        """
        self.stopping = True
        for listener in self._listeners:
            sockets: Sequence[socket] = cast(Any, listener).sockets
            for accepted in [each for one in sockets for each in waiting_connections(one.fileno())]:
                taken = self.loop.create_task(self.loop.connect_accepted_socket(self._accepted, accepted))
                self._arriving.add(taken)
                taken.add_done_callback(self._arriving.discard)
            listener.close()
        self._listeners.clear()

    def awaits_requests(self) -> bool:
        """Is there a connection on which a request has not come yet, or not whole?"""
        return bool(self._arriving) or any(connection.is_asking() for connection in self._connections)

    def close_idle(self) -> None:
        """Close the connections that were asked, and serve no request."""
        for connection in list(self._connections):
            if not connection.is_asking():
                connection.close_if_idle()

    async def close(self, deadline_s: float) -> None:
        """Let running answers end for at most `deadline_s`, then cut what is left."""
        self.stop_accepting()
        if self._arriving:
            await asyncio.wait(self._arriving)
        for connection in list(self._connections):
            connection.close_if_idle()
        await self._wait_until_empty(deadline_s)
        for connection in list(self._connections):
            connection.cut()
        await self._wait_until_empty(_SWEEP_S)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _wait_until_empty(self, limit_s: float) -> None:
        self._all_gone.clear()
        if self._connections:
            try:
                await asyncio.wait_for(self._all_gone.wait(), limit_s)
            except TimeoutError:
                pass

    def admit(self, connection: Connection | TlsProtocol, peer: str) -> Account | None:
        """Count a new connection; the account is its address's, None for a proxy's. ApiError: there is no room for it.

        The one that has been idle for longest may have to go.
        """
        self._connections[connection] = None
        if not (len(self._connections) <= self.limits.connections_max or self._make_room()):
            raise ApiError(Reason.SERVER_BUSY, "Too many connections.", retry_after_s=BUSY_RETRY_S)
        return None if self.proxies.trusts(peer) else self.addresses.connect(household(peer))

    def _make_room(self) -> bool:
        if not self._idlest and self._looks_left:
            self._looks_left -= 1
            idle = [(since, c) for c in list(self._connections)[:-1] if (since := c.idle_since()) <= self.now]
            self._idlest = heapq.nsmallest(_IDLEST, idle, key=_since)
            self._idlest.reverse()
        while self._idlest:
            since, connection = self._idlest.pop()
            if connection in self._connections and connection.idle_since() == since:
                connection.make_room()
                return True
        return False

    def forget(self, connection: Connection | TlsProtocol, account: Account | None) -> None:
        """For a lost connection, with the account that it had."""
        if account is not None:
            self.addresses.disconnect(account)
        self._connections.pop(connection, None)
        if not self._connections:
            self._all_gone.set()

    def holds_answer(self, connection: Connection, unsent_bytes: int) -> None:
        """So much waits for the client of this connection. If all of it is too much, one of the tenant that has most is
        cut off."""
        self._answers_bytes += unsent_bytes - self._answers.pop(connection, 0)
        if unsent_bytes:
            self._answers[connection] = unsent_bytes
            if self._answers_bytes > self.limits.answers_bytes_max:
                self.loop.call_soon(self._most_unsent().cut)

    def _most_unsent(self) -> Connection:
        of_tenants: dict[str, int] = {}
        for each, held_bytes in self._answers.items():
            of_tenants[each.tenant] = of_tenants.get(each.tenant, 0) + held_bytes
        most = max(of_tenants, key=of_tenants.__getitem__)
        return max([each for each in self._answers if each.tenant == most], key=self._answers.__getitem__)

    def _sweep(self) -> None:
        self.now = now = self.loop.time()
        self._looks_left = _LOOKS
        for connection in [c for c in self._connections if c.deadline <= now]:
            connection.expire()
        self._timer = self.loop.call_later(_SWEEP_S, self._sweep)


def _since(idle: tuple[float, Connection | TlsProtocol]) -> float:
    return idle[0]
