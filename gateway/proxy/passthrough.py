"""How does a request that needs no admission reach an engine? Straight, and its answer comes back, an error as ours.

One whose connection is refused goes to the next engine, as a request from the queue does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from backends.answers.sse import Dialect
from backends.client.upstream import UpstreamCall
from backends.errors import ProtocolViolation, ReadTimedOut, UpstreamError
from gateway.http.errors import ApiError, Reason
from gateway.http.headers import forward_response_headers
from gateway.http.responder import Responder
from gateway.pool.backend import Backend
from gateway.pool.pool import Pool
from gateway.proxy.ending import Ending
from gateway.proxy.engine_errors import ERROR_BODY_BYTES_MAX, engine_error, outcome_of
from gateway.proxy.refusals import failure_error
from gateway.request.body.payload import Payload
from gateway.telemetry.record import Outcome, RequestRecord
from policies.request import ServiceTokens

__all__ = ["PassThrough", "engines_of"]


class PassThrough:
    """One request and its answer, relayed (implements `Receiver`). `settled` hears of its end, once."""

    def __init__(
        self,
        responder: Responder,
        dialect: Dialect,
        engines: Iterator[Backend],
        record: RequestRecord,
        settled: Callable[[RequestRecord], None],
    ) -> None:
        self._responder = responder
        self._dialect = dialect
        self._engines = engines
        self._backend = next(engines)
        self._record = record
        self._settled = settled
        self._call: UpstreamCall | None = None
        self._ending = Ending([])
        self._head = b""
        self._payload: Payload | None = None
        """What is sent, until an engine answers."""
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._error: bytes | None = None
        """What has come of an answer that is an error; None: it is none."""

    def send(self, head: bytes, payload: Payload | None) -> None:
        self._head, self._payload = head, payload
        responder = self._responder
        self._record.dispatched(self._backend.name, time.monotonic())
        call = self._call = self._backend.send(head, payload, self._record.tenant, self)
        responder.on_disconnect = self._client_gone
        responder.on_pause = call.pause
        responder.on_resume = call.resume

    def head_received(self, status: int, reason: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self._head, self._payload = b"", None
        self._status = status
        self._headers = [*forward_response_headers(headers), self._request_id()]
        self._ending = Ending(headers)
        if status >= 300 and status != 304:  # that one says that the client's copy still holds
            self._error = b""

    def body_received(self, data: bytes) -> None:
        if self._error is not None:
            self._error += data
            if len(self._error) > ERROR_BODY_BYTES_MAX and self._call is not None:
                self._call.cancel()
                self._fail_with_error(b"")
            return
        self._ending.come(data)
        if self._responder.started:
            self._responder.write(data)
        else:
            self._responder.start(self._status, self._headers, first=data)

    def completed(self) -> None:
        if self._error is not None:
            self._fail_with_error(self._error)
            return
        if self._ending.is_missing:
            what = "ended an answer before its end"
            self.failed(ProtocolViolation(self._backend.name, what, before_first_byte=False))
            return
        if self._responder.started:
            self._responder.end()
        else:
            self._responder.respond(self._status, self._headers, b"")
        self._end(Outcome.COMPLETED, "")

    def _fail_with_error(self, body: bytes) -> None:
        error = engine_error(self._backend.name, self._status, body)
        self._respond_error(error)
        self._end(outcome_of(error), f"status_{self._status}")

    def _respond_error(self, error: ApiError) -> None:
        headers = [*error.headers(), self._request_id()]
        self._responder.respond(error.status, headers, error.body(self._dialect))

    def failed(self, error: UpstreamError) -> None:
        self._backend.broke(error)
        assert self._call is not None
        other = None if self._call.sends else next(self._engines, None)
        if other is not None:
            self._backend = other
            self.send(self._head, self._payload)
            return
        timed_out = isinstance(error, ReadTimedOut)
        reason = Reason.BACKEND_TIMEOUT if timed_out else Reason.BACKEND_FAILED
        if self._responder.started:
            self._responder.abort()
        else:
            request_id, again_s = self._record.request_id, self._backend.again_s
            self._respond_error(failure_error(reason, "the engine did not answer", request_id, again_s))
        self._end(Outcome.FAILED, reason.value)

    def _client_gone(self) -> None:
        assert self._call is not None
        self._call.cancel()
        self._end(Outcome.ABANDONED, "client_disconnected")

    def _end(self, outcome: str, reason: str) -> None:
        responder = self._responder
        responder.on_disconnect = responder.on_pause = responder.on_resume = None
        self._record.ended(outcome, reason, ServiceTokens(0, 0), 0, time.monotonic())
        self._settled(self._record)

    def _request_id(self) -> tuple[bytes, bytes]:
        return b"x-request-id", self._record.request_id.encode()


def engines_of(pools: Sequence[Pool]) -> Iterator[Backend]:
    """Those in service: of each pool the least loaded first, as it is when it is asked for."""
    tried: set[str] = set()
    for pool in pools:
        while (backend := pool.least_loaded(tried)) is not None:
            tried.add(backend.name)
            yield backend
