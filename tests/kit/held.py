"""An engine that answers nothing until it may."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.gateway.capture import Peer, Seen, answer

OK = answer(b'{"model":"small","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}')


def one_at_a_time(url: str) -> list[dict[str, Any]]:
    """Pools of a config whose one engine runs one request, while all others wait in the gateway."""
    return [{"name": "pool", "backends": [{"url": url, "max_num_seqs": 1}], "capacity": {"waiting_target": 0}}]


CUT = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"
"""After which the engine breaks off."""


class Held:
    """An engine that answers nothing until it may, and then each with the next of its answers; the last stays."""

    def __init__(self, *answers: bytes) -> None:
        self.may = asyncio.Event()
        self.answers = list(answers) or [OK]

    async def __call__(self, seen: Seen, peer: Peer) -> None:
        await self.may.wait()
        said = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        await peer.send(said)
        if said == CUT:
            peer.reset()
