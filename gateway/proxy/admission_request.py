"""The admission request of a client's request, by its pool's models and engines, and made anew for another pool."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf
from typing import Final

from gateway.http.errors import ApiError, Reason
from gateway.pool.pool import Pool
from gateway.proxy.request_context import RequestContext
from gateway.request.body.payload import NO_FIELDS, USER_LENGTH_MAX, Payload
from gateway.request.interaction_claim import OF_INTEREST
from policies.request import FREE, NO_CLAIM, Flow, Request, of_batch

SECONDS: Final = re.compile(rb"\d{1,9}(\.\d{1,9})?")
READ: Final = OF_INTEREST | {b"x-fairgate-app", b"x-fairgate-user", b"x-fairgate-class", b"x-fairgate-wait-s-max"}
FLEX: Final = b'"flex"'
"""The `service_tier` of OpenAI's API for slower and cheaper requests."""
OUTPUT_TOKENS_UNLIMITED: Final = 1 << 20
"""Output limit of a request without limits, where the model's context is unknown."""
CONTEXT_MARGIN: Final = 4
"""Factor by which an estimated prompt must exceed the context to be refused; the engine judges shorter ones."""
TRUNCATES: Final = b'"truncate_prompt_tokens"'
"""Field by which vLLM shortens a prompt."""


def _asks(fields: Mapping[bytes, bytes], payload: Payload) -> bool:
    """Return whether the client itself declares the request batch. A client can only lower the class of a request."""
    tier = payload.fields.service_tier
    return bool(tier and bytes(tier) == FLEX) or fields.get(b"x-fairgate-class") == b"batch"


def admission_request(context: RequestContext, pool: Pool) -> Request:
    """Return the request for admission to this pool. A request that moves keeps its flow, claim, progress, wait limit.

    Raise ApiError for an app that its key may not claim, a wrong wait limit, or more than the model's context.
    """
    payload, before, generates = context.payload, context.request, context.route.generates
    sequences = payload.sequences if generates else 1
    prompt_tokens, output_tokens_max = _bounded_tokens(payload, pool, sequences, generates=generates)
    if before is not None:
        flow, weight, claim, progress = before.flow, before.configured_weight, before.claim, before.progress
        system_tokens = before.system_tokens * prompt_tokens // max(1, before.prompt_tokens)
        wait_s_max = before.wait_s_max
    else:
        principal = context.principal
        head = context.head
        fields = head.named
        if fields is None:  # a field given twice has its first value
            fields = head.named = {name: value for name, value in reversed(head.headers) if name in READ}
        app, user = fields.get(b"x-fairgate-app"), fields.get(b"x-fairgate-user")
        context.app = principal.app(app.decode("utf-8", "replace") if app else None)
        named = principal.user or (user.decode("utf-8", "replace") if user else payload.user)
        is_batch = context.is_batch or principal.is_batch or context.app in pool.batch_apps or _asks(fields, payload)
        leaf = of_batch(context.tenant) if is_batch else context.tenant
        flow, weight, progress = Flow(leaf, context.app, named[:USER_LENGTH_MAX]), principal.weight, None
        claim, system_tokens = NO_CLAIM, 0
        willing = fields.get(b"x-fairgate-wait-s-max")
        wait_s_max = inf if willing is None else _seconds(willing)
        if pool.claims is not None:
            conversation = payload.conversation if generates else NO_FIELDS.messages
            claim, instruction_bytes = pool.claims.read(fields, payload, conversation, flow)
            if instruction_bytes:
                system_tokens = prompt_tokens * instruction_bytes // payload.prompt.size
    return Request(
        id=context.id,
        flow=flow,
        weight=weight,
        prompt_tokens=prompt_tokens,
        output_tokens_max=output_tokens_max,
        arrived_s=context.arrived_s,
        sequences=sequences,
        body_bytes=len(payload.body),
        streamed=context.stream,
        system_tokens=system_tokens,
        claim=claim,
        prefix=pool.hash_prefix(payload, context.tenant) if generates else (),
        engine=context.engine,
        adapter=payload.model if pool.is_adapter(payload.model) else "",
        client_id=context.client_id,
        wait_s_max=wait_s_max,
        progress=progress,
        quota_names=()
        if pool.quotas is None
        else pool.quotas.names(context.tenant, context.principal.counts_as, payload.model, flow.user),
        price=FREE if pool.quotas is None else pool.quotas.price(payload.model),
    )


def _bounded_tokens(payload: Payload, pool: Pool, sequences: int, *, generates: bool) -> tuple[int, int]:
    """Return the tokens that the prompt and the output count with, bounded by the model's context.

    Raise ApiError for a request that cannot fit into the context.
    """
    asked, prompt_tokens = payload.output_tokens_max, pool.estimator.estimate(payload.prompt)
    context_tokens = pool.context_tokens_max(payload.model)
    if context_tokens is not None:
        if asked is not None and asked > context_tokens:
            message = f"{asked} output tokens are more than the model's context of {context_tokens} tokens"
            raise ApiError(Reason.CONTEXT_LENGTH_EXCEEDED, message, param=payload.output_param)
        ids, prompts = payload.prompt.token_ids()
        is_exact = ids > context_tokens * prompts and TRUNCATES not in payload.body
        if is_exact or prompt_tokens > CONTEXT_MARGIN * context_tokens * max(sequences, prompts):
            count = f"{ids} tokens, more" if is_exact else f"about {prompt_tokens} tokens, many more"
            message = f"the prompt has {count} than the model's context of {context_tokens}; shorten it"
            raise ApiError(Reason.CONTEXT_LENGTH_EXCEEDED, message, param=payload.prompt_param)
        if generates:
            prompt_tokens = min(prompt_tokens, context_tokens * sequences)
    if not generates:
        return prompt_tokens, 0
    room = OUTPUT_TOKENS_UNLIMITED if context_tokens is None else max(1, context_tokens - prompt_tokens)
    return prompt_tokens, min(room if asked is None else asked, room) * sequences


def _seconds(given: bytes) -> float:
    """Return the client's wait limit in seconds. Raise ApiError for an invalid one."""
    if not SECONDS.fullmatch(given):
        message = "x-fairgate-wait-s-max is not a number of seconds, such as 30 or 2.5"
        raise ApiError(Reason.INVALID_REQUEST, message, param="x-fairgate-wait-s-max")
    return float(given)
