"""Large bodies of every kind that a reader could stumble over, by the path they are sent to."""

from __future__ import annotations

import json
from collections.abc import Callable

from gateway.config.sections.apps import InteractionRules
from gateway.request.apis import AUDIO as AUDIO_API
from gateway.request.body.form import read_form
from gateway.request.body.payload import read_json
from gateway.request.interaction_claim import ClaimReader
from gateway.request.routes import Routes
from policies.request import Flow
from tests.claims import claim_of
from tests.gateway.live import MODEL
from tests.kit.forms import AUDIO, CHAT, COMPLETIONS, FORM, RESPONSES

FLOW = Flow("tenant", "default", "u")
ROUTES = Routes()

Kind = tuple[str, Callable[[int], bytes]]
"""Where it is sent, and a body of so many bytes or a few more."""

_MODEL = b'"model":' + json.dumps(MODEL).encode()


def _of(before: bytes, unit: bytes, after: bytes, size: int) -> bytes:
    return b"".join((before, unit * ((size - len(before) - len(after)) // len(unit) + 1), after))


def _json(before: bytes, unit: bytes, after: bytes = b"") -> Callable[[int], bytes]:
    return lambda size: _of(b"{" + _MODEL + b',"stream":true,' + before, unit, after + b"}", size)


def _messages(before: bytes, unit: bytes, after: bytes) -> Kind:
    return CHAT, _json(b'"messages":[' + before, unit, after + b"]")


def _content(before: bytes, unit: bytes, after: bytes) -> Kind:
    return _messages(b'{"role":"user","content":' + before, unit, after + b"}")


_TEXT_PART = b'[{"type":"text","text":"'
_MARK = b'"cache_control":{"type":"ephemeral"}'
_FILE = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
_FORM_END = b'\r\n--x\r\ncontent-disposition: form-data; name="model"\r\n\r\n' + MODEL.encode() + b"\r\n--x--\r\n"

KINDS: dict[str, Kind] = {
    "one long text": _content(b'"', b"many words of it. ", b'"'),
    "line ends": _content(b'"', b"\\n", b'"'),
    "quotes": _content(b'"', b'\\"', b'"'),
    "backslashes": _content(b'"', b"\\\\", b'"'),
    "marked text": _content(_TEXT_PART, b"words ", b'",' + _MARK + b"}]"),
    "marked escapes": _content(_TEXT_PART, b"\\n", b'",' + _MARK + b"}]"),
    "marks": _content(b"[", b"{" + _MARK + b',"text":"a"},', b"1]"),
    "half marks": _content(b"[", b'{"x":1,"cache_control":{"a":{}}},', b"1]"),
    "image": _content(b'[{"url":"data:image/png;base64,', b"QUJD", b'"}]'),
    "images in a text": _content(b'"', b";base64,QUJD ", b'"'),
    "small images": _content(b"[", b'{"url":"data:image/png;base64,QUJD"},', b"1]"),
    "parts": _content(b"[", b'{"type":"text","text":"a"},', b"1]"),
    "results": _content(b"[", b'"tool_result",', b"1]"),
    "parts of results": _content(b"[", b'{"type":"tool_result","content":"a"},', b"1]"),
    "half results": _content(b"[", b'{"type":    "x","y":"tool_result"},', b"1]"),
    "turns": _messages(b"", b'{"role":"user","content":"a"},', b'{"role":"user","content":"b"}'),
    "tiny turns": _messages(b"", b"{},", b"{}"),
    "long turns": _messages(b"", b'{"role":"user","content":"' + b"w " * 40_000 + b'"},', b"{}"),
    "lists": _messages(b"", b"[],", b"[]"),
    "deep": _messages(b"", b"[" * 900 + b"]" * 900 + b",", b"1"),
    "too deep": _messages(b"", b"[", b""),
    "never closed": _content(b'"', b"a", b""),
    "members": (CHAT, _json(b'"a":1', b',"a":1')),
    "own members": (CHAT, lambda size: b"{%b}" % b",".join([b'"%x":1' % number for number in range(size // 9)])),
    "long name": (CHAT, _json(b'"', b"n", b'":1')),
    "long number": (CHAT, _json(b'"max_tokens":', b"9")),
    "long model": (CHAT, _json(b'"model":"', b"m", b'"')),
    "wide model": (CHAT, _json('"model":"\U0001f600'.encode(), b"m", b'"')),
    "metadata": (CHAT, _json(b'"metadata":{"user_id":"u","fairgate_a":"', b"m", b'"}')),
    "metadata of many": (CHAT, _json(b'"metadata":{"user_id":"u"', b',"fairgate_a":1', b"}")),
    "stream options": (CHAT, _json(b'"stream_options":{"a":0', b',"a":1', b"}")),
    "steering": (CHAT, _json(b'"messages":[],"vllm_xargs":{"a":"', b"x", b'"}')),
    "tools": (CHAT, _json(b'"tools":[0', b',{"type":"function","function":{"name":"f","parameters":{}}}', b"]")),
    "spaces": (CHAT, _json(b"", b" ", b'"messages":[]')),
    "prompt": (COMPLETIONS, _json(b'"prompt":"', b"a raw text ", b'"')),
    "prompts": (COMPLETIONS, _json(b'"prompt":["a"', b',"a"', b"]")),
    "token ids": (COMPLETIONS, _json(b'"prompt":[1', b",1", b"]")),
    "lists of token ids": (COMPLETIONS, _json(b'"prompt":[[1]', b",[1]", b"]")),
    "items": (RESPONSES, _json(b'"input":[{}', b',{"type":"function_call_output"}', b"]")),
    "upload": (AUDIO, lambda size: _of(_FILE, b"RIFF", _FORM_END, size)),
    "upload of line ends": (AUDIO, lambda size: _of(_FILE, b"\r\n--y", _FORM_END, size)),
    "form of heads": (AUDIO, lambda size: _of(b"--x\r\n", b"content-disposition: ", b"", size)),
    "form of parts": (AUDIO, lambda size: _of(b"", _FILE + b"\r\n", _FORM_END, size)),
}


def read(kind: Kind, body: bytes) -> None:
    """All that is done with a body before it goes to an engine, or `ApiError`."""
    api = ROUTES.find("POST", kind[0]).api
    if api is AUDIO_API:
        read_form(body, FORM.encode(), api)
        return
    payload = read_json(body, api)
    payload.rename("another")
    claim_of(ClaimReader(InteractionRules(), {}), [], payload, FLOW, generates=True)
    payload.ask_usage()
    payload.drop_unsent(counts_commas=True)
    assert b"cache_salt" in payload.salted("salt")[0]
