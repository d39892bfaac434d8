"""A scraper of a backend's gauges: one scrape at a time, as cheaply as the backend allows."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import aiohttp

from backends.engines.adapter import UNREADABLE, Adapter
from backends.health import Standstill
from backends.step_feed import StepFeed
from policies.capacity.gauges import Gauges

_PAGE_BYTES_MAX = 8 * 1024 * 1024
CHECK_INTERVAL_S = 0.8
"""Interval of scrapes while the engine's steps are received."""


@dataclass(eq=False)
class Scraper:
    """A scraper of one engine. Each `turn` scrapes once, then waits `interval_s`, or longer while steps are received.

    The cheapest path is tried first. A path without a known gauge is left for the next one until a scrape fails, since
    another engine may have taken the place.
    """

    adapter: Adapter
    url: str
    session: aiohttp.ClientSession
    interval_s: float
    on_snapshot: Callable[[Gauges], None]
    on_failure: Callable[[str], None]
    timeout_s: float = field(default=2.0, kw_only=True)
    tls: ssl.SSLContext | None = field(default=None, kw_only=True)
    feed: StepFeed | None = field(default=None, kw_only=True)
    standstill: Standstill = field(default_factory=lambda: Standstill(inf), kw_only=True)
    _path: int = field(default=0, init=False)

    async def turn(self) -> None:
        """Scrape once and wait until the next scrape is due."""
        await self._scrape()
        await self._pause()

    async def _pause(self) -> None:
        """Wait until the next scrape is due, which is at once if the feed is lost."""
        if self.feed is None or self.feed.silent.is_set():
            await asyncio.sleep(self.interval_s)
            return
        try:
            async with asyncio.timeout(max(CHECK_INTERVAL_S, self.interval_s)):
                await self.feed.silent.wait()
        except TimeoutError:
            pass

    async def _scrape(self) -> None:
        """Report one snapshot or one failure, whatever the backend answers."""
        why = ""
        for path in range(self._path, len(self.adapter.metrics_paths)):
            taken_s = asyncio.get_running_loop().time()
            url = self.url.rstrip("/") + self.adapter.metrics_paths[path]
            try:
                text = await self._page(url)
            except TimeoutError:
                why = f"{url} did not answer within {self.timeout_s:g} s"
                break
            except (aiohttp.ClientError, OSError, ValueError) as error:
                why = f"{url}: {error}"
                continue
            try:
                snapshot = self.adapter.snapshot(text, taken_s)
            except UNREADABLE as error:
                why = f"{url} is no page of {self.adapter.title}: {error!r}"
                continue
            if snapshot is not None:
                self._path = path
                self.standstill.read(snapshot)
                if self.feed is None or self.feed.silent.is_set():
                    self.on_snapshot(snapshot)
                return
            why = f"{url} holds no gauge of {self.adapter.title}"
        self._path = 0
        self.on_failure(why)

    async def _page(self, url: str) -> str:
        # An Accept for OpenMetrics would make vLLM rename its metrics.
        headers, timeout = {"Accept": "text/plain"}, aiohttp.ClientTimeout(total=self.timeout_s)
        async with self.session.get(
            url, headers=headers, timeout=timeout, allow_redirects=False, ssl=self.tls or True
        ) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}")
            page = bytearray()
            async for piece in response.content.iter_chunked(65536):
                page += piece
                if len(page) > _PAGE_BYTES_MAX:
                    raise ValueError(f"the page is longer than {_PAGE_BYTES_MAX} bytes")
            return page.decode("latin-1")  # all known names are ASCII, and other text may take four bytes a letter
