"""Tenants that always want more, and what each of them was served."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.config.sections.keys import hash_key
from tests.gateway.live import Live, chat, until

OUTPUT_TOKENS = 12
ASKED = "asked"
"""What all clients here call each of their requests, so that the decisions on them can be asked for."""


def tenants(**weights: float) -> list[dict[str, Any]]:
    return [
        {"name": name, "weight": weight, "keys": [{"hash": hash_key(f"key-of-{name}"), "apps": ["default"]}]}
        for name, weight in weights.items()
    ]


class Load:
    """Tenants that each keep some requests open; counts what the engine says they got."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.tokens: dict[str, int] = {}
        self.answers = 0
        self._tasks: list[asyncio.Task[None]] = []

    def flood(
        self, tenant: str, requests: int, *, users: int = 1, stream: bool = False, output_tokens: int = OUTPUT_TOKENS
    ) -> None:
        self.tokens[tenant] = 0
        for number in range(requests):
            self._tasks.append(
                asyncio.ensure_future(self._ask_for_ever(tenant, f"user-{number % users}", stream, output_tokens))
            )

    async def _ask_for_ever(self, tenant: str, user: str, stream: bool, output_tokens: int) -> None:
        options = {"stream_options": {"include_usage": True}} if stream else {}
        body = chat(user, max_tokens=output_tokens, ignore_eos=True, user=user, stream=stream, **options)
        while True:
            got = await self.live.ask("/v1/chat/completions", body, key=f"key-of-{tenant}", x_request_id=ASKED)
            assert got.status == 200, got.body
            self.tokens[tenant] += output_tokens
            self.answers += 1

    async def service(self, answers: int) -> dict[str, int]:
        """Tokens of each tenant while so many answers were given, both always wanting more."""
        await until(lambda: self.answers >= 50 or self._failed())
        before, first = dict(self.tokens), self.answers
        await until(lambda: self.answers >= first + answers or self._failed())
        after = dict(self.tokens)
        return {tenant: after[tenant] - before[tenant] for tenant in after}

    def _failed(self) -> bool:
        return any(task.done() for task in self._tasks)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
