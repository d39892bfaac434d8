"""Which fields does each API have? An engine reads those of the API that was called, and so do we.

A field of another API that stands in the body is without effect there, so nothing may be counted by it.
"""

from __future__ import annotations

from typing import Final

from gateway.request.fields import Fields

NAMES: Final = Fields.__struct_fields__


class Api:
    """What one API reads.

    Attributes:
        limits: how long an answer may be; the first one that is given counts.
        counts: how many answers are asked for.
        prompt: what becomes prompt, as chat templates put it: what requests of one app have in common comes first.
        conversation: which of these holds the turns of a conversation, if any.
    """

    __slots__ = ("conversation", "counts", "limits", "prompt", "prompt_at")

    def __init__(
        self,
        *prompt: str,
        limits: tuple[str, ...] = (),
        counts: tuple[str, ...] = (),
        conversation: str = "",
    ) -> None:
        self.prompt = prompt
        self.prompt_at = tuple([NAMES.index(name) for name in prompt])
        self.limits = limits
        self.counts = counts
        self.conversation = conversation


CHAT: Final = Api(
    *("tools", "documents", "input_ids", "messages"),
    limits=("max_completion_tokens", "max_tokens"),
    counts=("n",),
    conversation="messages",
)
COMPLETIONS: Final = Api("prompt", limits=("max_tokens",), counts=("n", "best_of"))
RESPONSES: Final = Api("tools", "instructions", "input", limits=("max_output_tokens",), conversation="input")
MESSAGES: Final = Api("tools", "system", "messages", limits=("max_tokens",), conversation="messages")
AUDIO: Final = Api()
"""A form with a file in it."""
ONE_PASS: Final = Api("query", "documents", "text_2", "text_1", "messages", "prompt", "input")
"""Embeddings, scores and the like: nothing is generated."""
TOKENS: Final = Api("tools", "messages", "prompt")
"""What only turns text into tokens or back."""
OTHER: Final = Api(
    *("tools", "system", "instructions", "query", "documents", "text_2", "text_1", "input_ids"),
    *("messages", "prompt", "input"),
    counts=("n", "best_of"),
    conversation="messages",
)
"""Nobody knows what it reads, so no limit in it is believed."""
