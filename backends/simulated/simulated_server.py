"""A simulated vLLM: the engine model behind vLLM's HTTP surface, in real time, for tests and demos without a GPU."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
from aiohttp import web

from backends.simulated.answer_formats import ChatAnswer, SimulatedAnswer
from backends.simulated.calls import CallRefusedError, read_call
from backends.simulated.engine_model import EngineGauges, EngineModel, EngineRequest, Step
from backends.simulated.engine_profiles import EngineProfile, profile
from backends.vllm_plugin import steps

_BODY_BYTES_MAX = 32 * 2**20
_CATCH_UP_S = 0.05
_ABORTED: tuple[None, int] = None, 0
"""Stands for the answer of a request aborted within the step."""


@dataclass(eq=False)
class SimulatedServer:
    """A server for one engine model. A model second takes `time_scale` real seconds (0: as fast as possible)."""

    formats: ClassVar[tuple[type[SimulatedAnswer], ...]] = (ChatAnswer, SimulatedAnswer)
    profile: EngineProfile
    model_names: tuple[str, ...] = field(default=("simulated",), kw_only=True)
    time_scale: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        self.scrapes = 0
        """Number of scrapes of `/metrics`."""
        self._engine = EngineModel(self.profile)
        self.gauges = EngineGauges()
        """Current values of `/metrics`."""
        self.steps = _steps_of(self.profile)
        """Reports after each step, as vLLM gives with fairgate's plug-in."""
        self.steps.unfinished = lambda: len(self._answers)
        self._answers: dict[str, tuple[SimulatedAnswer, int]] = {}
        """Answer and choice by request id."""
        self._serial = itertools.count(1)
        self._arrived = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._driver: asyncio.Task[None] | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen and return the port (a free one for 0). Raise OSError."""
        app = web.Application(client_max_size=_BODY_BYTES_MAX)
        app.add_routes(self.routes())
        # A client that disconnects reaches `_generate` as a cancellation, streaming or not.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        try:
            site = web.TCPSite(self._runner, host, port)
            await site.start()
        except OSError:
            await self._runner.cleanup()
            raise
        self._driver = asyncio.create_task(self._drive())
        return int(self._runner.addresses[0][1])

    def routes(self) -> list[web.RouteDef]:
        return [
            *(web.post(kind.endpoint.path, self._generate(kind)) for kind in self.formats),
            web.get("/v1/models", self._models),
            web.get("/health", _health),
            web.get("/version", _version),
            web.get("/metrics", self._metrics),
            web.get("/metrics/", self._metrics),
            web.get(steps.PATH, self._stream_steps),
        ]

    async def serve(self) -> None:
        """Serve until cancelled, or raise what ended the engine's loop."""
        assert self._driver is not None
        await asyncio.shield(self._driver)

    async def stop(self) -> None:
        """Drop running requests and close."""
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.gather(self._driver, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()

    async def _drive(self) -> None:
        """Run the engine's loop: one step after another while there is work. Late wake-ups are caught up with, within
        bounds."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            if not self._engine.has_work:
                self._arrived.clear()
                await self._arrived.wait()
                due = loop.time()
            await self.at("step")
            step = self._engine.step(due)
            due += step.duration_s * self.time_scale
            await asyncio.sleep(due - loop.time())
            due = max(due, loop.time() - _CATCH_UP_S)
            self._deliver(step)

    def _deliver(self, step: Step) -> None:
        """Publish the gauges of an ended step and hand out its tokens."""
        self.steps.ranks[0].scheduled_tokens = step.scheduled_tokens
        self._set_gauges()
        for request_id, cached_tokens in step.cached_tokens.items():
            answer, choice = self._answers.get(request_id, _ABORTED)
            if answer is not None and choice % answer.call.n == 0:  # a prompt's n choices count once in the usage
                answer.cached_tokens += cached_tokens
        for request_id, _ in step.tokens:
            answer, choice = self._answers.get(request_id, _ABORTED)
            if answer is not None:
                answer.write(answer.add_token(choice))
        for request_id in step.finished:
            answer, choice = self._answers.pop(request_id, _ABORTED)
            if answer is not None:
                answer.request_ids.remove(request_id)
                if not answer.request_ids:
                    if answer.call.stream:
                        answer.write(answer.end())
                    answer.done.set()

    def _generate(self, kind: type[SimulatedAnswer]) -> Any:
        async def handler(request: web.Request) -> web.StreamResponse:
            try:
                await self.at("call", request)
                call = read_call(kind.endpoint, await request.read(), self.profile, self.model_names)
                answer = kind(call)
                if call.stream:
                    return await self._stream(request, answer)
                return await self._whole(request, answer)
            except CallRefusedError as error:
                body = kind.error_body(error)
                return web.Response(status=error.status, body=body, content_type="application/json")

        return handler

    async def at(self, moment: str, request: web.Request | None = None, answer: SimulatedAnswer | None = None) -> None:
        """Hook for faulty engines, called at the moments step, call, submit, body and end."""

    def _submit(self, answer: SimulatedAnswer) -> None:
        """Submit every choice to the engine."""
        call = answer.call
        if answer.done.is_set():
            return
        serial = next(self._serial)
        for choice, tokens in enumerate(call.output_tokens):
            request_id = f"{serial}-{choice}"
            prompt = call.prompts[choice // call.n]
            self._engine.submit(EngineRequest(request_id, prompt.tokens, tokens, prompt.block_hashes))
            self._answers[request_id] = (answer, choice)
            answer.request_ids.append(request_id)
        self._arrived.set()

    def _abort(self, answer: SimulatedAnswer) -> None:
        """Free what the engine still holds for an answer that has ended or lost its client."""
        for request_id in answer.request_ids:
            if self._answers.pop(request_id, None) is not None:
                self._engine.abort(request_id)
        if not self._engine.has_work:
            self._set_gauges()

    def _set_gauges(self) -> None:
        self.gauges = gauges = self._engine.gauges()
        rank = self.steps.ranks[0]
        rank.set_usage(gauges.kv_usage)
        for name in ("running", "waiting", "preemptions_total", "prompt_tokens_total"):
            setattr(rank, name, getattr(gauges, name))
        self.steps.stepped()

    async def _stream_steps(self, request: web.Request) -> web.StreamResponse:
        listener = None if self.steps.missing else self.steps.listen()
        if listener is None:
            return web.Response(status=501, text=self.steps.missing or "too many listen already")
        response = web.StreamResponse(headers={"Content-Type": steps.CONTENT_TYPE})
        try:
            with contextlib.suppress(ConnectionResetError):  # the client disconnected
                await response.prepare(request)
                while line := await listener.get():
                    await response.write(line)
        finally:
            self.steps.leave(listener)
        return response

    async def _whole(self, request: web.Request, answer: SimulatedAnswer) -> web.StreamResponse:
        try:
            await self.at("submit", request, answer)
            self._submit(answer)
            await answer.done.wait()
        finally:
            self._abort(answer)
        await self.at("body", request, answer)
        return web.Response(body=msgspec.json.encode(answer.whole()), content_type="application/json")

    async def _stream(self, request: web.Request, answer: SimulatedAnswer) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        answer.transport = request.transport
        try:
            await self.at("submit", request, answer)
            self._submit(answer)
            await answer.done.wait()
            await self.at("end", request, answer)
        except CallRefusedError as error:
            answer.write(answer.error_event(error))
        finally:
            self._abort(answer)
        await response.write_eof()
        return response

    def cards(self) -> list[dict[str, Any]]:
        """Return the list of models."""
        card = {"object": "model", "created": 0, "owned_by": "vllm", "max_model_len": self.profile.max_model_len}
        return [{"id": name, "root": name, "parent": None, **card} for name in self.model_names]

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.cards()})

    async def _metrics(self, request: web.Request) -> web.Response:
        self.scrapes += 1
        page = render(self.profile, self.model_names[0], self.gauges)
        return web.Response(body=page, headers={"Content-Type": "text/plain; version=1.0.0; charset=utf-8"})


def _steps_of(profile: EngineProfile) -> steps.StepPublisher:
    blocks, feed = profile.usable_blocks, steps.StepPublisher()
    feed.ranks[0] = steps.RankState(
        0, profile.block_size, profile.max_num_batched_tokens, profile.max_num_seqs,
        total_blocks=blocks, free_blocks=blocks, kv_tokens=blocks * profile.block_size,
    )  # fmt: skip
    return feed


def render(profile: EngineProfile, model: str, gauges: EngineGauges) -> bytes:
    """Render the part of vLLM's metrics page that a gateway reads, in the classic text format."""
    own = {"engine": "0", "model_name": model}
    cache = {
        "block_size": str(profile.block_size),
        "engine": "0",
        "kv_cache_size_tokens": str(profile.num_gpu_blocks * profile.block_size),
        "num_gpu_blocks": str(profile.num_gpu_blocks),
    }
    lines = [
        ("num_requests_running", own, gauges.running),
        ("num_requests_waiting", own, gauges.waiting),
        ("num_requests_waiting_by_reason", {**own, "reason": "capacity"}, gauges.waiting),
        ("num_requests_waiting_by_reason", {**own, "reason": "deferred"}, 0),
        ("kv_cache_usage_perc", own, gauges.kv_usage),
        ("num_preemptions_total", own, gauges.preemptions_total),
        ("prompt_tokens_total", own, gauges.prompt_tokens_total),
        ("generation_tokens_total", own, gauges.generation_tokens_total),
        ("cache_config_info", cache, 1),
    ]
    return "".join(
        f"vllm:{name}{{{','.join(f'{label}={json.dumps(text)}' for label, text in labels.items())}}} {float(value)}\n"
        for name, labels, value in lines
    ).encode()


async def _version(request: web.Request) -> web.Response:
    return web.json_response({"version": "0.32.0"})


async def _health(request: web.Request) -> web.Response:
    return web.Response()


async def run(host: str, port: int, profile_name: str, model_names: tuple[str, ...]) -> None:
    """Serve until cancelled. Raise UnknownProfileError, or OSError for a taken port."""
    server = SimulatedServer(profile(profile_name), model_names=model_names)
    bound = await server.start(host, port)
    print(f"simulated vLLM ({profile_name}) on http://{host}:{bound}, models: {', '.join(model_names)}", flush=True)
    try:
        await server.serve()
    finally:
        await server.stop()
