"""On a terminal the banner stays in sight: no log scrolls by."""

from __future__ import annotations

import asyncio
import os
import pty
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.commands import FAIRGATE
from tests.gateway.capture import Upstream, replies
from tests.gateway.live import until
from tests.kit.served import OK, status_of_one


class Terminal:
    """What a terminal was sent so far."""

    def __init__(self) -> None:
        self.said = ""


@asynccontextmanager
async def _serving(*arguments: str) -> AsyncIterator[Terminal]:
    """`fairgate serve`, on a terminal of its own."""
    ours, theirs = pty.openpty()
    loop, terminal = asyncio.get_running_loop(), Terminal()

    def read() -> None:
        try:
            terminal.said += os.read(ours, 65536).decode()
        except OSError:  # the other side is closed
            loop.remove_reader(ours)

    files = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = await asyncio.create_subprocess_exec(FAIRGATE, "serve", *arguments, **files)
    os.close(theirs)
    loop.add_reader(ours, read)
    try:
        yield terminal
    finally:
        process.terminate()
        await process.wait()
        loop.remove_reader(ours)
        os.close(ours)


async def _asked(terminal: Terminal, times: int) -> None:
    await until(lambda: re.search(r"serving on (http://[^,]+),.*\n", terminal.said))
    found = re.search(r"serving on (http://[^,]+),", terminal.said)
    assert found is not None
    for _ in range(times):
        assert await status_of_one(found[1]) == 200


@pytest.mark.slow
async def test_the_banner_stays_in_sight() -> None:
    async with Upstream(replies(OK)) as upstream:
        async with _serving("--backend", upstream.url, "--port", "0", "--admin-port", "0") as terminal:
            await _asked(terminal, 30)
    assert "one line for each request: off" in terminal.said
    assert '"tenant"' not in terminal.said
    assert terminal.said.count("\n") < 20


@pytest.mark.slow
async def test_lines_come_where_they_are_asked_for() -> None:
    async with Upstream(replies(OK)) as upstream:
        asked = ("--access-log", "stdout")
        async with _serving("--backend", upstream.url, "--port", "0", "--admin-port", "0", *asked) as terminal:
            await _asked(terminal, 2)
            await until(lambda: terminal.said.count('"tenant"') == 2)
