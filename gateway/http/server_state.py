"""What do the connections of one server have in common? Limits, hooks and counts; each has it, and it knows them all.

So a connection needs no server, and a server makes connections.
"""

from __future__ import annotations

import asyncio
import heapq
import secrets
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from backends.client.outbox import Outbox
from gateway.http.accounts import Account, Accounts
from gateway.http.addresses import TrustedProxies, household
from gateway.http.errors import ApiError, Reason
from gateway.http.headers import Head, Header
from gateway.http.http_request import HttpRequest
from gateway.http.responder import Responder
from gateway.http.server_limits import ServerLimits

Handler = Callable[[HttpRequest, Responder], None]
HeadHook = Callable[[HttpRequest], tuple[int, list[Header], bytes] | None]
"""Runs when a head is complete, before the body is read; what it returns is the answer, and the body is not read."""
RefusedHook = Callable[[HttpRequest, ApiError], None]
"""Hears of every request that is refused without having come to the handler; of an unreadable one little is known."""

BUSY_RETRY_S: Final = 2.0
_IDLEST: Final = 256
"""How many are found at once when room is needed, since to find them takes a look at all."""
_LOOKS: Final = 16
"""How often between two sweeps, however many come."""


class Held(Protocol):
    """What is held open: a connection, or one that still agrees on TLS."""

    deadline: float

    def idle_since(self) -> float: ...
    def is_asking(self) -> bool: ...
    def expire(self) -> None: ...
    def close_if_idle(self) -> None: ...
    def cut(self) -> None: ...


class SlowReader(Protocol):
    """A connection whose client may take its answer too slowly."""

    tenant: str

    def cut(self) -> None: ...


class ServerState:
    """Of one server."""

    loop: asyncio.AbstractEventLoop
    """Once it listens."""

    def __init__(
        self,
        handler: Handler,
        limits: ServerLimits,
        *,
        on_head: HeadHook | None = None,
        on_refused: RefusedHook | None = None,
        proxies: TrustedProxies | None = None,
        kind: type[HttpRequest] = HttpRequest,
    ) -> None:
        """`kind`: what is made of the head of each request."""
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
        self.connections: dict[Held, None] = {}  # by age
        self.all_gone = asyncio.Event()
        self.answers: dict[SlowReader, int] = {}
        """What clients that read too slowly have not taken of their answers, in bytes."""
        self.answers_bytes = 0
        self._idlest: list[tuple[float, Held]] = []
        """Found when room was needed; the idlest is the last."""
        self._looks_left = _LOOKS
        self._id_prefix = f"req_{secrets.token_hex(6)}"
        self._requests = 0

    def set(self, limits: ServerLimits, proxies: TrustedProxies) -> None:
        """From now on these hold: for connections that are open, only what is counted on all of them."""
        self.limits = limits
        self.proxies = proxies
        for accounts in (self.tenants, self.addresses):
            accounts.set(limits.client_connections_max, limits.client_bodies_bytes_max)

    def next_request_id(self) -> str:
        """An id that no other request has: this process by its prefix, the request by its number."""
        self._requests += 1
        return f"{self._id_prefix}{self._requests}"

    def unread_request(self, peer: str, path: str = "", headers: Sequence[Header] = ()) -> HttpRequest:
        """Stands for a request that was not read: only its sender is known, and perhaps its path and some fields."""
        request = self.kind(peer, Head(path, list(headers)))
        request.id = self.next_request_id()
        return request

    def admit(self, connection: Held, peer: str) -> Account | None:
        """Count a new connection; the account is its address's, None for a proxy's. ApiError: there is no room for it.

        The one that has been idle for longest may have to go.
        """
        self.connections[connection] = None
        if not (len(self.connections) <= self.limits.connections_max or self._make_room()):
            raise ApiError(Reason.SERVER_BUSY, "Too many connections.", retry_after_s=BUSY_RETRY_S)
        return None if self.proxies.trusts(peer) else self.addresses.connect(household(peer))

    def _make_room(self) -> bool:
        if not self._idlest and self._looks_left:
            self._looks_left -= 1
            idle = [(since, c) for c in list(self.connections)[:-1] if (since := c.idle_since()) <= self.now]
            self._idlest = heapq.nsmallest(_IDLEST, idle, key=_since)
            self._idlest.reverse()
        while self._idlest:
            since, connection = self._idlest.pop()
            if connection in self.connections and connection.idle_since() == since:
                connection.cut()
                return True
        return False

    def forget(self, connection: Held, account: Account | None) -> None:
        """For a lost connection, with the account that it had."""
        if account is not None:
            self.addresses.disconnect(account)
        self.connections.pop(connection, None)
        if not self.connections:
            self.all_gone.set()

    def holds_answer(self, connection: SlowReader, unsent_bytes: int) -> None:
        """So much waits for the client of this connection. If all of it is too much, one of the tenant that has most is
        cut off."""
        self.answers_bytes += unsent_bytes - self.answers.pop(connection, 0)
        if unsent_bytes:
            self.answers[connection] = unsent_bytes
            if self.answers_bytes > self.limits.answers_bytes_max:
                self.loop.call_soon(self._most_unsent().cut)

    def _most_unsent(self) -> SlowReader:
        of_tenants: dict[str, int] = {}
        for each, held_bytes in self.answers.items():
            of_tenants[each.tenant] = of_tenants.get(each.tenant, 0) + held_bytes
        most = max(of_tenants, key=of_tenants.__getitem__)
        return max([each for each in self.answers if each.tenant == most], key=self.answers.__getitem__)

    def sweep(self) -> None:
        """All timers of its connections."""
        self.now = now = self.loop.time()
        self._looks_left = _LOOKS
        for connection in [c for c in self.connections if c.deadline <= now]:
            connection.expire()


def _since(idle: tuple[float, Held]) -> float:
    return idle[0]
