"""The admin listener asks for its token, except where a probe has none, and a gateway that asks nobody says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import run, running
from tests.gateway.live import Live, Starter, simulated
from tests.kit.keys import TOKEN
from tests.kit.served import config_file
from tests.ports import free_port

CLOSED = ["/metrics", "/explain/req_1", "/state", "/page/", "/health/", "/ready/x", "//health", "/nowhere"]


async def asked(live: Live, path: str, **headers: str) -> int:
    url = f"http://127.0.0.1:{live.gateway.admin_port}{path}"
    async with live.http.get(url, headers=headers) as response:
        return response.status


async def test_the_token_opens_what_nothing_else_does(start: Starter) -> None:
    wrong = ("", TOKEN, f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", "Bearer", "Bearer \u00e9")
    async with simulated() as sim, start(sim.url, admin_token=TOKEN) as live:
        assert [await asked(live, path) for path in ("/health", "/ready")] == [200, 200], "probes have none"
        for path in CLOSED:
            for sent in wrong:
                assert await asked(live, path, **({"authorization": sent} if sent else {})) == 401, (path, sent)
        got = await live.get("/metrics", admin=True, key=None)
        assert got.headers["www-authenticate"] == "Bearer"
        assert TOKEN not in got.body.decode()
        assert (await live.get("/metrics", admin=True, key=TOKEN)).status == 200
        assert (await live.get("/explain/req_1", admin=True, key=TOKEN)).status == 404
        assert await asked(live, "/metrics", authorization=f"bearer  {TOKEN}") == 200


async def test_without_a_token_a_web_page_cannot_read_it_by_a_name_of_its_own(start: Starter) -> None:
    async with simulated() as sim, start(sim.url) as live:
        port = live.gateway.admin_port
        evil = ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", "localhost.evil.example")
        for path in ("/metrics", "/", "/state", "/health"):
            for host in evil:
                assert await asked(live, path, host=host) == 421, (path, host)
            for host in (f"127.0.0.1:{port}", f"localhost:{port}", "localhost", f"[::1]:{port}", "fairgate.localhost"):
                assert await asked(live, path, host=host) == 200, (path, host)
    async with simulated() as sim, start(sim.url, admin_token=TOKEN) as live:
        assert await asked(live, "/metrics", host="gateway.example", authorization=f"Bearer {TOKEN}") == 200


@pytest.mark.parametrize("workers", [1, 2])
async def test_the_start_warns_of_it_once(tmp_path: Path, workers: int) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    async with running("serve", "-c", config_file(tmp_path, url, admin="0.0.0.0:0", workers=workers)) as command:
        await command.says("serving on")
        assert command.said.count("each client that reaches 0.0.0.0:0 reads /metrics and /explain") == 1


async def test_a_token_that_no_header_can_carry_is_a_fault(tmp_path: Path) -> None:
    code, _, said = await run("check", config_file(tmp_path, "sim:demo", admin_token="two words"))
    assert code == 2
    assert "admin_token: is empty, or holds spaces" in said
    assert "two words" not in said
