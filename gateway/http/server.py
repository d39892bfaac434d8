"""The tenants' listener: HTTP/1.1 without a task per request, since this code runs for every token.

A connection reads one request, hands it to the handler with a `Responder`, and reads on when the answer has ended. One
sweep per second over the connections serves as all of their timers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from socket import socket
from typing import Any, Final, cast

from gateway.http.connection import Connection
from gateway.http.server_state import ServerState
from gateway.http.sockets import listener_of_all_families, waiting_connections
from gateway.http.tls.certificates import Certificates
from gateway.http.tls.protocol import TlsProtocol

_SWEEP_S: Final = 1.0
_BACKLOG: Final = 1024


class HttpServer:
    """The listener of one process and event loop, at any number of addresses."""

    def __init__(self, state: ServerState, certificates: Certificates | None = None) -> None:
        """Create a server without addresses. With `certificates` every address takes TLS only."""
        self.state = state
        self._certificates = certificates
        self._listeners: list[asyncio.Server] = []
        self._arriving: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def listen(self, host: str, port: int, *, sock: socket | None = None) -> int:
        """Listen on an address and return its port, which the system chooses if `port` is 0. Raise OSError if it is
        taken.

        `sock`: a socket that already listens, used in place of the address.
        """
        self.state.loop = asyncio.get_running_loop()
        if self._timer is None:
            self._sweep()
        sock = sock or listener_of_all_families(host, port)
        where: dict[str, Any] = {"host": host, "port": port} if sock is None else {"sock": sock}
        listener = await self.state.loop.create_server(self._accepted, backlog=_BACKLOG, **where)
        self._listeners.append(listener)
        sockets: Sequence[socket] = cast(Any, listener).sockets  # a tuple for asyncio, a list for uvloop
        return int(sockets[0].getsockname()[1])

    def _accepted(self) -> Connection | TlsProtocol:
        if self._certificates is None:
            return Connection(self.state)
        return TlsProtocol(self.state, self._certificates.context)

    def stop_accepting(self) -> None:
        """Take no new connections, and close open ones after their next answer, so that their clients go elsewhere.

        Connections that the kernel has accepted are taken first: one may hold a request, which a proxy must not send
        again.
        """
        self.state.stopping = True
        for listener in self._listeners:
            sockets: Sequence[socket] = cast(Any, listener).sockets
            for accepted in [each for one in sockets for each in waiting_connections(one.fileno())]:
                taken = self.state.loop.create_task(self.state.loop.connect_accepted_socket(self._accepted, accepted))
                self._arriving.add(taken)
                taken.add_done_callback(self._arriving.discard)
            listener.close()
        self._listeners.clear()

    def awaits_requests(self, *, has_begun: bool = False) -> bool:
        """Return whether a connection waits for a request, for the rest of one, or for the end of an answer.

        `has_begun`: count only connections on which a part of a request has come.
        """
        connections = self.state.connections
        if any(connection.has_begun() for connection in connections):
            return True
        return not has_begun and (bool(self._arriving) or any(connection.is_asking() for connection in connections))

    def close_idle(self) -> None:
        """Close the connections that wait for a further request."""
        for connection in list(self.state.connections):
            if not connection.is_asking():
                connection.close_if_idle()

    async def close(self, deadline_s: float) -> None:
        """Let running answers end for at most `deadline_s`, then abort the rest."""
        self.stop_accepting()
        if self._arriving:
            await asyncio.wait(self._arriving)
        for connection in list(self.state.connections):
            connection.close_if_idle()
        await self._wait_until_empty(deadline_s)
        for connection in list(self.state.connections):
            connection.cut()
        await self._wait_until_empty(_SWEEP_S)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _wait_until_empty(self, limit_s: float) -> None:
        self.state.all_gone.clear()
        if self.state.connections:
            try:
                await asyncio.wait_for(self.state.all_gone.wait(), limit_s)
            except TimeoutError:
                pass

    def _sweep(self) -> None:
        self.state.sweep()
        self._timer = self.state.loop.call_later(_SWEEP_S, self._sweep)
