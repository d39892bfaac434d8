"""Each kind of body, and what vLLM's own server answers to it: the one table of what a client gets without fairgate.

`tests/gateway/test_bodies_arrive.py` asks fairgate before `strict`, which reads bodies as vLLM does; `tests/vllm` asks
the real vLLM 0.32, itself and behind fairgate. Where fairgate answers otherwise, docs/apis.md says so.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from tests.gateway.capture import Seen

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
JSON = {"content-type": "application/json"}
MODEL = "MODEL"
"""Stands for the model's name in a body."""


class Row(NamedTuple):
    """A request, and its status directly and through fairgate."""

    path: str
    body: bytes
    direct: int
    through: int
    headers: Mapping[str, str] = JSON

    def named(self, model: str) -> bytes:
        """The body, with this model's name for `MODEL`, in whatever encoding."""
        body = self.body
        for encoding in ("utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"):
            body = body.replace(MODEL.encode(encoding), model.encode(encoding))
        return body


def chat(more: str = "", content: str = "hi", limit: str = '"max_tokens":2,') -> str:
    """A chat request with more members, as JSON."""
    message = f'"messages":[{{"role":"user","content":"{content}"}}]'
    return f'{{"model":"{MODEL}",{limit}{more and more + ","}{message}}}'


def _chats(status: int, *members: str, through: int | None = None, limit: str = '"max_tokens":2,') -> dict[str, Row]:
    return {
        each: Row(CHAT, chat(each, limit=limit).encode(), status, status if through is None else through)
        for each in members
    }


def _others(path: str, status: int, *members: str) -> dict[str, Row]:
    prompt = {
        COMPLETIONS: '"prompt":"hi"',
        RESPONSES: '"input":"hi"',
        MESSAGES: '"messages":[{"role":"user","content":"hi"}]',
    }[path]
    return {
        f"{path} {each}": Row(path, f'{{"model":"{MODEL}",{prompt},{each}}}'.encode(), status, status)
        for each in members
    }


PLAIN = chat().encode()


def _large(*members: str) -> bytes:
    """A completion of 300 kB: a body has one verdict, whatever its size."""
    pad = '"pad":"' + "x" * 300_000 + '"'
    return f'{{"model":"{MODEL}","max_tokens":2,{",".join((*members, pad))}}}'.encode()


NOT_JSON = {
    "half a surrogate pair": Row(CHAT, chat(content="cut \\ud83d").encode(), 400, 400),
    "half a surrogate pair, large": Row(COMPLETIONS, _large('"prompt":"cut \\ud83d"'), 400, 400),
    "a raw line end in a text": Row(CHAT, chat(content="a\nb").encode(), 400, 400),
    "a raw line end in a text, large": Row(COMPLETIONS, _large('"prompt":"a\nb"'), 400, 400),
    "NaN for a temperature": Row(CHAT, chat('"temperature":NaN').encode(), 400, 400),
    "NaN for a temperature, large": Row(COMPLETIONS, _large('"prompt":"hi"', '"temperature":NaN'), 400, 400),
    "not UTF-8": Row(CHAT, chat(content="\xff").encode("latin-1"), 400, 400),
    "not closed": Row(CHAT, PLAIN[:-1], 400, 400),
    "something behind it": Row(CHAT, PLAIN + b"}", 400, 400),
    "nothing": Row(CHAT, b"", 400, 400),
    "a list": Row(CHAT, b"[]", 400, 400),
    "null": Row(CHAT, b"null", 400, 400),
    "too deep": Row(CHAT, chat('"x":' + "[" * 60_000 + "]" * 60_000).encode(), 400, 400),
    "compressed": Row(CHAT, gzip.compress(PLAIN), 400, 415, {**JSON, "content-encoding": "gzip"}),
}
DIFFERENT = {
    # Python's JSON reader takes them anywhere, and vLLM refuses them where it uses the field.
    **_chats(200, '"unused":"\\ud83d"', '"unused":NaN', through=400),
    **_chats(200, '"max_tokens":" 5 "', through=400, limit=""),
}
ENCODINGS = {
    encoding: Row(CHAT, chat().encode(encoding), 200, 200)
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le")
}
LABELS = {
    "application/json; charset=utf-8": Row(CHAT, PLAIN, 200, 200, {"content-type": "application/json; charset=utf-8"}),
    "APPLICATION/JSON": Row(CHAT, PLAIN, 200, 200, {"content-type": "APPLICATION/JSON"}),
    "text/plain": Row(CHAT, PLAIN, 400, 400, {"content-type": "text/plain"}),
    "identity": Row(CHAT, PLAIN, 200, 200, {**JSON, "content-encoding": "identity"}),
}

