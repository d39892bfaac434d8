"""A gateway whose engine is full, so that what is asked waits or is throttled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from gateway.config.sections.keys import hash_key
from tests.gateway.live import CHAT, MODEL, SMALL, Answer, Live, Starter, chat, simulated, until

SLOW = replace(SMALL, name="slow", num_gpu_blocks=769, base_s=8e-3)
"""12,288 tokens of KV; a hundred tokens of an answer take most of a second."""
EAGER = {"enter": 0.5, "leave": 0.3, "dwell_s": 0}
ONE_START = {"user": {"starts": 1}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "found"}


def tenants(*names: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"name": name, "keys": [hash_key(name)], **fields} for name in names]


def turn(content: str | None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [{"id": "c", "type": "function"}]}


@dataclass
class Full:
    """A gateway whose engine is full of one tenant's long answers until `release`."""

    live: Live
    holders: list[asyncio.Task[Answer]]

    async def ask(self, key: str, *messages: Any, path: str = CHAT, **fields: Any) -> Answer:
        headers = fields.pop("headers", {})
        body = {"model": MODEL, "max_tokens": 4, "ignore_eos": True, "messages": list(messages), **fields}
        return await self.live.ask(path, body, key=key, **headers)

    def release(self) -> None:
        for holder in self.holders:
            holder.cancel()


def is_overloaded(live: Live) -> bool:
    dispatcher = live.gateway.pools[0].dispatcher
    return dispatcher.engine.pressure(dispatcher.clock()).overloaded


@asynccontextmanager
async def full(start: Starter, *names: str, time_scale: float = 1.0, **config: Any) -> AsyncIterator[Full]:
    config = {"overload": EAGER, "throttle": ONE_START, "tenants": tenants("holder", *names), **config}
    async with simulated(SLOW, time_scale=time_scale) as sim, start(sim.url, **config) as live:
        holders = []
        for user in ("1", "2", "3", "4"):  # three fill the cache: four such prompts are larger than it
            body = chat(f"{user} " + "x " * 6400, stream=True, max_tokens=800, ignore_eos=True, user=user)
            holders.append(asyncio.ensure_future(live.ask(CHAT, body, key="holder")))
        [ledger] = live.engine.backends.values()
        await until(lambda: (ledger.sequences, live.engine.queued, len(ledger.starting)) == (3, 1, 0))
        await until(lambda: is_overloaded(live))
        try:
            yield Full(live, holders)
        finally:
            for holder in holders:
                holder.cancel()
            await asyncio.gather(*holders, return_exceptions=True)


def question(text: str = "Which files?") -> dict[str, Any]:
    return {"role": "user", "content": text}


async def seen(live: Live, path: str) -> Any:
    got = await live.get(path, admin=True)
    assert got.status == 200, got.body
    return got.json
