"""A decision that fails through a fault of the gateway: its request gets an error, and all others are served."""

from __future__ import annotations

import asyncio
import logging

import pytest

from policies.request import Request
from tests.gateway.capture import Upstream, answer
from tests.gateway.live import Starter, chat, until

PATH = "/v1/chat/completions"
OK = answer(b'{"usage":{"prompt_tokens":7,"completion_tokens":2}}')

pytestmark = pytest.mark.interpreted_only  # it breaks methods of compiled classes


@pytest.mark.parametrize("broken", ["admitted", "dispatched", "finished"])
async def test_only_the_request_concerned_fails(
    start: Starter, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with Upstream(lambda seen, peer: peer.send(OK)) as upstream, start(upstream.url) as live:
        requests, once = live.engine.requests, [True]
        whole = getattr(requests, broken)

        def fails(request: Request, *args: object) -> object:
            found = whole(request, *args)
            if once and once.pop():
                raise ZeroDivisionError("a fault")
            return found

        monkeypatch.setattr(requests, broken, fails)
        with caplog.at_level(logging.ERROR, "fairgate"):
            first = await live.ask(PATH, chat(max_tokens=5))
            others = await asyncio.gather(*[live.ask(PATH, chat(max_tokens=5)) for _ in range(20)])
        assert (first.status, first.status != 200 and first.error["code"]) in ((500, "internal_error"), (200, False))
        assert (first.status == 200) is (broken == "finished"), "its client has the whole answer"
        assert [one.status for one in others] == [200] * 20
        await until(lambda: not live.engine.dispatched)
        assert "an admission decision failed" in caplog.text
        assert (await live.metrics())["fairgate_faults_total", "pool"] == 1
        assert live.engine.queued == 0
