"""Tenants that flood, and what they were told that they used."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tests.gateway.live import SMALL, Live, chat, until

OUTPUT_TOKENS = 10
ENGINE = replace(SMALL, base_s=5e-3)
"""A request takes longer than the gateways need to hear of each other."""
LEAST_ANSWERS = 40
"""Enough that every gateway has dispatched and heard of the others meanwhile."""


class Flood:
    """A tenant's clients at one gateway, each with one request at a time; what they were told that they used."""

    def __init__(self, live: Live, tenant: str, clients: int) -> None:
        self.answers = 0
        self.service = 0
        self.refused: list[int] = []
        self.is_over = False
        self._live = live
        self.tenant = tenant
        self._tasks = [asyncio.create_task(self._ask_again_and_again()) for _ in range(clients)]

    async def _ask_again_and_again(self) -> None:
        body = chat(self.tenant, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        while not self.is_over:
            got = await self._live.ask("/v1/chat/completions", body, key=f"key-of-{self.tenant}")
            if got.status != 200:
                self.refused.append(got.status)
                return
            usage = got.json["usage"]
            self.answers += 1
            self.service += usage["prompt_tokens"] + 2 * usage["completion_tokens"]

    async def end(self) -> None:
        """Those under way are answered; none was refused or failed."""
        self.is_over = True
        await asyncio.gather(*self._tasks)
        assert self.refused == []


async def answered(*floods: Flood, more: int = LEAST_ANSWERS) -> None:
    """Let so many more be answered in all."""
    first = sum(flood.answers for flood in floods)
    await until(lambda: sum(flood.answers for flood in floods) >= first + more or any(one.refused for one in floods))
