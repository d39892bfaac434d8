"""A gateway listens where the config says: at several addresses, and at `[::]` for IPv6 and IPv4."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from tests.commands import running
from tests.gateway.capture import Upstream, answer, replies
from tests.gateway.live import Starter
from tests.kit.served import config_file, status_of_one
from tests.ports import free_port

OK = answer(b'{"usage":{"prompt_tokens":3,"completion_tokens":1}}')


async def test_all_addresses_of_the_machine_are_those_of_both_families(start: Starter) -> None:
    both = {"listen": "[::]:0", "admin": "[::]:0", "admin_token": "a" * 32}
    async with Upstream(replies(OK)) as upstream, start(upstream.url, **both) as live:
        for host in ("127.0.0.1", "[::1]"):
            assert await status_of_one(f"http://{host}:{live.gateway.port}") == 200
            async with live.http.get(f"http://{host}:{live.gateway.admin_port}/health") as response:
                assert response.status == 200
        assert [line["client"] for line in await live.lines(2)] == ["127.0.0.1", "::1"]


async def test_one_family_may_be_chosen(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url, listen="[::1]:0") as live:
        assert await status_of_one(f"http://[::1]:{live.gateway.port}") == 200
        with pytest.raises(aiohttp.ClientConnectionError):
            await status_of_one(f"http://127.0.0.1:{live.gateway.port}")


async def test_it_listens_at_each_address_of_a_list(start: Starter) -> None:
    ports = free_port(), free_port()
    listen = [f"127.0.0.1:{ports[0]}", f"127.0.0.2:{ports[1]}"]
    async with Upstream(replies(OK)) as upstream, start(upstream.url, listen=listen) as live:
        assert live.gateway.port == ports[0]
        assert await status_of_one(f"http://127.0.0.1:{ports[0]}") == 200
        assert await status_of_one(f"http://127.0.0.2:{ports[1]}") == 200
        with pytest.raises(aiohttp.ClientConnectionError):
            await status_of_one(f"http://127.0.0.1:{ports[1]}")


@pytest.mark.slow
async def test_workers_listen_at_each_address_too(tmp_path: Path) -> None:
    port = free_port()
    async with Upstream(replies(OK)) as upstream:
        file = config_file(tmp_path, upstream.url, listen=["[::]:0", f"127.0.0.2:{port}"], workers=2)
        async with running("serve", "-c", file) as command:
            found = await command.says(r"serving on http://\[::1\]:(\d+) with 2 workers")
            await command.says(r"(?s)worker \d serves.*worker \d serves")
            for address in (f"127.0.0.1:{found[1]}", f"[::1]:{found[1]}", f"127.0.0.2:{port}"):
                assert await status_of_one(f"http://{address}") == 401