ROWS: dict[str, Row] = {
    **_chats(200, *(f'"max_tokens":{n}' for n in ("5.0", "1e1", '"5"', '"5.0"', "true", "null")), limit=""),
    **_chats(400, *(f'"max_tokens":{n}' for n in ("5.5", '"x"', "0", "-1", "[]")), limit=""),
    **_chats(200, '"max_completion_tokens":"5"', limit=""),
    **_chats(400, '"max_completion_tokens":0', limit=""),
    **_chats(200, '"n":1.0', '"n":"1"', '"n":true', '"n":null', '"user":null', '"temperature":"0.5"'),
    **_chats(400, '"n":0', '"n":1.5', '"user":5', '"user":true', '"n":"x"'),
    **_chats(200, *(f'"stream":{flag}' for flag in ("1", "0", '"true"', '"YES"', '"off"', "1.0", "null"))),
    **_chats(400, '"stream":2', '"stream":"maybe"', '"stream":[]', '"stream":""'),
    **_chats(200, *(f'"stream":true,"stream_options":{{"include_usage":{flag}}}' for flag in ("1", '"true"', '"n"'))),
    **_chats(400, '"stream":true,"stream_options":{"include_usage":"x"}', '"stream":true,"stream_options":"x"'),
    "model null": Row(CHAT, PLAIN.replace(b'"MODEL"', b"null"), 200, 200),
    "no model": Row(CHAT, PLAIN.replace(b'"model":"MODEL",', b""), 200, 200),
    "model a number": Row(CHAT, PLAIN.replace(b'"MODEL"', b"5"), 400, 400),
    "model twice": Row(CHAT, b'{"model":"other",' + PLAIN[1:], 200, 200),
    "spaces around it": Row(CHAT, b" \r\n\t" + PLAIN + b"\n ", 200, 200),
    "deep": Row(CHAT, chat('"x":' + "[" * 400 + "]" * 400).encode(), 200, 200),
    **NOT_JSON,
    **DIFFERENT,
    **ENCODINGS,
    **LABELS,
    **_others(COMPLETIONS, 200, '"echo":true,"max_tokens":0', '"echo":true,"max_tokens":0,"logprobs":1'),
    **_others(COMPLETIONS, 200, '"max_tokens":"2"', '"max_tokens":1,"n":"2"'),
    **_others(COMPLETIONS, 400, '"max_tokens":0', '"max_tokens":-1'),
    **_others(RESPONSES, 200, '"max_output_tokens":"3"', '"max_output_tokens":3.0', '"stream":"1"'),
    **_others(RESPONSES, 400, '"max_output_tokens":0', '"max_output_tokens":-1'),
    **_others(MESSAGES, 200, '"max_tokens":"3"', '"max_tokens":3.0,"stream":"false"'),
    **_others(MESSAGES, 400, '"max_tokens":0', '"max_tokens":5.5'),
}


# --- a server that reads bodies as vLLM does ---


class _Options(BaseModel):
    include_usage: bool | None = None


class _Asked(BaseModel):
    """The fields that vLLM declares so, for all of its APIs; pydantic reads them in its lax mode."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: Any = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    n: int | None = None
    stream: bool | None = False
    stream_options: _Options | None = None
    user: str | None = None
    temperature: float | None = None
    echo: bool | None = False


def strict(seen: Seen) -> int:
    """The status that vLLM would answer with."""
    kind = seen.headers.get("content-type", "").partition(";")[0].lower()
    if kind != "application/json":
        return 400
    try:
        asked = _Asked.model_validate(json.loads(seen.body))
    except (ValueError, ValidationError, RecursionError):
        return 400
    if json.loads(seen.body) is None or not math.isfinite(asked.temperature or 0):
        return 400
    limits = [asked.max_tokens, asked.max_completion_tokens, asked.max_output_tokens]
    least = 0 if asked.echo else 1
    if any(limit is not None and limit < least for limit in limits) or (asked.n is not None and asked.n < 1):
        return 400
    try:
        json.dumps([asked.messages, asked.prompt], ensure_ascii=False).encode()
    except UnicodeEncodeError:  # what a tokenizer makes of half a surrogate pair
        return 400
    return 200
