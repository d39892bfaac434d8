"""A scraper of a backend's gauges: one scrape at a time, as cheaply as the backend allows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from backends.control_client import TIMEOUT_S, ControlClient
from backends.engines.adapter import UNREADABLE, Adapter
from backends.health import StandstillDetector
from backends.step_feed import StepFeed
from backends.upstream_errors import ConnectFailed, UpstreamError
from policies.capacity.gauges import Gauges

CHECK_INTERVAL_S = 0.8
"""Interval of scrapes while the engine's steps are received."""


@dataclass(eq=False)
class Scraper:
    """A scraper of one engine. `run_once` scrapes once, then waits `interval_s`, or longer while steps are received.

    The cheapest path is tried first. A path without a known gauge is left for the next one until a scrape fails, since
    another engine may have taken the place.
    """

    adapter: Adapter
    client: ControlClient
    interval_s: float
    on_snapshot: Callable[[Gauges], None]
    timeout_s: float = field(default=TIMEOUT_S, kw_only=True)
    feed: StepFeed | None = field(default=None, kw_only=True)
    standstill: StandstillDetector = field(default_factory=lambda: StandstillDetector(inf), kw_only=True)
    _path: int = field(default=0, init=False)

    async def run_once(self) -> None:
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
        """Report a snapshot if there is one: an old gauge expires by itself, and health has its own probe."""
        for path in range(self._path, len(self.adapter.metrics_paths)):
            taken_s = asyncio.get_running_loop().time()
            try:
                # An Accept for OpenMetrics would make vLLM rename its metrics.
                page = await self.client.get(
                    self.adapter.metrics_paths[path], timeout_s=self.timeout_s, accept="text/plain"
                )
            except ConnectFailed:
                break  # nor would another path answer
            except UpstreamError:
                continue
            text = page.decode("latin-1")  # all known names are ASCII, and other text may take four bytes a letter
            try:
                snapshot = self.adapter.snapshot(text, taken_s)
            except UNREADABLE:
                continue
            if snapshot is not None:
                self._path = path
                self.standstill.read(snapshot)
                if self.feed is None or self.feed.silent.is_set():
                    self.on_snapshot(snapshot)
                return
        self._path = 0
