"""Who knows the addresses of names: a test says what is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tests.gateway.live import until


class Names:
    """Who knows the addresses: a test says what is answered."""

    def __init__(self, *addresses: str) -> None:
        self.answer: Sequence[str] | OSError = addresses
        self.fails: Callable[[], bool] = lambda: False
        self.asked: list[str] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def __call__(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        await self.answers.wait()
        if isinstance(self.answer, OSError):
            raise self.answer
        if self.fails():
            raise OSError("not now")
        return self.answer

    async def asked_again(self, times: int = 3) -> None:
        before = len(self.asked)
        await until(lambda: len(self.asked) >= before + times)
