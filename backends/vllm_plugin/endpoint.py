"""The path of vLLM's own server at which gateways read its steps. Only vLLM imports this module."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse

from backends.vllm_plugin.stat_logger import STEPS
from backends.vllm_plugin.steps import CONTENT_TYPE, PATH, StepListener

_HEAD: Final = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", CONTENT_TYPE.encode()), (b"cache-control", b"no-store")],
}


class StepsEndpoint:
    """The plug-in of the group `vllm.endpoint_plugins`."""

    name = "fairgate"
    required_tasks = None

    def attach_router(self, app: Any) -> None:
        app.add_route(PATH, _steps, methods=["GET"], include_in_schema=False)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Do nothing: the routes find their state when they are called."""


async def _steps(request: Request) -> Any:
    if request.method != "GET":  # Starlette adds HEAD
        return PlainTextResponse("GET only\n", 405)
    if not STEPS.ranks and not STEPS.missing:
        STEPS.missing = "no engine of this process reports its steps"
    if STEPS.missing:
        return PlainTextResponse(STEPS.missing + "\n", 501)
    output = getattr(getattr(request.app.state, "engine_client", None), "output_processor", None)
    STEPS.unfinished = getattr(output, "get_num_unfinished_requests", None)
    listener = STEPS.listen()
    if listener is None:
        return PlainTextResponse("too many listen already\n", 503)
    return _Feed(listener, request.app.state)


class _Feed:
    """The streaming answer: a line after each step until the client or the server goes away."""

    def __init__(self, listener: StepListener, state: Any) -> None:
        self._listener = listener
        self._state = state

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        gone = asyncio.ensure_future(_until_gone(receive, self._listener))
        try:
            await send(_HEAD)
            while line := await self._listener.get():
                if getattr(getattr(self._state, "server", None), "should_exit", False):
                    break  # the server waits for its answers to end
                await send({"type": "http.response.body", "body": line, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            STEPS.leave(self._listener)
            gone.cancel()


async def _until_gone(receive: Any, listener: StepListener) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    listener.put(b"")
