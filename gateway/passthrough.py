"""How does a request that needs no admission reach an engine? Straight, and its answer comes back as it is."""

from __future__ import annotations

from backends.errors import UpstreamError
from backends.sse import Dialect
from backends.upstream import Call
from gateway.http.errors import ApiError, Reason
from gateway.http.headers import forward_response_headers
from gateway.http.responder import Responder
from gateway.pool import Backend

__all__ = ["PassThrough"]


class PassThrough:
    """One request and its answer, relayed (implements `Receiver`)."""

    def __init__(self, responder: Responder, dialect: Dialect, request_id: str, backend: Backend) -> None:
        self._responder = responder
        self._dialect = dialect
        self._request_id = request_id.encode()
        self._backend = backend
        self._call: Call | None = None
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []

    def send(self, head: bytes, body: bytes) -> None:
        responder = self._responder
        call = self._call = self._backend.upstream.send(head, body, self)
        responder.on_disconnect = call.cancel
        responder.on_pause = call.pause
        responder.on_resume = call.resume

    def head_received(self, status: int, reason: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self._status = status
        self._headers = [*forward_response_headers(headers), (b"x-request-id", self._request_id)]

    def body_received(self, data: bytes) -> None:
        if self._responder.started:
            self._responder.write(data)
        else:
            self._responder.start(self._status, self._headers, first=data)

    def completed(self) -> None:
        if self._responder.started:
            self._responder.end()
        else:
            self._responder.respond(self._status, self._headers, b"")

    def failed(self, error: UpstreamError) -> None:
        self._backend.broke(error)
        if self._responder.started:
            self._responder.abort()
            return
        failure = ApiError(Reason.BACKEND_FAILED, "the engine did not answer; try again", retry_after_s=1.0)
        headers = [*failure.headers(), (b"x-request-id", self._request_id)]
        self._responder.respond(failure.status, headers, failure.body(self._dialect))
