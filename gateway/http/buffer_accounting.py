"""Bytes that one connection holds of a request until its answer begins, counted against the bounds of its client.

A body is counted for its tenant and for its address, over all connections. A head is counted for its address, until a
key has been shown on the connection.
"""

from __future__ import annotations

from gateway.http.accounts import Account
from gateway.http.addresses import household
from gateway.http.errors import ApiError, Reason
from gateway.http.http_request import HttpRequest
from gateway.http.server_state import BUSY_RETRY_S, ServerState


class BufferAccounting:
    """The bytes held by one connection. Bytes beyond a bound raise an `ApiError` and stay counted until released."""

    __slots__ = ("_head_bytes", "_request", "_server", "body_bytes")

    def __init__(self, server: ServerState) -> None:
        self._server = server
        self._head_bytes = 0
        self.body_bytes = 0
        self._request: HttpRequest | None = None

    def hold_head(self, address: Account, head_bytes: int) -> None:
        """Set the bytes held of a head from this address. Raise ApiError if all unfinished heads of the address
        together exceed the largest permitted head."""
        address.heads_bytes += head_bytes - self._head_bytes
        self._head_bytes = head_bytes
        if head_bytes and address.heads_bytes > self._server.limits.header_bytes_max:
            message = "Your address is sending too many unfinished headers at once: send each of them whole."
            raise ApiError(Reason.TOO_MANY_AT_ONCE, message, retry_after_s=BUSY_RETRY_S)

    def hold_body(self, request: HttpRequest, body_bytes: int) -> None:
        """Set the bytes held of this request's body. Raise ApiError if its tenant, its address or the server holds too
        many."""
        server = self._server
        more_bytes = body_bytes - self.body_bytes
        self._request, self.body_bytes = request, body_bytes
        server.bodies_bytes += more_bytes
        try:
            if request.tenant:
                server.tenants.hold(request.tenant, more_bytes)
        finally:
            server.addresses.hold(household(request.client), more_bytes)
        if more_bytes > 0 and server.bodies_bytes > server.limits.bodies_bytes_max:
            message = "The server is receiving too many large requests: try again."
            raise ApiError(Reason.SERVER_BUSY, message, retry_after_s=BUSY_RETRY_S)

    def release_body(self) -> None:
        """Release the body, since an engine answers or the request is dropped."""
        if self._request is not None:
            self.hold_body(self._request, 0)
            self._request = None
