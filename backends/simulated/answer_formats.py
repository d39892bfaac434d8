"""The bytes of vLLM 0.32's answers in each API: for a token, an end, a whole answer."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any, ClassVar, Final

import msgspec
from aiohttp import web

from backends.simulated.calls import (
    CHAT,
    COMPLETION,
    CallRefusedError,
    Endpoint,
    SimulatedCall,
    read_object,
    read_prompt,
    render_chat,
    required,
    texts,
)
from backends.simulated.engine_profiles import EngineProfile

ABORT = "abort"
"""Finish reason of an answer aborted before its first token by a shutdown."""
_WORDS = (
    " the", " queue", " gives", " each", " tenant", " a", " fair", " share", " of", " every", " step", " and", " no",
)  # fmt: skip
_FINGERPRINT = "vllm-0.32.0-simulated"
_DONE = b"data: [DONE]\n\n"
_dumps = msgspec.json.encode


class SimulatedAnswer:
    """An answer under construction. Choice i belongs to prompt i // n; `finish[i]` is None while the choice runs.

    Attributes:
        transport: that of a stream's client; None for an answer that is sent whole.
        done: set when the answer is complete.
    """

    endpoint: ClassVar[Endpoint]
    id_prefix = ""

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

    def token(self, choice: int, word: str, finish: str | None) -> bytes:
        """Return the event of one token."""
        raise NotImplementedError

    def end(self) -> bytes:
        """Return the events that end the stream after the last choice."""
        raise NotImplementedError

    def whole(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        raise NotImplementedError

    @staticmethod
    def error_body(error: CallRefusedError) -> bytes:
        """Return the body of a refusal."""
        fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.status}
        return _dumps({"error": fields})

    def error_event(self, error: CallRefusedError) -> bytes | None:
        """Return the event of a refusal after the 200, or None where 0.32 breaks the connection instead."""
        return b"data: " + self.error_body(error) + b"\n\n" + _DONE


class CompletionAnswer(SimulatedAnswer):
    """An answer to /v1/completions."""

    endpoint = COMPLETION
    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def token(self, choice: int, word: str, finish: str | None) -> bytes:
        return self._chunk(choice, self._choice(word, finish), self.emitted[choice])

    def _choice(self, word: str, finish: str | None) -> dict[str, Any]:
        ends = {"finish_reason": finish, "stop_reason": None, "prompt_token_ids": None, "token_ids": None}
        return {"text": word, "logprobs": None, **ends}

    def _chunk(self, index: int, choice: dict[str, Any], completion_tokens: int) -> bytes:
        chunk = {**self._head(self.chunk_object), "choices": [{"index": index, **choice}]}
        if self.call.continuous_usage:
            prompt_tokens = self.call.prompts[index // self.call.n].tokens
            chunk["usage"] = {
                "prompt_tokens": prompt_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
                "completion_tokens": completion_tokens,
                "completion_tokens_details": None,
            }
        return b"data: " + _dumps(chunk) + b"\n\n"

    def _head(self, object_: str) -> dict[str, Any]:
        return {"id": self.id, "object": object_, "created": self.created, "model": self.call.model}

    def end(self) -> bytes:
        # A drain that lets nothing start sends the bare end, without usage.
        if not self.call.include_usage or ABORT in self.finish:
            return _DONE
        usage = {"choices": [], "usage": self.usage(), "system_fingerprint": _FINGERPRINT}
        return b"data: " + _dumps(self._head(self.chunk_object) | usage) + b"\n\n" + _DONE

    def whole(self) -> dict[str, Any]:
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


class ChatAnswer(CompletionAnswer):
    """An answer to /v1/chat/completions."""

    endpoint = CHAT
    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def begin(self, choice: int) -> bytes:
        role = {"role": "assistant", "content": ""}
        return self._chunk(choice, {"delta": role, "logprobs": None, "finish_reason": None}, 0)

    def _choice(self, word: str, finish: str | None) -> dict[str, Any]:
        ends = {"finish_reason": finish, "token_ids": None}
        if finish is not None:
            ends = {"finish_reason": finish, "stop_reason": None, "token_ids": None}
        return {"delta": {"content": word}, "logprobs": None, **ends}

    def _content(self, choice: int) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": self.text(choice), "refusal": None}}


def _event(value: dict[str, Any]) -> bytes:
    return b"event: " + str(value["type"]).encode() + b"\ndata: " + _dumps(value) + b"\n\n"


def _responses_prompt(body: dict[str, Any]) -> list[bytes]:
    value = required(body, "input")
    messages = value if isinstance(value, list) else [{"role": "user", "content": value}]
    if body.get("instructions"):
        messages = [{"role": "system", "content": body["instructions"]}, *messages]
    return [render_chat(messages, body.get("tools"))]


def _messages_prompt(body: dict[str, Any]) -> list[bytes]:
    messages = required(body, "messages")
    if body.get("system") and isinstance(messages, list):
        messages = [{"role": "system", "content": body["system"]}, *messages]
    return [render_chat(messages, body.get("tools"))]


class ResponsesAnswer(SimulatedAnswer):
    endpoint = Endpoint("/v1/responses", _responses_prompt, ("max_output_tokens",))
    id_prefix = "resp_"

    def __init__(self, call: SimulatedCall) -> None:
        super().__init__(call)
        self._sequence_number = 0
        self._item_id = "msg_" + secrets.token_hex(8)
        self._place = {"content_index": 0, "item_id": self._item_id, "output_index": 0}

    def _emit(self, type_: str, value: dict[str, Any]) -> bytes:
        self._sequence_number += 1
        return _event({**value, "sequence_number": self._sequence_number - 1, "type": type_})

    def _part(self, text: str) -> dict[str, Any]:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "content": content, "role": "assistant", "status": status, "type": "message"}

    def _response(self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": self.id,
            "created_at": self.created,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": None,
            "metadata": None,
            "model": self.call.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0,
            "max_output_tokens": self.call.max_tokens,
            "status": status,
            "usage": usage,
        }

    def begin(self, choice: int) -> bytes:
        running = {"response": self._response("in_progress", [], None)}
        part = {**self._place, "part": {"annotations": [], "text": "", "type": "output_text", "logprobs": []}}
        return (
            self._emit("response.created", running)
            + self._emit("response.in_progress", running)
            + self._emit("response.output_item.added", {"item": self._item("in_progress", []), "output_index": 0})
            + self._emit("response.content_part.added", part)
        )

    def token(self, choice: int, word: str, finish: str | None) -> bytes:
        return self._emit("response.output_text.delta", {**self._place, "delta": word, "logprobs": []})

    def end(self) -> bytes:
        whole = {"response": self.whole()}
        if not self.emitted[0]:
            return self._emit("response.completed", whole)
        text = self.text(0)
        item = self._item("completed", [self._part(text)])
        return (
            self._emit("response.output_text.done", {**self._place, "logprobs": [], "text": text})
            + self._emit("response.content_part.done", {**self._place, "part": self._part(text)})
            + self._emit("response.output_item.done", {"item": item, "output_index": 0})
            + self._emit("response.completed", whole)  # 0.32 sends "completed" even when the status is "incomplete"
        )

    def whole(self) -> dict[str, Any]:
        status = {"length": "incomplete", ABORT: "cancelled"}.get(self.finish[0] or "", "completed")
        usage = {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.emitted[0],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.emitted[0],
        }
        return self._response(status, [self._item("completed", [self._part(self.text(0))])], usage)

    def error_event(self, error: CallRefusedError) -> bytes | None:
        return None


class MessagesAnswer(SimulatedAnswer):
    endpoint = Endpoint("/v1/messages", _messages_prompt, ("max_tokens",))
    id_prefix = "chatcmpl-"

    def begin(self, choice: int) -> bytes:
        message: dict[str, Any] = {
            "id": self.id, "type": "message", "role": "assistant", "content": [], "model": self.call.model,
            "stop_reason": None, "stop_sequence": None,
            "usage": {"input_tokens": self.prompt_tokens, "output_tokens": 0},
        }  # fmt: skip
        block = {"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0}
        return _event({"type": "message_start", "message": message}) + _event(block)

    def token(self, choice: int, word: str, finish: str | None) -> bytes:
        delta = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": word}, "index": 0}
        return _event(delta)

    def _stop_reason(self) -> str:
        return {"length": "max_tokens", ABORT: ABORT}.get(self.finish[0] or "", "end_turn")

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt_tokens,
            "output_tokens": self.emitted[0],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached_tokens,
        }

    def end(self) -> bytes:
        stop = {"stop_reason": self._stop_reason(), "stop_sequence": None}
        return (
            (_event({"type": "content_block_stop", "index": 0}) if self.emitted[0] else b"")
            + _event({"type": "message_delta", "delta": stop, "usage": self._usage()})
            + _event({"type": "message_stop"})
        )

    def whole(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": self.text(0)}],
            "model": self.call.model,
            "stop_reason": self._stop_reason(),
            "usage": self._usage(),
        }

    @staticmethod
    def error_body(error: CallRefusedError) -> bytes:
        return _dumps({"type": "error", "error": {"type": error.type, "message": error.message}})

    def error_event(self, error: CallRefusedError) -> bytes | None:
        return b"event: error\ndata: " + self.error_body(error) + b"\n\n"


class EmbeddingsAnswer(SimulatedAnswer):
    endpoint = Endpoint("/v1/embeddings", lambda body: texts(required(body, "input"), "input"))
    id_prefix = "embd-"

    def whole(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "list",
            "created": self.created,
            "model": self.call.model,
            "data": [
                {"index": i, "object": "embedding", "embedding": [(prompt.digest >> s) % 256 / 256 for s in range(8)]}
                for i, prompt in enumerate(self.call.prompts)
            ],
            "usage": {"prompt_tokens": self.prompt_tokens, "total_tokens": self.prompt_tokens, "completion_tokens": 0},
        }


FORMATS: Final[tuple[type[SimulatedAnswer], ...]] = (
    ChatAnswer, CompletionAnswer, ResponsesAnswer, MessagesAnswer, EmbeddingsAnswer,
)  # fmt: skip


async def tokenized(request: web.Request, profile: EngineProfile) -> web.Response:
    """Return the answer at /tokenize."""
    try:
        body = read_object(await request.read())
        text = str(body["prompt"]).encode() if "prompt" in body else render_chat(body.get("messages"))
    except CallRefusedError as error:
        return web.Response(status=400, body=SimulatedAnswer.error_body(error), content_type="application/json")
    count = read_prompt(text, profile.block_size).tokens
    return web.json_response({"count": count, "max_model_len": profile.max_model_len, "tokens": list(range(count))})
