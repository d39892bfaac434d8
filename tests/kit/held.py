"""An engine that answers nothing until it may."""

from __future__ import annotations

import asyncio

from tests.gateway.capture import Peer, Seen, answer

OK = answer(b'{"model":"small","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}')


class Held:
    """An engine that answers nothing until it may."""

    def __init__(self) -> None:
        self.may = asyncio.Event()

    async def __call__(self, seen: Seen, peer: Peer) -> None:
        await self.may.wait()
        await peer.send(OK)
