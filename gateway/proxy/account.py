"""What is an answer charged? What the engine says it took, as far as that can be true, otherwise what we counted."""

from __future__ import annotations

from typing import Final

from backends.answers.sse import Dialect
from backends.base import Usage
from gateway.request.body.payload import Payload
from gateway.request.routes import Route
from policies.request import Request, ServiceTokens

CONTEXT_TOKENS_UNKNOWN: Final = 1 << 20
"""Stands for the context of a model whose engines do not say it."""
ROUNDS_MAX: Final = 16
"""An engine that calls tools itself, as it may for the Responses API, counts every round."""


def believed(
    usage: Usage | None, counted: int, request: Request, payload: Payload, route: Route, context_tokens: int | None
) -> ServiceTokens:
    """What an answer took.

    `counted`: the output as we counted it, which stands where the engine says none. The engine's own count is believed
    up to what the request allowed and the model's context has room for; its cached tokens up to those of the prompt.
    """
    prompt, output = request.prompt_tokens, request.output_tokens_max if works_on(payload, usage) else counted
    if usage is None:
        return ServiceTokens(prompt, output)
    room = context_tokens or CONTEXT_TOKENS_UNKNOWN
    if route.dialect is Dialect.RESPONSES:
        room *= ROUNDS_MAX
    if usage.prompt_tokens:
        prompt = usage.prompt_tokens
        if prompt > room:
            prompt = min(prompt, room * _prompts_max(request, payload, route))
    if usage.output_tokens:
        output = usage.output_tokens
        if output > request.output_tokens_max:  # that counts on a long prompt, so it may be too little
            output = min(output, max(counted, _output_max(request, payload, route, room)))
    return ServiceTokens(prompt, output, min(usage.cached_tokens, prompt))


def works_on(payload: Payload, usage: Usage | None) -> bool:
    """Will the engine work on in the background, as far as it has said? Then the answer is charged its maximum."""
    return payload.is_background and (usage is None or usage.output_tokens is None)


def _prompts_max(request: Request, payload: Payload, route: Route) -> int:
    """How many prompts of the full context can be in the request? Where nothing is generated, any list is one."""
    if route.generates:
        return request.sequences
    return 1 + payload.prompt.commas()


def _output_max(request: Request, payload: Payload, route: Route, room: int) -> int:
    if not route.generates:
        return 0
    asked = payload.output_tokens_max if payload.output_param else None
    if asked is not None and route.dialect is Dialect.RESPONSES:
        asked *= ROUNDS_MAX
    return (room if asked is None else min(asked, room)) * request.sequences
