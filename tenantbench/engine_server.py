"""An HTTP server of the OpenAI API in front of the simulated engine. Its log is taken at `GET /tenantbench/log`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from aiohttp import web

from tenantbench.engine_model import Engine, Profile, Sequence, blocks_of
from tenantbench.events import request_of, tokens_of

MODEL = "tenantbench"
OUTPUT_TOKENS_DEFAULT = 16
FIELDS = {"id": "tenantbench", "created": 0, "model": MODEL}


def chunk(delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return f"data: {json.dumps(FIELDS | {'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n".encode()


class EngineRunner:
    """Steps an engine in the time of the event loop while there is work."""

    def __init__(self, profile: Profile) -> None:
        self.engine = Engine(profile)
        self._tokens: dict[Sequence, asyncio.Queue[int]] = {}
        self._work = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def generate(self, prompt: str, output_max: int) -> AsyncGenerator[int, None]:
        """Yield the number of each token as it is made."""
        now = asyncio.get_running_loop().time()
        request, tenant = request_of(prompt)
        sequence = Sequence(request, tenant, tokens_of(prompt), output_max, blocks_of(prompt))
        queue = self._tokens[sequence] = asyncio.Queue()
        self.engine.add(sequence, now)
        self._work.set()
        try:
            for _ in range(output_max):
                yield await queue.get()
        finally:
            del self._tokens[sequence]
            self.engine.abort(sequence, asyncio.get_running_loop().time())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        begins = loop.time()
        while True:
            if not self.engine.running and not self.engine.waiting:
                self._work.clear()
                await self._work.wait()
                begins = loop.time()
            step = self.engine.step(begins)
            begins = max(begins + step.duration_s, loop.time())  # a late timer makes the next step late, not shorter
            await asyncio.sleep(begins - loop.time())
            for sequence in step.produced:
                if sequence in self._tokens:
                    self._tokens[sequence].put_nowait(sequence.generated - 1)


class EngineServer:
    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def app(self) -> web.Application:
        app = web.Application()
        app.cleanup_ctx.append(self._lifespan)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/tenantbench/log", self._log)
        return app

    async def _lifespan(self, app: web.Application) -> AsyncIterator[None]:
        self._runner = EngineRunner(self._profile)
        yield
        await self._runner.close()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = "\n".join(str(message.get("content", "")) for message in body.get("messages", []))
        output = body.get("max_completion_tokens") or body.get("max_tokens") or OUTPUT_TOKENS_DEFAULT
        if reason := self._runner.engine.is_refused(tokens_of(prompt), int(output)):
            status = 400 if reason == "context" else 503
            return web.json_response({"error": {"message": f"refused: {reason}", "code": status}}, status=status)
        tokens = self._runner.generate(prompt, int(output))
        usage = {"prompt_tokens": tokens_of(prompt), "completion_tokens": int(output)}
        usage["total_tokens"] = sum(usage.values())
        if body.get("stream"):
            return await self._stream(request, tokens, usage, bool(body.get("stream_options")))
        text = "".join([f"{number} " async for number in tokens])
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}
        return web.json_response(FIELDS | {"object": "chat.completion", "choices": [choice], "usage": usage})

    async def _stream(
        self, request: web.Request, tokens: AsyncGenerator[int, None], usage: dict[str, Any], with_usage: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        async with contextlib.aclosing(tokens):
            async for number in tokens:
                await response.write(chunk({"content": f"{number} "}))
        await response.write(chunk({}, "length"))
        if with_usage:
            rows = FIELDS | {"object": "chat.completion.chunk", "choices": [], "usage": usage}
            await response.write(f"data: {json.dumps(rows)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "tenantbench"}
        model["max_model_len"] = self._profile.context_tokens_max
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _log(self, request: web.Request) -> web.Response:
        engine = self._runner.engine
        events, engine.events = engine.events, []
        return web.json_response({"idle": not (engine.running or engine.waiting), "events": [e.row() for e in events]})

    async def _metrics(self, request: web.Request) -> web.Response:
        """Report gauges under vLLM's names, which gateways know."""
        engine, profile = self._runner.engine, self._profile
        values = {
            "num_requests_running": ("gauge", len(engine.running)),
            "num_requests_waiting": ("gauge", len(engine.waiting)),
            "kv_cache_usage_perc": ("gauge", engine.kv_used / profile.kv_tokens),
            "num_preemptions_total": ("counter", engine.preemptions),
            "prompt_tokens_total": ("counter", engine.prompt_tokens),
            "generation_tokens_total": ("counter", engine.output_tokens),
        }
        labels = f'{{engine="0",model_name="{MODEL}"}}'
        lines = [f"# TYPE vllm:{name} {kind}\nvllm:{name}{labels} {value}" for name, (kind, value) in values.items()]
        sizes = f'block_size="16",num_gpu_blocks="{profile.kv_tokens // 16}",enable_prefix_caching="True"'
        lines.append(f'# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{engine="0",{sizes}}} 1.0')
        return web.Response(text="\n".join(lines) + "\n")
