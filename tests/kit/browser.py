"""A page in a real browser, and what its console said."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, async_playwright, expect

from tests.gateway.live import WAIT_S, Live

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
expect.set_options(timeout=1000 * WAIT_S)
PHONE, DESK, WALL = {"width": 390, "height": 844}, {"width": 1280, "height": 800}, {"width": 2560, "height": 1440}


@dataclass
class Window:
    """One page of a browser, and what its console said."""

    page: Page
    faults: list[str] = field(default_factory=list)

    async def open(self, live: Live, path: str = "/") -> None:
        await self.page.goto(live.admin_url + path)

    async def shows(self, where: str, text: str | re.Pattern[str]) -> None:
        await expect(self.page.locator(where)).to_contain_text(text)

    async def is_accessible(self) -> None:
        """In both colour schemes, and no wider than the screen at any width."""
        for scheme in ("dark", "light"):
            await self.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            found = await Axe().run(self.page)
            assert found.violations_count == 0, found.generate_report()
        for size in (PHONE, WALL, DESK):
            await self.page.set_viewport_size(size)  # type: ignore[arg-type]
            beyond = await self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert beyond <= 0, size


@asynccontextmanager
async def window(*, quiet: bool = True) -> AsyncIterator[Window]:
    """`quiet`: nothing may go wrong in it."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            found = Window(await browser.new_page(viewport=DESK))  # type: ignore[arg-type]
            found.page.set_default_timeout(1000 * WAIT_S)
            found.page.on("pageerror", lambda error: found.faults.append(str(error)))
            found.page.on(
                "console", lambda said: found.faults.append(said.text) if said.type in ("error", "warning") else None
            )
            yield found
            assert not quiet or found.faults == []
        finally:
            await browser.close()
