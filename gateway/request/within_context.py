"""The tokens that a request counts with, bounded by its model's context."""

from __future__ import annotations

from typing import Final

from gateway.http.errors import ApiError, Reason
from gateway.request.body.payload import Payload

OUTPUT_TOKENS_UNLIMITED: Final = 1 << 20
"""Output limit of a request without limits, where the model's context is unknown."""
CONTEXT_MARGIN: Final = 4
"""Factor by which an estimated prompt must exceed the context to be refused; the engine judges shorter ones."""
TRUNCATES: Final = b'"truncate_prompt_tokens"'
"""Field by which vLLM shortens a prompt."""


def within_context(
    payload: Payload, prompt_tokens: int, sequences: int, context_tokens: int | None, *, generates: bool
) -> tuple[int, int]:
    """Return the tokens that the prompt and the output count with, bounded by the model's context.

    Raise ApiError for a request that cannot fit into the context.
    """
    asked = payload.output_tokens_max
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
