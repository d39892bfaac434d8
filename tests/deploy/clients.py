"""Clients of what is deployed: requests that must be answered whole, and how many were."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tests.waiting import WAIT_S

MODEL = "simulated"


def body(tokens: int, *, stream: bool) -> dict[str, Any]:
    asked = [{"role": "user", "content": "Tell me of the sea."}]
    return {"model": MODEL, "messages": asked, "max_tokens": tokens, "ignore_eos": True, "stream": stream}


def said_whole(answer: bytes, *, stream: bool) -> bool:
    """Was it answered to its end?"""
    return answer.rstrip().endswith(b"data: [DONE]") if stream else b'"usage"' in answer


class Clients:
    """Some clients of one tenant; each asks again as soon as it was answered, every second time for a stream."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str, tokens: int = 32) -> None:
        self._http = http
        self._url = url
        self._key = key
        self._tokens = tokens
        self.served = 0
        self.failed: list[str] = []

    @asynccontextmanager
    async def asking(self, count: int) -> AsyncIterator[None]:
        """While the block runs. What is under way at its end is answered first."""
        ended = asyncio.Event()
        tasks = [asyncio.create_task(self._ask_on(ended, number)) for number in range(count)]
        try:
            yield
        finally:
            ended.set()
            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(*tasks)

    async def _ask_on(self, ended: asyncio.Event, number: int) -> None:
        while not ended.is_set():
            fault = await self.ask(stream=number % 2 == 0)
            if fault:
                self.failed.append(fault)
                await asyncio.sleep(0.05)
            else:
                self.served += 1
            number += 1

    async def ask(self, *, stream: bool) -> str:
        """What went wrong; nothing, if it was answered whole."""
        headers = {"authorization": f"Bearer {self._key}"}
        try:
            async with self._http.post(
                f"{self._url}/v1/chat/completions", json=body(self._tokens, stream=stream), headers=headers
            ) as response:
                answer = await response.read()
        except aiohttp.ClientError as error:
            return f"{type(error).__name__}: {error}"
        if response.status == 200 and said_whole(answer, stream=stream):
            return ""
        return f"{response.status}: {answer[-200:]!r}"

    def faults(self) -> Counter[str]:
        return Counter(self.failed)
