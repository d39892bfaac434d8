"""On a terminal the banner stays in sight: no log scrolls by."""

from __future__ import annotations

import re

import pytest

from tests.gateway.capture import Upstream, replies
from tests.gateway.live import until
from tests.kit.served import OK, status_of_one
from tests.kit.terminals import on_terminal


@pytest.mark.slow
async def test_the_banner_stays_in_sight() -> None:
    options = ("--port", "0", "--admin-port", "0")
    async with Upstream(replies(OK)) as upstream, on_terminal("serve", "--backend", upstream.url, *options) as terminal:
        await until(lambda: re.search(r"serving on http://[^,]+,.*\n", terminal.said))
        [url] = re.findall(r"serving on (http://[^,]+),", terminal.said)
        for _ in range(30):
            assert await status_of_one(url) == 200
    assert "one line for each request: off" in terminal.said
    assert '"tenant"' not in terminal.said
    assert terminal.said.count("\n") < 20
