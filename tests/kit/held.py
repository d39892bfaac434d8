"""An engine that answers nothing until it may."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.gateway.capture import Peer, Seen, answer

OK = answer(b'{"model":"small","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}')


def one_at_a_time(url: str) -> list[dict[str, Any]]:
    """Pools of a config whose one engine runs one request, while all others wait in the gateway."""
    return [{"name": "pool", "backends": [{"url": url, "max_num_seqs": 1}], "capacity": {"waiting_target": 0}}]


class Held:
    """An engine that answers nothing until it may."""

    def __init__(self) -> None:
        self.may = asyncio.Event()

    async def __call__(self, seen: Seen, peer: Peer) -> None:
        await self.may.wait()
        await peer.send(OK)
