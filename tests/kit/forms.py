"""Bodies that steer an engine, and forms as clients write them."""

from __future__ import annotations

from typing import Any

from tests.gateway.live import MODEL

STEERING: dict[str, Any] = {
    "priority": -5,
    "cache_salt": "mine",
    "kv_transfer_params": {"do_remote_prefill": True},
    "vllm_xargs": {"a": 1},
    "request_id": "forged",
    "data_parallel_rank": 3,
    "ec_transfer_params": {},
    "session_id": "another's",
    "stream_interval": 1000,
    "kv_hints": {"protocol_version": "1.0", "actions": [{"action_type": "kv.fetch"}]},
    "agent_hint": {"session_id": "another's", "cache_control": {"ttl": 3600}},
    # of SGLang
    "rid": "another's",
    "extra_key": "x",
    "session_params": {"id": "another's"},
    "routed_dp_rank": 0,
    "disagg_prefill_dp_rank": 0,
    "bootstrap_host": "10.0.0.1",
    "bootstrap_port": 8998,
    "bootstrap_room": 1,
    "custom_logit_processor": '{"callable": "80049"}',
    "lora_path": "another's",
    "ngram_corpus_id": "another's",
    "custom_labels": {"a": "b"},
    # of llama.cpp and TensorRT-LLM
    "id_slot": 0,
    "disaggregated_params": {},
    "kv_hint": {},
}


CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
AUDIO = "/v1/audio/transcriptions"
FORM = "multipart/form-data; boundary=x"


def part(name: str, value: str = "v", more: str = "") -> bytes:
    return f'--x\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n{value}\r\n'.encode()


FILE = part("file", "RIFF\r\n--y\r\n\r\n", '; filename="a \\"b\\".wav"\r\nContent-Type: audio/wav')
END = b"--x--\r\n"
UPLOAD = part("model", MODEL) + FILE + part("stream", "false") + END
_FILE_FIRST = FILE.replace(b'name="file"; filename="a \\"b\\".wav"', b'filename="a.wav"; name="file"')
LEGAL: dict[str, tuple[str, bytes]] = {
    "curl": (FORM, part("model", MODEL) + part("file", "x", '; filename="a"\r\nContent-Type: audio/x') + END),
    ".NET": (
        'multipart/form-data; boundary="x"',
        UPLOAD.replace(b'name="model"', b"name=model").replace(b'"stream"', b"stream"),
    ),
    "two names": (FORM, part("model", MODEL) + part("file", "x", "; filename=\"a\"; filename*=utf-8''%61") + END),
    "lower case, no last line end": (FORM, UPLOAD.replace(b"Content-D", b"content-d")[:-2]),
    "charset": ("multipart/form-data; charset=utf-8; boundary=x", UPLOAD),
    "line ends before it": (FORM, b"\r\n\r\n" + UPLOAD),
    "the file's name first": (FORM, part("model", MODEL) + _FILE_FIRST + END),
    "a size": (FORM, part("model", MODEL, "; size=9") + FILE + END),
    "two spaces": ("multipart/form-data;  boundary=x", UPLOAD.replace(b"form-data; name", b"form-data;  name")),
    "a tab": ("multipart/form-data;\tboundary=x", UPLOAD.replace(b"form-data; name", b"form-data;\tname")),
    "spaces behind the colon": (FORM, UPLOAD.replace(b"Disposition: ", b"Disposition: \t ")),
    "no space": ("multipart/form-data;boundary=x", UPLOAD.replace(b"form-data; name", b"form-data;name")),
    "a semicolon at the end": ("multipart/form-data; boundary=x;", UPLOAD),
    "a boundary of two words": ('multipart/form-data; boundary="a b"', UPLOAD.replace(b"--x", b"--a b")),
    "another charset": ("multipart/form-data; boundary=x; charset=iso-8859-1", UPLOAD),
    "streamed": (FORM, UPLOAD.replace(b"false", b"true")),
}
