"""CPU a proxy spends per request and per streamed chunk, as multiples of nginx in the same run.

    python -m bench.cpu [--rounds 3] [--seconds 5] [--proxies nginx,fairgate,aiohttp]

Upstream is nginx with its echo module, which answers as vLLM does; the load comes from wrk. The proxy has core 0 to
itself, everything else runs on core 1. Counted is the user and system time of the proxy's whole process tree. Cases:

- `request`: bodies of about 1 kB, not streamed, 64 connections in a closed loop, the proxy saturated;
- `chunk, burst`: 100 events as fast as they go, 16 connections;
- `chunk, 50/s`: 200 streams of 100 events, 50 events a second each, their starts spread over 2 s.

fairgate runs with everything on: keys, policy, ledger, metrics, access log to a file.
"""

# The files below are a few bytes each and are touched before any load runs.
# ruff: noqa: ASYNC240

import argparse
import asyncio
import contextlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from bench import report
from bench.load import Client
from bench.stack import (
    PROXY_START_S,
    BenchError,
    Route,
    cpu_s,
    fairgate,
    free_port,
    nginx,
    nginx_proxy,
    process,
    wait_ready,
)

PROXY_CORE, OTHER_CORE = 0, 1
MODULES = ("/usr/lib/nginx/modules/ngx_http_echo_module.so", "/usr/share/nginx/modules/ngx_http_echo_module.so")
EVENTS = 100
PACE_S = 0.02
TENANT = "bench"
COUNTED = re.compile(r"^counted (\d+) requests (\d+) bytes (\d+) errors$", re.M)


@dataclass(frozen=True, slots=True)
class Case:
    """One load: what the upstream's path is chosen by, and how wrk drives it."""

    name: str
    model: str
    stream: bool
    connections: int
    spread_ms: int


CASES = (
    Case("request", "body", stream=False, connections=64, spread_ms=0),
    Case("chunk, burst", "burst", stream=True, connections=16, spread_ms=0),
    Case("chunk, 50/s", "paced", stream=True, connections=200, spread_ms=2000),
)

WRK_SCRIPT = """
wrk.method, wrk.path = "POST", "/v1/chat/completions"
wrk.headers["Content-Type"] = "application/json"
wrk.headers["Authorization"] = "Bearer {key}"
wrk.body = [==[{body}]==]
local begun = 0
local function spread()
   begun = begun + 1
   return begun <= {connections} and math.random(0, {spread_ms}) or 0
end
if {spread_ms} > 0 then delay = spread end
function done(summary)
   local e = summary.errors
   io.write(string.format("counted %d requests %d bytes %d errors\\n", summary.requests, summary.bytes,
      e.connect + e.read + e.write + e.status + e.timeout))
end
"""


def chat_body(case: Case) -> str:
    """A request of about 1 kB."""
    words = "the quick answer to every question is a good deal longer than the question itself was "
    message = {"role": "user", "content": words * 10}
    return json.dumps({"model": case.model, "messages": [message], "max_tokens": EVENTS, "stream": case.stream})


def events(model: str) -> list[str]:
    """A stream as vLLM sends it: role, content, finish, usage, [DONE]; EVENTS in all, of about 250 bytes."""

    def chunk(**fields: Any) -> str:
        head = {"id": "chatcmpl-0123456789abcdef0123456789abcdef", "object": "chat.completion.chunk"}
        rest = {"created": 1_790_000_000, "model": model, "choices": [], "usage": None}
        return f"data: {json.dumps(head | rest | fields, separators=(',', ':'))}\n\n"

    def choice(delta: dict[str, str], finish: str | None = None) -> list[dict[str, Any]]:
        ends = {"logprobs": None, "finish_reason": finish, "stop_reason": None, "token_ids": None}
        return [{"index": 0, "delta": delta, **ends}]

    content = [chunk(choices=choice({"content": f" word{n:02d}"})) for n in range(EVENTS - 4)]
    used = {"prompt_tokens": 170, "total_tokens": 170 + EVENTS - 4, "completion_tokens": EVENTS - 4}
    first = chunk(choices=choice({"role": "assistant", "content": ""}))
    last = chunk(choices=choice({"content": ""}, "length"))
    return [first, *content, last, chunk(usage=used), "data: [DONE]\n\n"]


def completion(model: str) -> str:
    """A reply that is not streamed, of about 600 bytes."""
    message = {"role": "assistant", "content": "a word and another " * 12, "refusal": None, "tool_calls": []}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    used = {"prompt_tokens": 170, "total_tokens": 230, "completion_tokens": 60, "prompt_tokens_details": None}
    head = {"id": "chatcmpl-0123456789abcdef0123456789abcdef", "object": "chat.completion"}
    return json.dumps(head | {"created": 1_790_000_000, "model": model, "choices": [choice], "usage": used})


def quoted(text: str) -> str:
    """A string of an nginx configuration."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def upstream_server(port: int, model: str) -> str:
    """An engine look-alike: one model, answered from nginx's memory."""
    kind = "application/json" if model == "body" else "text/event-stream"
    answers = [f"return 200 {quoted(completion(model))};"] if model == "body" else []
    for event in events(model) if model != "body" else []:
        answers += [f"echo -n {quoted(event)};", "echo_flush;"]
        if model == "paced":
            answers.append(f"echo_sleep {PACE_S};")
    models = json.dumps({"object": "list", "data": [{"id": model, "object": "model", "max_model_len": 8192}]})
    return f"""
    server {{
        listen 127.0.0.1:{port};
        location = /health {{ return 200; }}
        location = /v1/models {{ default_type application/json; return 200 {quoted(models)}; }}
        location = /v1/chat/completions {{
            default_type {kind};
            {" ".join(answers)}
        }}
    }}
    """


