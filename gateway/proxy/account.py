"""The service that an answer is charged: the engine's report, as far as it can be true, or else our own count."""

from __future__ import annotations

from typing import Final

from backends.answers.body import Usage
from backends.answers.sse import Dialect
from gateway.proxy.request_context import RequestContext
from gateway.request.body.payload import Payload
from gateway.request.routes import Route
from policies.request import Request, ServiceTokens

CONTEXT_TOKENS_UNKNOWN: Final = 1 << 20
"""Context assumed for a model whose engines report none."""
ROUNDS_MAX: Final = 16
"""Most rounds of one Responses call. An engine that calls tools itself counts the tokens of every round."""


def believed(usage: Usage | None, counted: int, request: Request, context: RequestContext) -> ServiceTokens:
    """Return the service that an answer took.

    `counted`: our count of the output, used if the engine reports none. The engine's output count is capped by the
    request's own limit and the model's context, its prompt count by the context, its cached tokens by the prompt. An
    answer in the background without a count is charged its maximum.
    """
    payload, route = context.payload, context.route
    prompt, output = request.prompt_tokens, request.output_tokens_max if works_on(payload, usage) else counted
    if usage is None:
        return ServiceTokens(prompt, output)
    room = context.serving_pool.context_tokens_max(payload.model) or CONTEXT_TOKENS_UNKNOWN
    if route.dialect is Dialect.RESPONSES:
        room *= ROUNDS_MAX
    if usage.prompt_tokens:
        prompt = usage.prompt_tokens
        if prompt > room:
            # Where nothing is generated, each item of a list may be a prompt.
            prompts_max = request.sequences if route.generates else 1 + payload.prompt.commas()
            prompt = min(prompt, room * prompts_max)
    if usage.output_tokens:
        output = usage.output_tokens
        if output > request.output_tokens_max:  # this limit assumes an estimated prompt, so it may be too low
            output = min(output, max(counted, _output_max(request, payload, route, room)))
    return ServiceTokens(prompt, output, min(usage.cached_tokens, prompt))


def works_on(payload: Payload, usage: Usage | None) -> bool:
    """Return whether the engine works on in the background, as far as it has reported."""
    return payload.is_background and (usage is None or usage.output_tokens is None)


def _output_max(request: Request, payload: Payload, route: Route, room: int) -> int:
    """Return the most output tokens that the answer can have, in all sequences."""
    if not route.generates:
        return 0
    asked = payload.output_tokens_max if payload.output_param else None
    if asked is not None and route.dialect is Dialect.RESPONSES:
        asked *= ROUNDS_MAX
    return (room if asked is None else min(asked, room)) * request.sequences
