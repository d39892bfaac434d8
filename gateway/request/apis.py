"""The fields that each API reads. A field of another API has no effect at the engine, so nothing may be counted by
it."""

from __future__ import annotations

from typing import Final

from gateway.request.fields import AllFields

NAMES: Final = AllFields.__struct_fields__


class Api:
    """The fields that one API reads.

    Attributes:
        limits: fields that bound the length of an answer; the first one given counts.
        counts: fields that ask for several answers.
        prompt: fields that become prompt, in the order of chat templates, which put first what requests of one app
            share.
        prompt_at: positions of these fields in `NAMES`.
        conversation: the field with the turns of a conversation, empty without one.
    """

    __slots__ = ("conversation", "counts", "limits", "prompt", "prompt_at")

    def __init__(
        self, *prompt: str, limits: tuple[str, ...] = (), counts: tuple[str, ...] = (), conversation: str = ""
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
"""No fields: an upload is a form with a file."""
ONE_PASS: Final = Api("query", "documents", "text_2", "text_1", "messages", "prompt", "input")
"""Fields of embeddings, scores and the like, which generate no tokens."""
TOKENS: Final = Api("tools", "messages", "prompt")
"""Fields of requests that turn text into tokens or back."""
OTHER: Final = Api(
    *("tools", "system", "instructions", "query", "documents", "text_2", "text_1", "input_ids"),
    *("messages", "prompt", "input"),
    counts=("n", "best_of"),
    conversation="messages",
)
"""Fields of a path that only the config names. No limit in them is believed, since the engine may read others."""
