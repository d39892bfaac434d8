"""How shall the next answers go wrong? A simulated engine for tests of the proxy in front of it."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
from aiohttp import web

from backends.simulated.answer_formats import SimulatedAnswer
from backends.simulated.calls import CallRefusedError, read_object, read_prompt, render_chat
from backends.simulated.engine_profiles import EngineProfile
from backends.simulated.simulated_server import SimulatedServer
from tests.kit.answer_formats import ABORT, ALL_FORMATS, ResponsesAnswer

STILL_S = 0.05
BUSY = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."


@dataclass(slots=True)
class Faults:
    """Set at any time, read at each generation request. The `*_next` count down one per request; None is off."""

    reset_next: int = 0
    """Reset the connection before the first byte of an answer."""
    refuse_next: int = 0
    """Answer 503 as a full engine does; streams that were already accepted are not touched."""
    refuse_in_stream_next: int = 0
    """Answer 200 and say 503 inside the stream, as vLLM does to a burst. Not streamed: a plain 503."""
    cut_body_next: int = 0
    """Close amid the body of an answer that is not streamed; its length was promised."""
    truncate_after_events: int | None = None
    """Close every stream after this many events, without an end."""
    stall_after_events: int | None = None
    """Write nothing to a stream after this many events, and keep it open."""
    is_draining: bool = False
    """As vLLM after SIGTERM: what runs goes on; new requests get a 200 that says "abort", and no token."""
    is_still: bool = False
    """Make no step, and go on saying that all is well."""

    def take(self, name: str) -> bool:
        """Is this request one of the next `name`? Counts it."""
        left: int = getattr(self, name)
        if left <= 0:
            return False
        setattr(self, name, left - 1)
        return True


class FaultyEngine(SimulatedServer):
    """Serves as `SimulatedServer` does, with all of vLLM's APIs, and with faults, which may be changed while it serves.

    `adapters`: names that are listed as LoRA adapters of the first model; nothing else differs.
    """

    formats = ALL_FORMATS

    def __init__(
        self,
        profile: EngineProfile,
        *,
        faults: Faults | None = None,
        adapters: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        super().__init__(profile, **options)
        self.faults = faults or Faults()
        self.adapters = adapters

    def routes(self) -> list[web.RouteDef]:
        return [*super().routes(), web.post("/tokenize", self._tokenize)]

    def cards(self) -> list[dict[str, Any]]:
        of_adapter = {"parent": self.model_names[0], "max_model_len": None}
        return [card | of_adapter if card["id"] in self.adapters else card for card in super().cards()]

    async def _tokenize(self, request: web.Request) -> web.Response:
        try:
            body = read_object(await request.read())
            text = str(body["prompt"]).encode() if "prompt" in body else render_chat(body.get("messages"))
        except CallRefusedError as error:
            return web.Response(status=400, body=SimulatedAnswer.error_body(error), content_type="application/json")
        count, most = read_prompt(text, self.profile.block_size).tokens, self.profile.max_model_len
        return web.json_response({"count": count, "max_model_len": most, "tokens": list(range(count))})

    async def at(self, moment: str, request: web.Request | None = None, answer: SimulatedAnswer | None = None) -> None:
        faults = self.faults
        while moment == "step" and faults.is_still:  # noqa: ASYNC110 (set at any time, by a test)
            await asyncio.sleep(STILL_S)
        if request is None or request.transport is None:
            return
        if moment == "call":
            await self._call(request, request.transport)
        elif moment == "submit" and faults.take("refuse_in_stream_next"):
            if isinstance(answer, ResponsesAnswer) and answer.call.stream:
                await hang_up(request)
            raise CallRefusedError(503, BUSY, "Service Unavailable")
        elif moment == "submit" and answer is not None and faults.is_draining:
            answer.finish = [ABORT] * len(answer.finish)
            answer.call.include_usage = False  # only the bare end is sent
            answer.write(answer.end() if answer.call.stream else b"")
            answer.done.set()
        elif moment == "submit" and answer is not None and answer.transport is not None:
            most = faults.truncate_after_events
            most = faults.stall_after_events if most is None else most
            if most is not None:
                answer.transport = _CutTransport(answer, answer.transport, most)
        elif moment == "body" and answer is not None and faults.take("cut_body_next"):
            body = msgspec.json.encode(answer.whole())
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            request.transport.write(head.encode() + body[: len(body) // 2])
            await hang_up(request)
        elif (
            moment == "end"
            and answer is not None
            and isinstance(answer.transport, _CutTransport)
            and answer.transport.is_cut
        ):
            await (asyncio.Event().wait() if faults.truncate_after_events is None else hang_up(request))

    async def _call(self, request: web.Request, transport: asyncio.Transport) -> None:
        if self.faults.take("reset_next"):
            linger = struct.pack("ii", 1, 0)
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            transport.abort()
            await asyncio.Event().wait()
        if self.faults.take("refuse_next"):
            raise CallRefusedError(503, BUSY, "Service Unavailable")


async def hang_up(request: web.Request) -> NoReturn:
    """Close the connection; aiohttp then cancels this handler."""
    if request.transport is not None:
        request.transport.close()
    await asyncio.Event().wait()
    raise AssertionError("an event that nobody has was set")


class _CutTransport(asyncio.Transport):
    """Ends a stream early, or stalls it."""

    def __init__(self, answer: SimulatedAnswer, transport: asyncio.Transport, events_left: int) -> None:
        super().__init__()
        self._answer = answer
        self._transport = transport
        self._events_left = events_left
        self.is_cut = False

    def is_closing(self) -> bool:
        return self.is_cut

    def write(self, chunk: bytes | bytearray | memoryview) -> None:
        events = bytes(chunk).partition(b"\r\n")[2].removesuffix(b"\r\n")
        pieces = events.split(b"\n\n")[:-1][: self._events_left]
        self._events_left -= len(pieces)
        if pieces:
            events = b"\n\n".join(pieces) + b"\n\n"
            self._transport.write(b"%x\r\n%b\r\n" % (len(events), events))
        if not self._events_left:
            self.is_cut = True
            self._answer.done.set()
