"""On a terminal the banner stays in sight: no log scrolls by."""

from __future__ import annotations

import re

import pytest

from tests.gateway.capture import Upstream, replies
from tests.gateway.live import until
from tests.kit.served import OK, status_of_one
from tests.kit.terminals import Terminal, on_terminal


async def _asked(terminal: Terminal, times: int) -> None:
    await until(lambda: re.search(r"serving on (http://[^,]+),.*\n", terminal.said))
    found = re.search(r"serving on (http://[^,]+),", terminal.said)
    assert found is not None
    for _ in range(times):
        assert await status_of_one(found[1]) == 200


@pytest.mark.slow
async def test_the_banner_stays_in_sight() -> None:
    async with Upstream(replies(OK)) as upstream:
        async with on_terminal("serve", "--backend", upstream.url, "--port", "0", "--admin-port", "0") as terminal:
            await _asked(terminal, 30)
    assert "one line for each request: off" in terminal.said
    assert '"tenant"' not in terminal.said
    assert terminal.said.count("\n") < 20


@pytest.mark.slow
async def test_lines_come_where_they_are_asked_for() -> None:
    async with Upstream(replies(OK)) as upstream:
        options = ("--backend", upstream.url, "--port", "0", "--admin-port", "0", "--access-log", "stdout")
        async with on_terminal("serve", *options) as terminal:
            await _asked(terminal, 2)
            await until(lambda: terminal.said.count('"tenant"') == 2)
