"""What is a request to the pool where it asks for admission? Found anew where it moves to another pool."""

from __future__ import annotations

from gateway.pool.pool import Pool
from gateway.proxy.request_context import RequestContext
from gateway.request.within_context import within_context
from policies.request import NO_CLAIM, Flow, Request

__all__ = ["admission_request"]


def admission_request(context: RequestContext, pool: Pool) -> Request:
    """The request as this pool's models and engines have it. What it was to the pool before (`context.request`) stays,
    as far as that does not depend on them.

    Raises ApiError for what no context there has room for.
    """
    payload, before, generates = context.payload, context.request, context.route.generates
    sequences = payload.sequences if generates else 1
    prompt_tokens, output_tokens_max = within_context(
        payload,
        pool.estimator.estimate(payload.prompt),
        sequences,
        pool.context_tokens_max(payload.model),
        generates=generates,
    )
    if before is not None:
        flow, weight, claim, progress = before.flow, before.weight, before.claim, before.progress
        system_tokens = before.system_tokens * prompt_tokens // max(1, before.prompt_tokens)
    else:
        flow, weight, progress = Flow(context.tenant, context.app, _user_of(context)), context.principal.weight, None
        claim, system_tokens = NO_CLAIM, 0
        if pool.claims is not None:
            reading = pool.claims.read(context.headers, payload, flow, generates=generates)
            claim = reading.claim
            if reading.instruction_bytes:
                system_tokens = prompt_tokens * reading.instruction_bytes // payload.prompt.size
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
        prefix=pool.prefix_of(payload, context.tenant) if generates else (),
        adapter=payload.model if pool.is_adapter(payload.model) else "",
        client_id=context.client_id,
        progress=progress,
    )


def _user_of(context: RequestContext) -> str:
    named = context.header(b"x-fairgate-user")
    user = named.decode("utf-8", "replace") if named else context.payload.user
    return user[:128]
