"""What becomes of a client's request? Authenticate, identify, read, estimate, and hand it to its pool.

Runs synchronously for each request; what is wrong with a request is said here, before anything is queued or charged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from backends.sse import Dialect
from gateway.answer.exchange import Exchange
from gateway.answer.passthrough import PassThrough
from gateway.http.addresses import household
from gateway.http.errors import ApiError, Reason, dialect_of
from gateway.http.headers import bearer_key, forward_request_headers
from gateway.http.request import HttpRequest
from gateway.http.responder import Responder
from gateway.pool.pool import Pool
from gateway.request.cors import Cors
from gateway.request.identity import Keyring, Principal
from gateway.request.payload import Payload, read_json, read_multipart
from gateway.request.routes import Route, Routes, Treatment
from gateway.telemetry.record import Outcome, Record
from policies.request import Flow, Request, ServiceTokens

__all__ = ["Pipeline"]

logger = logging.getLogger("fairgate")

OUTPUT_TOKENS_UNLIMITED: Final = 1 << 20
"""Stands for no limit where the model's context is not known."""
RETRY_WHEN_DRAINING_S: Final = 2.0
CONTEXT_MARGIN: Final = 4
"""A prompt estimated at this many times the context is refused unseen; nearer ones are for the engine to judge."""


class Pipeline:
    """The handler behind the tenants' listener. `settled` hears of the end of every request, with its policy's name."""

    def __init__(
        self,
        keyring: Keyring,
        pools: Iterable[Pool],
        settled: Callable[[Record, str], None],
        *,
        routes: Routes,
        cors: Cors,
        unqueued_max: int,
    ) -> None:
        """`unqueued_max`: requests of one tenant that may pass beside the queue at once."""
        self._keyring = keyring
        self._pools = list(pools)
        self._pool_of_model: dict[str, Pool] = {}
        self._settled = settled
        self._routes = routes
        self._cors = cors
        self._unqueued_max = unqueued_max
        self._unqueued: dict[str, int] = {}
        """By tenant, as long as there are any."""
        self.draining = False

    def authorize(self, request: HttpRequest) -> tuple[int, list[tuple[bytes, bytes]], bytes] | None:
        """Runs when a request's head is there, before its body is read; an answer ends it, and the body is not read."""
        if self._cors.is_on:
            request.answer_fields = self._cors.fields(request)
        try:
            way = request.route = self._routes.find(request.method, request.path)
            if request.body_follows and not way.takes_body:
                raise ApiError(Reason.INVALID_REQUEST, f"{request.method} {request.path} takes no body; send none")
            if way.treatment is Treatment.HEALTH:
                return 200, _json_headers(request), b'{"status":"ok"}'
            if way.treatment is Treatment.OPTIONS:
                allowed = (b"allow", way.methods.encode())
                return 204, [allowed, _request_id(request), *self._cors.preflight(request, way.methods)], b""
            if self.draining:
                message = "this gateway is shutting down and takes no more requests; another one will answer"
                raise ApiError(Reason.DRAINING, message, retry_after_s=RETRY_WHEN_DRAINING_S, should_retry=True)
            principal = self._keyring.principal(bearer_key(request.headers), household(request.client))
        except ApiError as error:
            self.refused(request, error)
            return error.status, _error_headers(error, request), error.body(dialect_of(request.path))
        request.holder = principal
        request.account = principal.tenant
        return None

    def refused(self, request: HttpRequest, error: ApiError) -> None:
        """A request ends before it has come to `handle`."""
        record = _record_of(request)
        record.tenant = request.account
        self._refused(record, error)

    def handle(self, request: HttpRequest, responder: Responder) -> None:
        """Runs when a request is there whole."""
        way = request.route
        assert isinstance(way, Route)
        record = _record_of(request)
        try:
            self._handle(request, responder, way, record)
        except ApiError as error:
            self._refused(record, error)
            responder.respond(error.status, _error_headers(error, request), error.body(way.dialect))
        except Exception:
            logger.exception("request %s: fault in the gateway", request.id)
            self._ended(record, Outcome.FAILED, Reason.INTERNAL_ERROR.value)
            if responder.started:
                responder.abort()
                return
            fault = ApiError(Reason.INTERNAL_ERROR, f"fault in the gateway; its log has more under {request.id}")
            responder.respond(fault.status, _error_headers(fault, request), fault.body(way.dialect))

    def _handle(self, request: HttpRequest, responder: Responder, way: Route, record: Record) -> None:
        principal = request.holder
        assert isinstance(principal, Principal)
        record.tenant = principal.tenant
        if way.treatment is Treatment.ADMIT:
            self._admit(request, responder, way, record, principal)
        elif way.treatment is Treatment.PASS:
            self._pass_through(request, responder, way, record)
        else:
            responder.respond(200, _json_headers(request), self._models())
            self._ended(record, Outcome.COMPLETED, "")

    def _refused(self, record: Record, error: ApiError) -> None:
        self._ended(record, Outcome.REFUSED, error.code.value)

    def _ended(self, record: Record, outcome: str, reason: str) -> None:
        record.ended(outcome, reason, ServiceTokens(0, 0), 0, time.monotonic())
        self._settled(record, "")

    # --- requests that need admission ---

    def _admit(
        self, request: HttpRequest, responder: Responder, way: Route, record: Record, principal: Principal
    ) -> None:
        payload = _read(request)
        record.model, record.stream = payload.model, payload.stream
        pool = self._pool(payload.model)
        record.app = principal.app(_text(request.header(b"x-fairgate-app")))
        user = _text(request.header(b"x-fairgate-user")) or payload.user
        flow = Flow(principal.tenant, record.app, user[:128])
        admitted = Request(
            id=request.id,
            flow=flow,
            weight=principal.weight,
            prompt_tokens=pool.estimator.estimate(payload.prompt, is_text=payload.is_text),
            output_tokens_max=0,
            arrived_s=record.arrived_s,
            sequences=payload.sequences if way.generates else 1,
            body_bytes=len(payload.body),
            streamed=payload.stream,
        )
        record.request = admitted
        _limit_to_context(admitted, payload, pool.context_tokens_max(payload.model), generates=way.generates)
        if pool.claims is not None:
            reading = pool.claims.read(request.headers, payload, flow, generates=way.generates)
            admitted.claim = reading.claim
            if reading.instruction_bytes:
                admitted.system_tokens = admitted.prompt_tokens * reading.instruction_bytes // len(payload.prompt)
        if pool.prefixes is not None and way.generates and payload.prompt:
            admitted.prefix = pool.prefixes.read(payload, principal.tenant)
        if payload.stream and not payload.asks_usage and way.dialect is Dialect.OPENAI and not _is_form(request):
            payload.ask_usage()
        head = _upstream_head(request, len(payload.body))
        Exchange(admitted, pool, way, payload, head, responder, record).submit()

    def _pool(self, model: str) -> Pool:
        pool = self._pool_of_model.get(model)
        if pool is not None:
            return pool
        if not model:
            if len(self._pools) == 1:
                return self._pools[0]
            raise ApiError(Reason.INVALID_REQUEST, "'model' is missing: say which model is asked", param="model")
        for candidate in self._pools:
            if model in candidate.models():
                self._pool_of_model[model] = candidate
                return candidate
        unknown = [candidate for candidate in self._pools if not candidate.models()]
        if unknown:
            # Nobody has said yet what these engines serve; they are down, or have just been started.
            message = f"no engine has said yet which models it serves; '{model[:100]}' may be one of them"
            raise ApiError(Reason.NO_BACKEND, message, retry_after_s=5.0)
        served = ", ".join(sorted(name for pool in self._pools for name in pool.models())[:20])
        message = f"the model '{model[:100]}' is not served here; these are: {served}"
        raise ApiError(Reason.MODEL_NOT_FOUND, message, param="model")

    # --- requests that do not ---

    def _pass_through(self, request: HttpRequest, responder: Responder, way: Route, record: Record) -> None:
        body = request.body
        pools = self._pools
        if body and not _is_form(request):
            payload = read_json(body)
            record.model, body = payload.model, payload.body
            pools = [self._pool(payload.model)] if payload.model else pools
        backend = next((found for pool in pools if (found := pool.least_loaded()) is not None), None)
        if backend is None:
            raise ApiError(Reason.NO_BACKEND, "no engine is in service", retry_after_s=5.0)
        unqueued = self._unqueued.get(record.tenant, 0)
        if unqueued >= self._unqueued_max:
            message = f"{unqueued} of your requests that need no queue are running, and more may not at once; slow down"
            raise ApiError(Reason.TOO_MANY_AT_ONCE, message, retry_after_s=1.0)
        self._unqueued[record.tenant] = unqueued + 1
        exchange = PassThrough(responder, way.dialect, backend, record, self._passed)
        exchange.send(_upstream_head(request, len(body)), body)

    def _passed(self, record: Record) -> None:
        left = self._unqueued[record.tenant] - 1
        if left:
            self._unqueued[record.tenant] = left
        else:
            del self._unqueued[record.tenant]
        self._settled(record, "")

    def _models(self) -> bytes:
        data = []
        for pool in self._pools:
            for name, card in pool.models().items():
                model = {"id": name, "object": "model", "created": 0, "owned_by": "fairgate"}
                if card is not None and card.max_model_len is not None:
                    model["max_model_len"] = card.max_model_len
                data.append(model)
        return msgspec.json.encode({"object": "list", "data": data})


