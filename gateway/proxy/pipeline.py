"""The path of a client's request to its pool: authenticate, identify, read, estimate, submit.

The pipeline runs synchronously for each request. A faulty request is answered here, before anything is queued or
charged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final
from urllib.parse import unquote

import msgspec

from backends.health import ModelCard
from gateway.http.addresses import household
from gateway.http.errors import ApiError, Reason, dialect_of
from gateway.http.headers import Header, header_of
from gateway.http.responder import Responder
from gateway.keys.identity import Keyring, Principal, expired
from gateway.keys.stored_responses import ResponseLocation, StoredResponses, unknown
from gateway.pool.pool import Pool
from gateway.proxy.admission_request import admission_request
from gateway.proxy.exchange import Exchange
from gateway.proxy.failover import fail_over
from gateway.proxy.passthrough import PassThrough, engines_of
from gateway.proxy.refusals import revoked_key_error
from gateway.proxy.request_context import RequestContext
from gateway.request.apis import OTHER
from gateway.request.body.payload import JsonPayload, Payload
from gateway.request.bypass_limiter import BypassLimiter
from gateway.request.cors import Cors
from gateway.request.routes import MODELS, RouteKind, Routes
from gateway.telemetry.record import NO_SERVICE, Outcome, RequestRecord
from gateway.telemetry.trace import TraceSampler
from policies.request import State

logger = logging.getLogger("fairgate")

RETRY_WHEN_DRAINING_S: Final = 2.0
UNLISTED_LENGTH_MAX: Final = 256
"""Longest name of a model that no engine has listed."""
JSON: Final = (b"content-type", b"application/json")
ABOUT: Final = msgspec.json.encode(
    {
        "service": "fairgate",
        "message": "an OpenAI-compatible gateway for language models: its base_url is this address with /v1 at the "
        "end, and GET /v1/models lists what your API key may ask",
    }
)


class Pipeline:
    """The handler behind the tenants' listener. `settled` is called with each request that ends without a pool's
    admission, and with an empty policy name."""

    def __init__(
        self,
        keyring: Keyring,
        settled: Callable[[RequestRecord, str], None],
        bypass_limiter: BypassLimiter,
        responses: StoredResponses,
        sampler: TraceSampler | None,
    ) -> None:
        """Create a pipeline, which needs `take_over` first. `sampler` chooses the requests that are traced; None traces
        none."""
        self.keyring = keyring
        self._settled = settled
        self.bypass_limiter = bypass_limiter
        self._sampler = sampler
        self.responses = responses
        self.draining = False
        self.late: dict[RouteKind, Callable[[RequestContext], None]] = {}
        """Handlers of requests that need time but no engine, by kind."""
        self.files: Mapping[str, tuple[list[Header], bytes]] = {}
        """Header fields and content of public files, by path."""

    def take_over(
        self, pools: Iterable[Pool], *, routes: Routes, cors: Cors, aliases: Mapping[str, str], json_bytes_max: int
    ) -> None:
        """Replace pools and routes. `json_bytes_max`: greatest size of one body of JSON."""
        self._json_bytes_max = json_bytes_max
        self._aliases = dict(aliases)
        self._pools = list(pools)
        self._pool_of_model: dict[str, Pool] = {}
        self._routes = routes
        self._cors = cors
        for pool in self._pools:
            pool.healthy_fallback = partial(self._healthy_fallback, pool)
            pool.dispatcher.on_stranded = partial(fail_over, pool)

    def reject_revoked(self, exchanges: Iterable[Exchange]) -> None:
        """Reject waiting requests whose key is no longer valid. Others may start or end by that."""
        for each in exchanges:
            if each.request.progress.state not in (State.DISPATCHED, State.ENDED):
                each.refuse_if_revoked()

    def authorize(self, request: RequestContext) -> tuple[int, list[Header], bytes] | None:
        """Authorize a request by its head. A returned answer is sent, and the body is not read."""
        if self._cors.is_on:
            request.answer_fields = self._cors.fields(request)
        try:
            route = request.route = self._routes.find(request.method, request.path)
            if request.body_follows and not route.takes_body:
                raise ApiError(Reason.INVALID_REQUEST, f"{request.method} {request.path} takes no body; send none")
            if route.kind is RouteKind.HEALTH:
                return 200, [JSON, request.id_field()], ABOUT if request.path == "/" else b'{"status":"ok"}'
            if route.kind is RouteKind.FILE:
                return self._public_file(request)
            if route.kind is RouteKind.OPTIONS:
                allowed = (b"allow", route.methods.encode())
                return 204, [allowed, request.id_field(), *self._cors.preflight(request, route.methods)], b""
            if self.draining:
                message = "this gateway is shutting down and takes no more requests; another one will answer"
                raise ApiError(Reason.DRAINING, message, retry_after_s=RETRY_WHEN_DRAINING_S, should_retry=True)
            head, address = request.head, household(request.client)
            principal = self.keyring.principal(head.key(), address, time.time(), head.digest)
            head.digest = principal.digest
            request.comes_from(principal)
            if route.kind is not RouteKind.ADMIT:
                self.bypass_limiter.count_arrival(principal.tenant, time.monotonic())
        except ApiError as found:
            error = found
            if found.code is Reason.METHOD_NOT_ALLOWED and header_of(request.headers, b"sec-websocket-key"):
                message = f"no WebSocket is offered: send POST {request.path} over HTTP"
                error = ApiError(Reason.UPGRADE_REQUIRED, message)
            self.refused(request, error)
            return error.status, [*error.headers(), request.id_field()], error.body(dialect_of(request.path))
        return None

    def _public_file(self, request: RequestContext) -> tuple[int, list[Header], bytes]:
        """Return the answer with a public file. Raise `ApiError` 404 for an unknown path."""
        found = self.files.get(request.path)
        if found is None:
            raise ApiError(Reason.NOT_FOUND, f"there is no file {request.path[:200]}")
        return 200, [*found[0], request.id_field()], found[1]

    def refused(self, request: RequestContext, error: ApiError) -> None:
        """Record a request that is refused before `handle`."""
        request.arrived_s = time.monotonic()
        if self._cors.is_on:
            request.answer_fields = self._cors.fields(request)
        self._trace(request)
        self.ended(request, Outcome.REFUSED, error.code.value)

    def handle(self, request: RequestContext, responder: Responder) -> None:
        """Handle a complete request."""
        request.responder, request.arrived_s = responder, time.monotonic()
        self._trace(request)
        try:
            self._handle(request)
        except Exception as error:  # answered, counted and logged by `failed`
            self.failed(request, error)

    def _trace(self, context: RequestContext) -> None:
        if self._sampler is not None and context.tenant:  # requests without a key are not traced
            context.trace = self._sampler.begin(context.headers)

    def failed(self, context: RequestContext, error: Exception) -> None:
        """Answer a request with an error, the client's or the gateway's. No engine has the request."""
        outcome = Outcome.REFUSED
        if not isinstance(error, ApiError):
            logger.error("request %s: fault in the gateway", context.id, exc_info=error)
            message = f"fault in the gateway; its log has more under {context.id}"
            outcome, error = Outcome.FAILED, ApiError(Reason.INTERNAL_ERROR, message)
        self.ended(context, outcome, error.code.value)
        context.error(error, is_within=True)

    def handle_batched(self, context: RequestContext, responder: Responder) -> None:
        """Handle a request of a batch, whose principal is known. Refuse the request if its key has expired.

        An expired token does not matter, because the token proved its owner when the batch was created.
        """
        context.route = self._routes.find(context.method, context.path)
        error = expired(context.principal, time.time())
        if error is None:
            self.handle(context, responder)
        else:
            context.responder, context.arrived_s = responder, time.monotonic()
            self.failed(context, error)

    def model_error(self, principal: Principal, model: str) -> ApiError | None:
        """Return the error of a caller that can never ask for this model. Return None if the caller may ask for it, now
        or once engines report their models."""
        try:
            self._pool(self._model(principal, model))
        except ApiError as error:
            return error if error.status < 500 else None
        return None

    def _handle(self, context: RequestContext) -> None:
        kind = context.route.kind
        if kind is RouteKind.MODELS:
            models = self._models(context.principal, unquote(context.path[len(MODELS) + 1 :]))
            context.responder.respond(200, [JSON, context.id_field()], models)
            self.ended(context, Outcome.COMPLETED, "")
        elif kind is RouteKind.BATCHES or kind is RouteKind.ME:
            if kind not in self.late:
                message = "files and batches are kept beside usage, which this gateway does not count: set `usage`"
                raise ApiError(Reason.NOT_IMPLEMENTED, message)
            self.late[kind](context)
        elif kind is RouteKind.PASS and not context.body:
            self._pass_through(context, None)
        else:
            payload = context.payload = context.read_body(self._json_bytes_max)
            if not self.keyring.takes(context.principal):
                raise revoked_key_error()
            if kind is RouteKind.PASS:
                self._pass_through(context, payload)
            else:
                self._admit(context)

    def ended(self, context: RequestContext, outcome: str, reason: str) -> None:
        """Record the end of a request that no engine had."""
        context.ended(outcome, reason, NO_SERVICE, time.monotonic())
        self._settled(context, "")

    # --- requests that need admission ---

    def _admit(self, context: RequestContext) -> None:
        """Ask for admission, with the body prepared for an engine."""
        payload, route = context.payload, context.route
        context.responses, context.keyring = self.responses, self.keyring
        context.model, context.stream = payload.model, payload.stream
        pool = context.serving_pool = self._pool_for(context)
        if payload.is_background and not pool.takes_background:
            message = "'background' is not taken here, since the engine would work on after its answer: leave it out, "
            message += "or have the operator set `limits.background`"
            raise ApiError(Reason.INVALID_REQUEST, message, param="background")
        request = context.request = admission_request(context, pool)
        self.keyring.check_user(context.tenant, request.flow.user)
        if payload.stream and not payload.asks_usage and route.reports_usage and isinstance(payload, JsonPayload):
            payload.ask_usage()
        # Where nothing is generated, the engine's count of prompt tokens is checked against the commas.
        payload.drop_unsent(counts_commas=not route.generates)
        context.body = b""
        Exchange(context, request).submit()

    def _pool_for(self, context: RequestContext) -> Pool:
        """Return the pool that serves a request, and write that pool's name of the model into the payload."""
        payload = context.payload
        asked = payload.model
        if id := self._routes.response_id(context.path) or payload.previous:
            keeper, stored = self._pool_of_response(context, id)
            # The fallback pool may have answered.
            model = stored.model if asked in ("", stored.asked) else self._model(context.principal, asked)
            if self._pool(model) is not keeper:
                raise unknown(id)
            context.engine = stored.engine
        else:
            model = self._model(context.principal, asked)
        pool = self._pool(model)
        if model not in self._pool_of_model:
            context.model = ""  # the client may have made up the name, which would be a label of metrics and usage
        other = None if context.engine or pool.is_healthy() else self._healthy_fallback(pool)
        if other is not None:
            model, pool = str(pool.config.fallback), other
        if not asked and context.route.api is OTHER:
            payload.model = context.model = model  # the engine chooses; nothing is added to a body of unknown format
        elif model != asked:
            payload.rename(model)
            context.model = payload.model
        return pool

    def _pool_of_response(self, context: RequestContext, id: str) -> tuple[Pool, ResponseLocation]:
        """Return the pool of a stored response and the response's location, or raise `ApiError` 404."""
        stored = self.responses.find(context.principal, id, time.monotonic())
        pool = self._pool_of(stored.model)
        if pool is None or stored.engine not in pool.backends:
            raise unknown(id)
        return pool, stored

    def _model(self, principal: Principal, asked: str) -> str:
        """Return the engines' name of a model. Raise ApiError if the caller may not ask for it."""
        model = self._aliases.get(asked, asked)
        if not principal.may_ask(asked) and (model == asked or not principal.may_ask(model)):
            raise _model_not_allowed(asked, principal)
        return model or self._default_model()

    def _default_model(self) -> str:
        """Return the model of the only pool, for requests that name none; "" if no engine has reported its models.

        Raise ApiError if there are several pools. The name is written into the body, because limits, prices and the log
        know the request by it.
        """
        if len(self._pools) > 1:
            raise ApiError(Reason.INVALID_REQUEST, "'model' is missing: say which model is asked", param="model")
        cards = self._pools[0].models().items()
        return next((name for name, card in cards if card is None or not card.parent), "")

    def _healthy_fallback(self, pool: Pool) -> Pool | None:
        """Return the pool's fallback, or None if that has no engine in service."""
        other = None if pool.config.fallback is None else self._pool_of(pool.config.fallback)
        return other if other is not None and other.is_healthy() else None

    def _pool_of(self, model: str) -> Pool | None:
        """Return the pool that has listed the model, or None."""
        pool = self._pool_of_model.get(model)
        if pool is None:
            # A configured model goes before an adapter of that name.
            for candidate in sorted(self._pools, key=lambda each: model not in each.config.models):
                if model in candidate.models():
                    self._pool_of_model[model] = candidate
                    return candidate
        return pool

    def _pool(self, model: str) -> Pool:
        """Return the pool that serves a model. Raise ApiError if none is known.

        If one pool alone has listed no models and is in service, its engine judges the name, as without a gateway.
        """
        pool = self._pool_of(model)
        if pool is None and 0 < len(model) <= UNLISTED_LENGTH_MAX:
            unlisted = [each for each in self._pools if not each.models()]
            pool = unlisted[0] if len(unlisted) == 1 and unlisted[0].is_healthy() else None
        if pool is None:
            raise self._not_served(model)
        return pool

    def _not_served(self, model: str) -> ApiError:
        """Return the error for a model that no pool has listed."""
        unknown = [candidate for candidate in self._pools if not candidate.models()]
        if unknown:
            # These engines have not reported their models; they are down, or have just been started.
            message = f"no engine has said yet which models it serves; '{model[:100]}' may be one of them"
            return ApiError(Reason.NO_BACKEND, message, retry_after_s=5.0)
        served = ", ".join(sorted(asked for asked, _, _ in self._models_by_name())[:20])
        message = f"the model '{model[:100]}' is not served here; these are: {served}"
        return ApiError(Reason.MODEL_NOT_FOUND, message, param="model")

    def _models_by_name(self) -> list[tuple[str, str, ModelCard | None]]:
        """Return all models that can be asked for: the client's name, the engines' name, and the engines' card."""
        cards = {name: card for pool in self._pools for name, card in pool.models().items()}
        aliases = [(alias, name, cards[name]) for alias, name in self._aliases.items() if name in cards]
        return [*[(name, name, card) for name, card in cards.items()], *aliases]

    # --- requests that do not ---

    def _pass_through(self, context: RequestContext, payload: Payload | None) -> None:
        """Send a request that needs no admission, and count it as running until its end."""
        if id := self._routes.response_id(context.path):
            keeper, stored = self._pool_of_response(context, id)
            context.model = stored.model
            engines = iter([keeper.backends[stored.engine]])
        else:
            pools = self._pools
            if payload is not None:
                context.model = payload.model
                if payload.model or context.principal.models is not None:
                    pools = [self._pool_for(context)]
            if not any([pool.is_healthy() for pool in pools]):
                again_s = min([pool.again_s() for pool in pools])
                raise ApiError(Reason.NO_BACKEND, "no engine is in service", retry_after_s=again_s)
            engines = engines_of(pools)
        if payload is not None:
            payload.drop_unsent()
            context.body = b""
        self.bypass_limiter.begin(context.tenant)
        PassThrough(context, payload, engines, self._passed).begin()

    def _passed(self, context: RequestContext) -> None:
        """Record the end of a request without admission."""
        self.bypass_limiter.end(context.tenant)
        self._settled(context, "")

    def _models(self, principal: Principal, asked: str) -> bytes:
        """Return the models that a key may ask for, or the one model `asked`, as JSON."""
        data = []
        for model, name, card in self._models_by_name():
            if not principal.may_ask(model) and not principal.may_ask(name):
                continue
            entry = {"id": model, "object": "model", "created": 0, "owned_by": "fairgate"}
            if card is not None and card.max_model_len is not None:
                entry["max_model_len"] = card.max_model_len
            if model == asked:
                return msgspec.json.encode(entry)
            data.append(entry)
        if asked:
            raise self._not_served(asked) if principal.models is None else _model_not_allowed(asked, principal)
        return msgspec.json.encode({"object": "list", "data": data})


def _model_not_allowed(model: str, principal: Principal) -> ApiError:
    """Return the error for a model outside a key's models, without revealing whether the model exists."""
    models = ", ".join(sorted(principal.models or ())[:20])
    if not model:
        message = f"'model' is missing: say which of these is asked, which this key may ask for: {models}"
        return ApiError(Reason.INVALID_REQUEST, message, param="model")
    message = f"the model '{model[:100]}' does not exist, or this key may not ask for it; it may ask for: {models}"
    return ApiError(Reason.MODEL_NOT_FOUND, message, param="model")
