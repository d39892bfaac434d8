"""The bytes of vLLM 0.32's answers in the APIs that `fairgate sim` does not have: Responses, Messages, embeddings."""

from __future__ import annotations

import secrets
from typing import Any, Final

import msgspec

from backends.simulated.answer_formats import ChatAnswer, SimulatedAnswer
from backends.simulated.calls import CallRefusedError, Endpoint, SimulatedCall, render_chat, required, texts

ABORT = "abort"
"""Finish reason of an answer aborted before its first token by a shutdown."""
_dumps = msgspec.json.encode


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
    """An answer to /v1/responses. The events of its stream are numbered."""

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

    def error_event(self, error: CallRefusedError) -> bytes:
        raise AssertionError("0.32 breaks the connection instead, as `FaultyEngine.at` does")


class MessagesAnswer(SimulatedAnswer):
    """An answer to /v1/messages, the API of Anthropic."""

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

    def error_event(self, error: CallRefusedError) -> bytes:
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


ALL_FORMATS: Final[tuple[type[SimulatedAnswer], ...]] = (
    ChatAnswer, SimulatedAnswer, ResponsesAnswer, MessagesAnswer, EmbeddingsAnswer,
)  # fmt: skip
