"""An engine in C, so that it costs less than what is measured: nginx's echo module answers as vLLM does."""

# The files below are a few bytes each and are touched before any load runs.
# ruff: noqa: ASYNC240

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.ports import free_port
from bench.stack import BenchError, nginx

PROXY_CORE, OTHER_CORE = 0, 1
MODULES = ("/usr/lib/nginx/modules/ngx_http_echo_module.so", "/usr/share/nginx/modules/ngx_http_echo_module.so")
MODEL = "bench"
CREATED = 1_790_000_000
ANSWER_ID = "chatcmpl-0123456789abcdef0123456789abcdef"
TAIL_EVENTS = 4  # role, finish, usage, [DONE]: what a stream has beside its content


@dataclass(frozen=True, slots=True)
class Case:
    """One load: what clients send, what the engine answers, and on how many connections at once.

    `events` 0: an answer that is not streamed. `pace_s`: between two events. `spread_ms`: over which streams begin.
    """

    name: str
    connections: int
    body_bytes: int = 1000
    events: int = 0
    pace_s: float = 0.0
    spread_ms: int = 0
    text: str = ""

    def body(self) -> str:
        """A chat request of about `body_bytes`, unless `text` is one."""
        if self.text:
            return self.text
        words = "the quick answer to every question is a good deal longer than the question itself was "
        message = {"role": "user", "content": (words * (self.body_bytes // len(words) + 1))[: self.body_bytes - 130]}
        fields = {"model": MODEL, "messages": [message], "max_tokens": self.events or 100, "stream": self.events > 0}
        return json.dumps(fields)


def events(count: int) -> list[str]:
    """A stream as vLLM sends it: role, content, finish, usage, [DONE]; `count` in all, of about 250 bytes."""

    def chunk(**fields: Any) -> str:
        head = {"id": ANSWER_ID, "object": "chat.completion.chunk", "created": CREATED, "model": MODEL}
        return f"data: {json.dumps(head | {'choices': [], 'usage': None} | fields, separators=(',', ':'))}\n\n"

    def choice(delta: dict[str, str], finish: str | None = None) -> list[dict[str, Any]]:
        ends = {"logprobs": None, "finish_reason": finish, "stop_reason": None, "token_ids": None}
        return [{"index": 0, "delta": delta, **ends}]

    words = count - TAIL_EVENTS
    content = [chunk(choices=choice({"content": f" word{n:02d}"})) for n in range(words)]
    used = {"prompt_tokens": 170, "total_tokens": 170 + words, "completion_tokens": words}
    first = chunk(choices=choice({"role": "assistant", "content": ""}))
    last = chunk(choices=choice({"content": ""}, "length"))
    return [first, *content, last, chunk(usage=used), "data: [DONE]\n\n"]


def completion() -> str:
    """A reply that is not streamed, of about 600 bytes."""
    content = "a word and another " * 12
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "tool_calls": []}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    used = {"prompt_tokens": 170, "total_tokens": 230, "completion_tokens": 60, "prompt_tokens_details": None}
    head = {"id": ANSWER_ID, "object": "chat.completion", "created": CREATED, "model": MODEL}
    return json.dumps(head | {"choices": [choice], "usage": used})


@contextlib.asynccontextmanager
async def echo_upstream(case: Case) -> AsyncIterator[str]:
    """Serves one case's answers on a free port, on the core the proxy does not use."""
    found = [path for path in MODULES if Path(path).exists()]
    if not found:
        raise BenchError("nginx has no echo module: install libnginx-mod-http-echo")
    port = free_port()
    async with nginx(_server(port, case), port, "/health", f"load_module {found[0]};", OTHER_CORE):
        yield f"http://127.0.0.1:{port}"


def _server(port: int, case: Case) -> str:
    """One model, answered from nginx's memory."""
    kind = "text/event-stream" if case.events else "application/json"
    answers = [] if case.events else [f"return 200 {_quoted(completion())};"]
    for event in events(case.events) if case.events else []:
        answers += [f"echo -n {_quoted(event)};", "echo_flush;"]
        if case.pace_s:
            answers.append(f"echo_sleep {case.pace_s};")
    models = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 32768}]})
    return f"""
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location = /health {{ return 200; }}
        location = /v1/models {{ default_type application/json; return 200 {_quoted(models)}; }}
        location = /v1/chat/completions {{
            default_type {kind};
            {" ".join(answers)}
        }}
    }}
    """


def _quoted(text: str) -> str:
    """A string of an nginx configuration."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
