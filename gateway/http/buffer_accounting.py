"""What does one connection hold of a request that is not there whole? Counted where it may be too much.

A body is counted on all connections together, for its tenant and from its address. A head is counted from its address,
while nobody has shown a key on the connection.
"""

from __future__ import annotations

from gateway.http.accounts import Account
from gateway.http.addresses import household
from gateway.http.errors import ApiError, Reason
from gateway.http.http_request import HttpRequest
from gateway.http.server_state import BUSY_RETRY_S, ServerState


class BufferAccounting:
    """The bytes of one connection. Who holds too many gets an `ApiError`, and they are counted until released."""

    __slots__ = ("_head_bytes", "_request", "_server", "body_bytes")

    def __init__(self, server: ServerState) -> None:
        self._server = server
        self._head_bytes = 0
        self.body_bytes = 0
        """Held of a body."""
        self._request: HttpRequest | None = None
        """Whose body it is."""

    def hold_head(self, address: Account, head_bytes: int) -> None:
        """So much is there of a head from this address: of all together it may be as much as the largest one."""
        address.heads_bytes += head_bytes - self._head_bytes
        self._head_bytes = head_bytes
        if head_bytes and address.heads_bytes > self._server.limits.header_bytes_max:
            message = "Your address is sending too many unfinished headers at once: send each of them whole."
            raise ApiError(Reason.TOO_MANY_AT_ONCE, message, retry_after_s=BUSY_RETRY_S)

    def hold_body(self, request: HttpRequest, body_bytes: int) -> None:
        """So much is there of the body of this request."""
        server = self._server
        more_bytes = body_bytes - self.body_bytes
        self._request, self.body_bytes = request, body_bytes
        server.bodies_bytes += more_bytes
        try:
            if request.tenant:
                server.tenants.hold(request.tenant, more_bytes)
        finally:
            server.addresses.hold(household(request.client), more_bytes)
        if server.bodies_bytes > server.limits.bodies_bytes_max:
            message = "The server is receiving too many large requests: try again."
            raise ApiError(Reason.SERVER_BUSY, message, retry_after_s=BUSY_RETRY_S)

    def release_body(self) -> None:
        """An engine has it and answers, or it is dropped."""
        request, self._request = self._request, None
        if request is None:
            return
        held_bytes, self.body_bytes = self.body_bytes, 0
        server = self._server
        server.bodies_bytes -= held_bytes
        if request.tenant:
            server.tenants.release(request.tenant, held_bytes)
        server.addresses.release(household(request.client), held_bytes)
