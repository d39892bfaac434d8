"""A real llama.cpp with a tiny model of random weights, behind a tap that logs who was served. Needs the extra `llama`.

llama.cpp's log knows nothing of tenants, so the tap stands directly before it, behind every gateway: a request arrives
when it reaches the tap, starts with its first token, and each piece of the stream is a token. Prompt tokens count at
the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tenantbench.engine_model import Profile
from tenantbench.engine_server import MODEL
from tenantbench.events import Event, content_of, request_of
from tenantbench.gateway import free_port

LAYERS, WIDTH, HEADS = 8, 256, 4
PRINTABLE = range(3 + 0x20, 3 + 0x7F)


def make_model(path: Path, context: int) -> None:
    """Write a Llama with a vocabulary of bytes: one character is one token."""
    import gguf  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import numpy as np

    feed = 2 * WIDTH
    tokens = [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
    writer: Any = gguf.GGUFWriter(str(path), "llama")
    terms: dict[str, Any] = {
        "name": MODEL, "context_length": context, "embedding_length": WIDTH, "block_count": LAYERS, "file_type": 0,
        "feed_forward_length": feed, "head_count": HEADS, "head_count_kv": HEADS, "layer_norm_rms_eps": 1e-5,
        "rope_dimension_count": WIDTH // HEADS, "vocab_size": len(tokens), "tokenizer_model": "llama",
        "token_list": tokens, "token_scores": [0.0] * len(tokens), "token_types": [2, 3, 3, *[6] * 256],
        "bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0,
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }  # fmt: skip
    for name, value in terms.items():
        getattr(writer, f"add_{name}")(value)
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (len(tokens), WIDTH),
        "output_norm": (WIDTH,),
        "output": (len(tokens), WIDTH),
    }
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        shapes |= {f"{block}.{name}_norm": (WIDTH,) for name in ("attn", "ffn")}
        shapes |= {f"{block}.attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
        shapes |= {
            f"{block}.ffn_gate": (feed, WIDTH),
            f"{block}.ffn_up": (feed, WIDTH),
            f"{block}.ffn_down": (WIDTH, feed),
        }
    for name, shape in shapes.items():
        weights = (random.standard_normal(shape) * 0.05).astype(np.float32)
        if name == "output":  # among the 40 likeliest tokens is no end, and no byte that is no character
            weights[: PRINTABLE[0]] = weights[PRINTABLE[-1] + 1 :] = 0.0
        writer.add_tensor(f"{name}.weight", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def serve(model: Path, profile: Profile, port: int) -> Any:
    """Start llama.cpp, whose threads serve while the result lives."""
    import xllamacpp  # type: ignore[import-not-found,import-untyped,unused-ignore]

    make_model(model, profile.context_tokens_max)
    terms = xllamacpp.CommonParams()
    terms.model.path, terms.model_alias, terms.port = str(model), {MODEL}, port
    terms.n_parallel, terms.n_ctx, terms.cpuparams.n_threads = profile.slots, profile.kv_tokens, 1
    terms.endpoint_metrics = terms.endpoint_slots = True
    return xllamacpp.Server(terms)


class Tap:
    """Passes requests on to an engine and logs them as the simulated engine does."""

    def __init__(self, profile: Profile, url: str = "") -> None:
        self._profile = profile
        self._url = url
        self._events: list[Event] = []
        self._waiting: set[str] = set()
        self._running: dict[str, int] = {}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.cleanup_ctx.append(self._lifespan)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/tenantbench/log", self._log)
        app.router.add_get("/{path:.*}", self._pass)
        return app

    async def _lifespan(self, app: web.Application) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            connector, no_limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
            self._http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=no_limit))
            if not self._url:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tenantbench-")))
                self._server = serve(folder / f"{MODEL}.gguf", self._profile, port := free_port())
                self._url = f"http://127.0.0.1:{port}"
            yield

    def _log_event(self, kind: str, request: str, **fields: Any) -> None:
        now = asyncio.get_running_loop().time()
        self._events.append(Event(kind, now, request, **fields))
        held, waiting = sum(self._running.values()), len(self._waiting)
        self._events.append(Event("state", now, running=len(self._running), waiting=waiting, kv_tokens=held))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        text = "\n".join(str(message.get("content", "")) for message in body.get("messages", []))
        name, tenant = request_of(text)
        output = 0
        self._waiting.add(name)
        self._log_event("arrive", name, tenant=tenant, prompt=len(text))
        try:
            async with self._http.post(f"{self._url}/v1/chat/completions", json=body) as upstream:
                response = web.StreamResponse(status=upstream.status, headers={"Content-Type": upstream.content_type})
                await response.prepare(request)
                async for line in upstream.content:
                    if upstream.status == 200 and content_of(line):
                        if not output:
                            self._waiting.discard(name)
                            self._running[name] = len(text)
                            self._log_event("start", name, tenant=tenant)
                        prompt = 0 if output else len(text)
                        output += 1
                        self._running[name] += 1
                        self._log_event("serve", name, tenant=tenant, prompt=prompt, output=1)
                    await response.write(line)
                return response
        finally:
            self._waiting.discard(name)
            self._running.pop(name, None)
            self._log_event("stop", name, tenant=tenant, output=output)

    async def _pass(self, request: web.Request) -> web.Response:
        async with self._http.get(f"{self._url}{request.path_qs}") as upstream:
            return web.Response(status=upstream.status, body=await upstream.read(), content_type=upstream.content_type)

    async def _log(self, request: web.Request) -> web.Response:
        events, self._events = self._events, []
        idle = not (self._running or self._waiting)
        return web.json_response({"idle": idle, "events": [event.row() for event in events]})
