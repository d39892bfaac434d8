"""The bytes of vLLM 0.32's answers to chats and completions: for a token, an end, a whole answer."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any, ClassVar

import msgspec

from backends.simulated.calls import CHAT, COMPLETION, CallRefusedError, Endpoint, SimulatedCall

_WORDS = (
    " the", " queue", " gives", " each", " tenant", " a", " fair", " share", " of", " every", " step", " and", " no",
)  # fmt: skip
_FINGERPRINT = "vllm-0.32.0-simulated"
_DONE = b"data: [DONE]\n\n"
_dumps = msgspec.json.encode


class SimulatedAnswer:
    """An answer to /v1/completions under construction, which the answers of other endpoints extend.

    Choice i belongs to prompt i // n; `finish[i]` is None while the choice runs.

    Attributes:
        transport: that of a stream's client; None for an answer that is sent whole.
        done: set when the answer is complete.
    """

    endpoint: ClassVar[Endpoint] = COMPLETION
    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, call: SimulatedCall) -> None:
        self.call = call
        self.id = self.id_prefix + secrets.token_hex(8)
        self.created = int(time.time())
        choices = len(call.output_tokens)
        self.emitted = [0] * choices
        self.finish: list[str | None] = [None] * choices
        self.cached_tokens = 0
        self.prompt_tokens = sum(prompt.tokens for prompt in call.prompts)
        self.request_ids: list[str] = []
        """Requests in the engine that still run for this answer."""
        self.done = asyncio.Event()
        self.transport: asyncio.Transport | None = None
        self._first_words = [call.prompts[i // call.n].digest + i for i in range(choices)]

    def add_token(self, choice: int) -> bytes:
        """Add a token to a choice. Return its bytes for the stream."""
        count = self.emitted[choice] = self.emitted[choice] + 1
        if count == self.call.output_tokens[choice]:
            self.finish[choice] = "length" if count == self.call.max_tokens else "stop"
        if not self.call.stream:
            return b""
        begin = self.begin(choice) if count == 1 else b""
        return begin + self.token(choice, self.word(choice, count), self.finish[choice])

    def write(self, events: bytes) -> None:
        """Write events as one HTTP chunk. For a slow reader the transport buffers at most a context length of events.

        The write runs for every token, so it goes to the transport directly, without a task switch.
        """
        if self.transport is not None and events and not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(events), events))

    def word(self, choice: int, count: int) -> str:
        """Return the text of a choice's token number `count`, from 1. An end-of-sequence token has no text."""
        if count == self.call.output_tokens[choice] and self.finish[choice] == "stop":
            return ""
        return _WORDS[(self._first_words[choice] + count) % len(_WORDS)]

    def text(self, choice: int) -> str:
        """Return a choice's whole text so far, streamed or not."""
        return "".join(self.word(choice, count) for count in range(1, self.emitted[choice] + 1))

    def usage(self) -> dict[str, Any]:
        """Return the usage in the words of the OpenAI completions API."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + sum(self.emitted),
            "completion_tokens": sum(self.emitted),
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def begin(self, choice: int) -> bytes:
        """Return the events that precede a choice's first token."""
        return b""

    @staticmethod
    def error_body(error: CallRefusedError) -> bytes:
        """Return the body of a refusal."""
        fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.status}
        return _dumps({"error": fields})

    def error_event(self, error: CallRefusedError) -> bytes:
        """Return the event of a refusal after the 200."""
        return b"data: " + self.error_body(error) + b"\n\n" + _DONE

    def token(self, choice: int, word: str, finish: str | None) -> bytes:
        """Return the event of one token."""
        return self._chunk(choice, self._choice(word, finish))

    def _choice(self, word: str, finish: str | None) -> dict[str, Any]:
        ends = {"finish_reason": finish, "stop_reason": None, "prompt_token_ids": None, "token_ids": None}
        return {"text": word, "logprobs": None, **ends}

    def _chunk(self, index: int, choice: dict[str, Any]) -> bytes:
        chunk = {**self._head(self.chunk_object), "choices": [{"index": index, **choice}]}
        return b"data: " + _dumps(chunk) + b"\n\n"

    def _head(self, object_: str) -> dict[str, Any]:
        return {"id": self.id, "object": object_, "created": self.created, "model": self.call.model}

    def end(self) -> bytes:
        """Return the events that end the stream after the last choice."""
        if not self.call.include_usage:
            return _DONE
        usage = {"choices": [], "usage": self.usage(), "system_fingerprint": _FINGERPRINT}
        return b"data: " + _dumps(self._head(self.chunk_object) | usage) + b"\n\n" + _DONE

    def whole(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        return {
            **self._head(self.object),
            "choices": [
                {"index": i, **self._content(i), "logprobs": None, "finish_reason": self.finish[i], "stop_reason": None}
                for i in range(len(self.emitted))
            ],
            "system_fingerprint": _FINGERPRINT,
            "usage": self.usage(),
        }

    def _content(self, choice: int) -> dict[str, Any]:
        return {"text": self.text(choice)}


class ChatAnswer(SimulatedAnswer):
    """An answer to /v1/chat/completions."""

    endpoint = CHAT
    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def begin(self, choice: int) -> bytes:
        role = {"role": "assistant", "content": ""}
        return self._chunk(choice, {"delta": role, "logprobs": None, "finish_reason": None})

    def _choice(self, word: str, finish: str | None) -> dict[str, Any]:
        ends = {"finish_reason": finish, "token_ids": None}
        if finish is not None:
            ends = {"finish_reason": finish, "stop_reason": None, "token_ids": None}
        return {"delta": {"content": word}, "logprobs": None, **ends}

    def _content(self, choice: int) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": self.text(choice), "refusal": None}}