def _record_of(request: HttpRequest) -> Record:
    record = Record(request.id, request.path[:200], now=time.monotonic())
    record.client, record.client_request_id = request.client, request.client_id
    return record


def _read(request: HttpRequest) -> Payload:
    if _is_form(request):
        return read_multipart(request.body)
    if not request.body:
        raise ApiError(Reason.INVALID_JSON, "the body is empty; a JSON object is expected")
    return read_json(request.body)


def _is_form(request: HttpRequest) -> bool:
    content_type = request.header(b"content-type")
    return content_type is not None and content_type.startswith(b"multipart/form-data")


def _text(value: bytes | None) -> str | None:
    return value.decode("utf-8", "replace") if value else None


def _limit_to_context(admitted: Request, payload: Payload, context_tokens: int | None, *, generates: bool) -> None:
    """Bound what the request is counted with by the model's context, and refuse what cannot fit in it at all."""
    asked = payload.output_tokens_max
    if context_tokens is not None:
        if asked is not None and asked > context_tokens:
            message = f"{asked} output tokens are more than the model's context of {context_tokens} tokens"
            raise ApiError(Reason.CONTEXT_LENGTH_EXCEEDED, message, param=payload.output_param)
        if admitted.prompt_tokens > CONTEXT_MARGIN * context_tokens * admitted.sequences:
            message = (
                f"the prompt has about {admitted.prompt_tokens} tokens, many more than the model's context of "
                f"{context_tokens}; shorten it"
            )
            raise ApiError(Reason.CONTEXT_LENGTH_EXCEEDED, message, param=payload.prompt_param)
        if generates:
            admitted.prompt_tokens = min(admitted.prompt_tokens, context_tokens * admitted.sequences)
    if not generates:
        return
    room = OUTPUT_TOKENS_UNLIMITED if context_tokens is None else max(1, context_tokens - admitted.prompt_tokens)
    admitted.output_tokens_max = min(room if asked is None else asked, room) * admitted.sequences


def _upstream_head(request: HttpRequest, body_bytes: int) -> bytes:
    """The head of the request to the engine, without the lines that depend on which engine it is."""
    method = request.method
    parts = [method.encode(), b" ", request.target, b" HTTP/1.1\r\n"]
    for name, value in forward_request_headers(request.headers):
        parts += (name, b": ", value, b"\r\n")
    parts += (b"x-request-id: ", request.id.encode())
    if body_bytes or method in ("POST", "PUT", "PATCH"):
        parts += (b"\r\ncontent-length: ", str(body_bytes).encode())
    parts.append(b"\r\n")
    return b"".join(parts)


def _json_headers(request: HttpRequest) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", b"application/json"), _request_id(request)]


def _request_id(request: HttpRequest) -> tuple[bytes, bytes]:
    return b"x-request-id", request.id.encode()


def _error_headers(error: ApiError, request: HttpRequest) -> list[tuple[bytes, bytes]]:
    return [*error.headers(), _request_id(request)]