@contextlib.asynccontextmanager
async def echo_upstream(model: str) -> AsyncIterator[str]:
    """Serves one case's answers on a free port, on the core the proxy does not use."""
    found = [path for path in MODULES if Path(path).exists()]
    if not found:
        raise BenchError("nginx has no echo module: install libnginx-mod-http-echo")
    port = free_port()
    async with nginx(upstream_server(port, model), port, "/health", f"load_module {found[0]};", OTHER_CORE):
        yield f"http://127.0.0.1:{port}"


@contextlib.asynccontextmanager
async def aiohttp_proxy(upstream_url: str) -> AsyncIterator[Route]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="fairgate-bench-") as folder:
        log = Path(folder, "aiohttp.log")
        command = [sys.executable, "-m", "bench.aiohttp_proxy", str(port), upstream_url]
        with process(command, log, PROXY_CORE) as child:
            url = f"http://127.0.0.1:{port}"
            await wait_ready(url, "/health", child, log, PROXY_START_S)
            yield Route("aiohttp", url, child.pid)


def proxy(name: str, upstream_url: str, model: str) -> contextlib.AbstractAsyncContextManager[Route]:
    """The named proxy in front of an upstream, on its core."""
    if name == "nginx":
        return nginx_proxy(upstream_url, cpu=PROXY_CORE)
    if name == "aiohttp":
        return aiohttp_proxy(upstream_url)
    return fairgate(upstream_url, {TENANT: 1}, engine_type="openai", model=model, cpu=PROXY_CORE)


async def wrk(route: Route, case: Case, seconds: float) -> tuple[int, int, int]:
    """Runs wrk against a route; returns whole replies, bytes read and errors."""
    with tempfile.TemporaryDirectory(prefix="fairgate-bench-") as folder:
        script = Path(folder, "post.lua")
        values = {"key": route.key(TENANT) or "none", "body": chat_body(case)}
        values |= {"connections": str(case.connections), "spread_ms": str(case.spread_ms)}
        text = WRK_SCRIPT
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", value)
        script.write_text(text)
        command = ["taskset", "-c", str(OTHER_CORE), shutil.which("wrk") or "wrk", "-t1", f"-c{case.connections}"]
        command += [f"-d{seconds:.0f}s", "--timeout", "30s", "-s", str(script), route.url]
        child = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1)
        out, err = await child.communicate()
    counted = COUNTED.search(out.decode())
    if counted is None:
        raise BenchError(f"wrk did not finish: {out.decode()} {err.decode()}")
    requests, read, errors = map(int, counted.groups())
    return requests, read, errors


async def reply_bytes(route: Route, case: Case) -> int:
    """How many bytes one whole reply has on this route, head and framing included."""
    client = Client(route.url)
    reader, writer = await asyncio.open_connection(client.host, client.port)
    body = chat_body(case).encode()
    auth = f"Authorization: Bearer {route.key(TENANT) or 'none'}"
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{auth}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    answer = await reader.read(-1)
    writer.close()
    if b" 200 " not in answer[:20] or (case.stream and b"[DONE]" not in answer):
        raise BenchError(f"{route.name} does not relay: {answer[:300]!r}")
    return len(answer)


async def measure(name: str, case: Case, upstream_url: str, seconds: float) -> dict[str, float]:
    """CPU microseconds per request, or per event, of one proxy under one load."""
    async with proxy(name, upstream_url, case.model) as route:
        size = await reply_bytes(route, case)
        await wrk(route, case, 1)
        before = cpu_s(route.pid)
        requests, read, errors = await wrk(route, case, seconds)
        spent_s = cpu_s(route.pid) - before
    # Streams in bytes rather than whole replies: those that wrk cut at its end have cost CPU too.
    units = read / size * EVENTS if case.stream else requests
    return {"us": spent_s / units * 1e6, "per_s": units / seconds, "busy": spent_s / seconds, "errors": errors}


def cpu_table(result: dict[str, Any]) -> str:
    heads = ["case", "proxy", "CPU", "times nginx", "handled per second", "core used", "errors"]
    rows = []
    for case, proxies in result["cases"].items():
        for name, row in proxies.items():
            ends = [f"{row['per_s']:,.0f}", f"{row['busy']:.0%}", f"{row['errors']:.0f}"]
            rows.append([case, name, f"{row['us']:.1f} us", f"{row['times_nginx']:.2f}", *ends])
    return report.table(heads, rows)


def condense(rounds: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians over rounds; the ratio to nginx is the median of the rounds' own ratios."""
    found = {}
    for name, runs in rounds.items():
        found[name] = {field: report.median([run[field] for run in runs]) for field in ("us", "per_s", "busy")}
        found[name]["errors"] = sum(run["errors"] for run in runs)
        ratios = [run["us"] / base["us"] for run, base in zip(runs, rounds.get("nginx", []), strict=False)]
        found[name]["times_nginx"] = report.median(ratios)
    return found


async def run(options: argparse.Namespace) -> None:
    names = options.proxies.split(",")
    result: dict[str, Any] = {"rounds": options.rounds, "seconds": options.seconds, "cases": {}}
    for case in CASES:
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        async with echo_upstream(case.model) as upstream_url:
            for turn in range(options.rounds):
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    rounds[name].append(await measure(name, case, upstream_url, options.seconds))
                    print(f"  {case.name}, round {turn + 1}, {name}: {rounds[name][-1]['us']:.1f} us", flush=True)
        result["cases"][case.name] = condense(rounds)
    report.save("cpu", result)
    print(f"\n{cpu_table(result)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU per request and per chunk, times nginx")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="measured per proxy, case and round")
    parser.add_argument("--proxies", default="nginx,fairgate,aiohttp")
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
