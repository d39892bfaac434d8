"""What becomes of a client's request? Authenticate, identify, read, estimate, and hand it to its pool.

Runs synchronously for each request, but for the reading of a large body, which is done in slices while others are
served. What is wrong with a request is said here, before anything is queued or charged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Final
from urllib.parse import unquote

import msgspec

from backends.answers.sse import Dialect
from backends.health import ModelCard
from gateway.http.addresses import household
from gateway.http.errors import ApiError, Reason, dialect_of
from gateway.http.headers import bearer_key
from gateway.http.request import HttpRequest
from gateway.http.responder import Responder
from gateway.keys.identity import Keyring, Principal
from gateway.pool.dispatcher import Admitted
from gateway.pool.pool import Pool
from gateway.proxy.exchange import Exchange
from gateway.proxy.failover import move
from gateway.proxy.passthrough import PassThrough, engines_of
from gateway.request.apis import AUDIO, OTHER
from gateway.request.body.form import is_form, read_form
from gateway.request.body.large_body import LargePayload, read_large_json
from gateway.request.body.payload import LARGE_BODY_BYTES, JsonPayload, Payload, read_json
from gateway.request.body.readings import Reading, Readings
from gateway.request.body.slices import Slices, at_once
from gateway.request.cors import Cors
from gateway.request.routes import MODELS, Route, Routes, Treatment
from gateway.request.unqueued import Unqueued
from gateway.request.upstream_head import upstream_head
from gateway.request.within_context import within_context
from gateway.telemetry.record import Outcome, RequestRecord
from gateway.telemetry.trace import Sampler
from policies.request import NO_CLAIM, Flow, Request, ServiceTokens, State

__all__ = ["Pipeline"]

logger = logging.getLogger("fairgate")

RETRY_WHEN_DRAINING_S: Final = 2.0


class Asking:
    """One request that is there whole: what it is, who sends it, which way it goes, and who writes the answer."""

    __slots__ = ("principal", "record", "request", "responder", "way")

    def __init__(self, request: HttpRequest, responder: Responder, record: RequestRecord) -> None:
        way, principal = request.route, request.holder
        assert isinstance(way, Route)
        assert isinstance(principal, Principal)
        self.request = request
        self.responder = responder
        self.way = way
        self.principal = principal
        self.record = record


class Pipeline:
    """The handler behind the tenants' listener. `settled` hears of the end of every request, with its policy's name."""

    def __init__(
        self,
        keyring: Keyring,
        pools: Iterable[Pool],
        settled: Callable[[RequestRecord, str], None],
        *,
        routes: Routes,
        cors: Cors,
        unqueued: Unqueued,
        aliases: Mapping[str, str],
        reading_bytes_max: int,
        sampler: Sampler | None = None,
    ) -> None:
        """`reading_bytes_max`: of large bodies that are read at once. `sampler`: which requests' traces are followed;
        None: none are."""
        self._keyring = keyring
        self._settled = settled
        self._readings = Readings(reading_bytes_max)
        self._unqueued = unqueued
        self._sampler = sampler
        self.draining = False
        self.take_over(pools, routes=routes, cors=cors, aliases=aliases)

    def take_over(self, pools: Iterable[Pool], *, routes: Routes, cors: Cors, aliases: Mapping[str, str]) -> None:
        """From now on requests go to these pools, by these routes."""
        self._aliases = dict(aliases)
        """Models by other names."""
        self._pools = list(pools)
        self._pool_of_model: dict[str, Pool] = {}
        self._routes = routes
        self._cors = cors
        for pool in self._pools:
            pool.stand_in = partial(self._stand_in, pool)
            pool.dispatcher.on_stranded = None if pool.fallback is None else partial(self._stranded, pool)

    def turn_away_revoked(self, exchanges: Iterable[Admitted]) -> None:
        """Refuse those of them that wait, and came by a key that is no longer taken."""
        for each in exchanges:
            if (
                isinstance(each, Exchange)
                and each.request.progress.state is not State.DISPATCHED
                and not self._keyring.takes(each.holder)
            ):
                each.turn_away(_revoked())

    @property
    def reading(self) -> int:
        """How many large bodies are being read."""
        return len(self._readings)

    def give_up(self, error: ApiError) -> None:
        """The gateway stops: read no more bodies."""
        self._readings.give_up(error)

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
            principal = self._keyring.principal(bearer_key(request.headers), household(request.client), time.time())
            request.holder = principal
            request.account = principal.tenant
            if way.treatment is not Treatment.ADMIT:
                self._unqueued.come(principal.tenant, time.monotonic())
        except ApiError as error:
            self.refused(request, error)
            return error.status, _error_headers(error, request), error.body(dialect_of(request.path))
        return None

    def refused(self, request: HttpRequest, error: ApiError) -> None:
        """A request ends before it has come to `handle`."""
        self._refused(self._record_of(request), error)

    def handle(self, request: HttpRequest, responder: Responder) -> None:
        """Runs when a request is there whole."""
        asking = Asking(request, responder, self._record_of(request))
        try:
            self._handle(asking)
        except Exception as error:
            self._failed(asking, error)

    def _failed(self, asking: Asking, error: Exception) -> None:
        """Say what is wrong with the request, or with the gateway."""
        request, responder, way, record = asking.request, asking.responder, asking.way, asking.record
        if isinstance(error, ApiError):
            self._refused(record, error)
            responder.respond(error.status, _error_headers(error, request), error.body(way.dialect))
            return
        logger.error("request %s: fault in the gateway", request.id, exc_info=error)
        self._ended(record, Outcome.FAILED, Reason.INTERNAL_ERROR.value)
        if responder.started:
            responder.abort()
            return
        fault = ApiError(Reason.INTERNAL_ERROR, f"fault in the gateway; its log has more under {request.id}")
        responder.respond(fault.status, _error_headers(fault, request), fault.body(way.dialect))

    def _handle(self, asking: Asking) -> None:
        request, way = asking.request, asking.way
        if way.treatment is Treatment.MODELS:
            models = self._models(asking.principal, unquote(request.path[len(MODELS) + 1 :]))
            asking.responder.respond(200, _json_headers(request), models)
            self._ended(asking.record, Outcome.COMPLETED, "")
        elif way.treatment is Treatment.PASS and not request.body:
            self._pass_through(asking, None)()
        elif len(request.body) <= LARGE_BODY_BYTES:
            self._take(asking, _read(request, way))()
        else:
            self._read_in_slices(asking)

    def _take(self, asking: Asking, payload: Payload) -> Callable[[], None]:
        """The request is there whole, and read. What comes back sends it on its way, once its body is sealed."""
        if not self._keyring.takes(asking.principal):
            raise _revoked()
        if asking.way.treatment is Treatment.PASS:
            return self._pass_through(asking, payload)
        return self._admit(asking, payload)

    def _read_in_slices(self, asking: Asking) -> None:
        work = self._reading(asking)
        next(work)  # from here on it is the one to say what goes wrong
        reading = Reading(asking.principal.tenant, work, len(asking.request.body))
        self._readings.start(reading)
        asking.responder.on_disconnect = lambda: self._gone_while_read(reading, asking.record)

    def _reading(self, asking: Asking) -> Slices:
        request, responder = asking.request, asking.responder
        try:
            yield
            payload = yield from _slices(request, asking.way)
            yield
            send = self._take(asking, payload)
            request.body = b""
            if isinstance(payload, LargePayload):
                yield from payload.seal()
            yield
            responder.on_disconnect = None
            send()
        except Exception as error:
            responder.on_disconnect = None
            self._failed(asking, error)

    def _gone_while_read(self, reading: Reading, record: RequestRecord) -> None:
        self._readings.cancel(reading)
        self._ended(record, Outcome.ABANDONED, "client_disconnected")

    def _record_of(self, request: HttpRequest) -> RequestRecord:
        record = RequestRecord(request.id, request.path[:200], now=time.monotonic())
        record.client, record.client_request_id = request.client, request.client_id
        record.tenant = request.account
        if self._sampler is not None and record.tenant:  # who has no key makes no spans
            record.trace = self._sampler.begin(request.headers)
        return record

    def _refused(self, record: RequestRecord, error: ApiError) -> None:
        self._ended(record, Outcome.REFUSED, error.code.value)

    def _ended(self, record: RequestRecord, outcome: str, reason: str) -> None:
        record.ended(outcome, reason, ServiceTokens(0, 0), 0, time.monotonic())
        self._settled(record, "")

    # --- requests that need admission ---

    def _admit(self, asking: Asking, payload: Payload) -> Callable[[], None]:
        request, way, principal, record = asking.request, asking.way, asking.principal, asking.record
        record.model, record.stream = payload.model, payload.stream
        pool = self._pool_for(payload, principal)
        record.model = payload.model
        record.app = principal.app(_text(request.header(b"x-fairgate-app")))
        user = _text(request.header(b"x-fairgate-user")) or payload.user
        flow = Flow(principal.tenant, record.app, user[:128])
        sequences = payload.sequences if way.generates else 1
        prompt_tokens, output_tokens_max = within_context(
            payload,
            pool.estimator.estimate(payload.prompt),
            sequences,
            pool.context_tokens_max(payload.model),
            generates=way.generates,
        )
        claim, system_tokens = NO_CLAIM, 0
        if pool.claims is not None:
            reading = pool.claims.read(request.headers, payload, flow, generates=way.generates)
            claim = reading.claim
            if reading.instruction_bytes:
                system_tokens = prompt_tokens * reading.instruction_bytes // payload.prompt.size
        prefix = pool.prefix_of(payload, principal.tenant) if way.generates else ()
        admitted = record.request = Request(
            request.id, flow, principal.weight, prompt_tokens, output_tokens_max, record.arrived_s, sequences,
            len(payload.body), payload.stream, system_tokens, claim, prefix,
            payload.model if pool.is_adapter(payload.model) else "", request.client_id,
        )  # fmt: skip
        if (
            payload.stream
            and not payload.asks_usage
            and way.dialect is Dialect.OPENAI
            and isinstance(payload, JsonPayload)
        ):
            payload.ask_usage()
        return lambda: self._submit(admitted, pool, asking, payload)

    @staticmethod
    def _submit(admitted: Request, pool: Pool, asking: Asking, payload: Payload) -> None:
        head = upstream_head(asking.request, asking.record.trace)
        if asking.way.generates:  # elsewhere the engine's count is held against the prompt
            payload.let_go()
        asking.request.body = b""
        Exchange(admitted, pool, asking.way, payload, head, asking.responder, asking.record, asking.principal).submit()

    def _pool_for(self, payload: Payload, principal: Principal) -> Pool:
        """The pool that answers. The payload then asks for the model by that pool's name."""
        asked = payload.model
        model = self._aliases.get(asked, asked)
        if not principal.may_ask(asked) and (model == asked or not principal.may_ask(model)):
            raise _not_for(asked, principal)
        pool = self._pool(model)
        other = None if pool.is_healthy() else self._stand_in(pool)
        if other is not None:
            model, pool = str(pool.fallback), other
        if model != asked:
            payload.rename(model)
        return pool

    def _stand_in(self, pool: Pool) -> Pool | None:
        """The pool that answers in the place of this one, if it has an engine."""
        other = None if pool.fallback is None else self._pool_of(pool.fallback)
        return other if other is not None and other.is_healthy() else None

    def _stranded(self, pool: Pool, waiting: Sequence[Admitted]) -> None:
        """They wait there though it has no engine."""
        other = self._stand_in(pool)
        if other is not None:
            move(waiting, pool, other, str(pool.fallback))

    def _pool_of(self, model: str) -> Pool | None:
        pool = self._pool_of_model.get(model)
        if pool is None:
            # What the config names goes before an adapter of the same name.
            for candidate in sorted(self._pools, key=lambda each: model not in each.config.models):
                if model in candidate.models():
                    self._pool_of_model[model] = candidate
                    return candidate
        return pool

    def _pool(self, model: str) -> Pool:
        pool = self._pool_of(model)
        if pool is not None:
            return pool
        if not model:
            if len(self._pools) == 1:
                return self._pools[0]
            raise ApiError(Reason.INVALID_REQUEST, "'model' is missing: say which model is asked", param="model")
        raise self._not_served(model)

    def _not_served(self, model: str) -> ApiError:
        unknown = [candidate for candidate in self._pools if not candidate.models()]
        if unknown:
            # Nobody has said yet what these engines serve; they are down, or have just been started.
            message = f"no engine has said yet which models it serves; '{model[:100]}' may be one of them"
            return ApiError(Reason.NO_BACKEND, message, retry_after_s=5.0)
        served = ", ".join(sorted(shown for shown, _, _ in self._named())[:20])
        message = f"the model '{model[:100]}' is not served here; these are: {served}"
        return ApiError(Reason.MODEL_NOT_FOUND, message, param="model")

    def _named(self) -> list[tuple[str, str, ModelCard | None]]:
        """All that can be asked for: by which name, what it is to the engines, and what they say of it."""
        cards = {name: card for pool in self._pools for name, card in pool.models().items()}
        aliases = [(alias, name, cards[name]) for alias, name in self._aliases.items() if name in cards]
        return [*[(name, name, card) for name, card in cards.items()], *aliases]

    # --- requests that do not ---

    def _pass_through(self, asking: Asking, payload: Payload | None) -> Callable[[], None]:
        record, principal = asking.record, asking.principal
        pools = self._pools
        if payload is not None:
            record.model = payload.model
            if payload.model or principal.models is not None:
                pools = [self._pool_for(payload, principal)]
                record.model = payload.model
        if not any([pool.is_healthy() for pool in pools]):
            again_s = min([pool.again_s() for pool in pools])
            raise ApiError(Reason.NO_BACKEND, "no engine is in service", retry_after_s=again_s)
        exchange = PassThrough(asking.responder, asking.way.dialect, engines_of(pools), record, self._passed)

        def send() -> None:
            # Not before: nobody gives the place back if the client leaves while its body is sealed.
            self._unqueued.begin(record.tenant)
            exchange.send(upstream_head(asking.request, record.trace), payload)

        return send

    def _passed(self, record: RequestRecord) -> None:
        self._unqueued.end(record.tenant)
        self._settled(record, "")

    def _models(self, principal: Principal, asked: str) -> bytes:
        """The models that a key may ask for; or the one model that is asked for by its name."""
        data = []
        for shown, name, card in self._named():
            if not principal.may_ask(shown) and not principal.may_ask(name):
                continue
            model = {"id": shown, "object": "model", "created": 0, "owned_by": "fairgate"}
            if card is not None and card.max_model_len is not None:
                model["max_model_len"] = card.max_model_len
            if shown == asked:
                return msgspec.json.encode(model)
            data.append(model)
        if asked:
            raise self._not_served(asked) if principal.models is None else _not_for(asked, principal)
        return msgspec.json.encode({"object": "list", "data": data})


