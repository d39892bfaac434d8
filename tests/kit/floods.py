"""Tenants that flood, and what they were told that they used."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import ge
from typing import Any

import aiohttp

from tests.gateway.live import SMALL, Answer, Live, chat, events, until

OUTPUT_TOKENS = 10
ENGINE = replace(SMALL, base_s=5e-3)
"""A request takes longer than the gateways need to hear of each other."""
LEAST_ANSWERS = 40
"""Enough that every gateway has dispatched and heard of the others meanwhile."""
ASKED = "asked"
"""What all clients here call each of their requests, so that the decisions on them can be asked for."""
Ask = Callable[[], Awaitable[Answer]]


class Flood:
    """Clients of one tenant, each with one request at a time; what they were told that they used."""

    def __init__(self, tenant: str, clients: Sequence[Ask]) -> None:
        self.tenant = tenant
        self.service = 0
        self.by_client = [0] * len(clients)
        """Answers of each client."""
        self.faults: list[Any] = []
        self._is_over = False
        self._tasks = [asyncio.create_task(self._ask_again_and_again(*each)) for each in enumerate(clients)]

    @property
    def answers(self) -> int:
        return sum(self.by_client)

    @classmethod
    def at(
        cls, live: Live, tenant: str, clients: int, *, users: int = 1, output_tokens: int = OUTPUT_TOKENS, **fields: Any
    ) -> Flood:
        """Flood a gateway in this process; `fields` are of the body."""
        fields = {"max_tokens": output_tokens, "ignore_eos": True, **fields}
        if fields.get("stream"):
            fields["stream_options"] = {"include_usage": True}
        bodies = [chat(tenant, user=f"user-{number % users}", **fields) for number in range(clients)]
        key, path = f"key-of-{tenant}", "/v1/chat/completions"
        return cls(tenant, [partial(live.ask, path, body, key=key, x_request_id=ASKED) for body in bodies])

    async def _ask_again_and_again(self, client: int, ask: Ask) -> None:
        while not self._is_over:
            try:
                got = await ask()
            except aiohttp.ClientError as error:
                self.faults.append(error)
                return
            if got.status != 200:
                self.faults.append(got.body)
                return
            usage = events(got.body)[-2]["usage"] if got.body.startswith(b"data: ") else got.json["usage"]
            self.by_client[client] += 1
            self.service += usage["prompt_tokens"] + 2 * usage["completion_tokens"]

    async def stop(self) -> None:
        """Ask nothing more. Those under way are answered."""
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def end(self) -> None:
        """Stop; none was refused or failed."""
        await self.stop()
        assert self.faults == []


async def answered(*floods: Flood, more: int = LEAST_ANSWERS) -> None:
    """Let so many more be answered in all."""
    first = sum(flood.answers for flood in floods)
    await until(lambda: sum(flood.answers for flood in floods) >= first + more or any(one.faults for one in floods))


async def ratio_of(heavy: Flood, light: Flood, *, more: int) -> float:
    """Return what one receives over what the other does, of requests that were dispatched while both were under way.

    Who comes first has all engines to itself for a moment, whose answers come later.
    """
    floods = heavy, light
    await until(lambda: all(flood.answers or flood.faults for flood in floods))
    due = [[answers + 1 for answers in flood.by_client] for flood in floods]
    for flood, answers in zip(floods, due, strict=True):
        await until(lambda flood=flood, answers=answers: flood.faults or all(map(ge, flood.by_client, answers)))  # type: ignore[misc]
    before = heavy.service, light.service
    await answered(heavy, light, more=more)
    return (heavy.service - before[0]) / max(1, light.service - before[1])