def _revoked() -> ApiError:
    return ApiError(Reason.INVALID_API_KEY, "this API key was revoked before an engine had the request")


def _not_for(model: str, principal: Principal) -> ApiError:
    """The same whether the model exists or not: a key does not find out about others than its own."""
    models = ", ".join(sorted(principal.models or ())[:20])
    if not model:
        message = f"'model' is missing: say which of these is asked, which this key may ask for: {models}"
        return ApiError(Reason.INVALID_REQUEST, message, param="model")
    message = f"the model '{model[:100]}' does not exist, or this key may not ask for it; it may ask for: {models}"
    return ApiError(Reason.MODEL_NOT_FOUND, message, param="model")


def _read(request: HttpRequest, way: Route) -> Payload:
    form = _form_type(request, way)
    return read_json(request.body, way.api) if form is None else at_once(read_form(request.body, form, way.api))


def _slices(request: HttpRequest, way: Route) -> Generator[None, None, Payload]:
    form = _form_type(request, way)
    payload: Payload
    if form is None:
        payload = yield from read_large_json(request.body, way.api)
    else:
        payload = yield from read_form(request.body, form, way.api)
    return payload


def _form_type(request: HttpRequest, way: Route) -> bytes | None:
    """The content-type of a form, where the API takes one. Whatever a body is labelled elsewhere, it is read as JSON:
    some engines do not look at the label."""
    api = way.api
    if api is not AUDIO and api is not OTHER:
        return None
    content_type = request.header(b"content-type")
    if is_form(content_type):
        return content_type
    if api is AUDIO:
        raise ApiError(Reason.INVALID_REQUEST, "a form with a file is expected: content-type multipart/form-data")
    return None


def _text(value: bytes | None) -> str | None:
    return value.decode("utf-8", "replace") if value else None


def _json_headers(request: HttpRequest) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", b"application/json"), _request_id(request)]


def _request_id(request: HttpRequest) -> tuple[bytes, bytes]:
    return b"x-request-id", request.id.encode()


def _error_headers(error: ApiError, request: HttpRequest) -> list[tuple[bytes, bytes]]:
    return [*error.headers(), _request_id(request)]
