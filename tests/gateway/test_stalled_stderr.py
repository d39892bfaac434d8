"""Nobody waits for standard error: a pipe that nobody reads stops nothing, and a terminal keeps the banner in sight."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from gateway.process.stderr_log import StderrLog
from gateway.telemetry import log_writer
from tests.commands import FAIRGATE
from tests.gateway.capture import OK, Peer, Seen, Upstream, answer, replies
from tests.gateway.live import WAIT_S, chat, until
from tests.kit.pipes import Pipe, piped
from tests.kit.served import config_file, status_of_one
from tests.kit.terminals import Terminal, on_terminal


@asynccontextmanager
async def serving(directory: Path, url: str, pipe: Pipe) -> AsyncIterator[asyncio.subprocess.Process]:
    file = config_file(directory, url, access_log="off", open_access=True, tenants=[])
    process = await asyncio.create_subprocess_exec(FAIRGATE, "serve", "-c", file, stderr=pipe.theirs)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_gateway_serves_and_ends_though_nobody_reads_its_messages(tmp_path: Path) -> None:
    async def script(seen: Seen, peer: Peer) -> None:
        await peer.send(answer(b"", status=b"302 Found") if b"/tokenize" in seen.line else answer(b'{"usage":{}}'))

    pipe = Pipe()
    async with (
        Upstream(script) as upstream,
        serving(tmp_path, upstream.url, pipe) as process,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S)) as http,
    ):
        found = re.search(rb"serving on (http://\S+),", await pipe.said(rb"(?s)serving on [^\n]*\n.*models: "))
        assert found is not None
        url = found[1].decode()
        pipe.fill()
        async with http.post(url + "/tokenize", json=chat(), headers={"authorization": "Bearer k"}) as response:
            assert response.status == 502  # of which a message is written
        assert await status_of_one(url) == 200
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(WAIT_S):
            assert await process.wait() == 0
    pipe.close()


async def test_messages_come_when_somebody_reads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "BUFFER_BYTES_MAX", 2000)
    logger = logging.getLogger("fairgate.stalled")
    logger.propagate = False
    with piped(2) as pipe:
        logger.addHandler(log := StderrLog())
        logging.getLogger("fairgate").addHandler(log)
        try:
            pipe.fill()
            for number in range(100):
                logger.warning("message %d %s", number, "x" * 80)
            found = await pipe.said(rb"[0-9]+ lines of the log of messages were lost")
            kept = re.findall(rb"message ([0-9]+) x", found)
            [lost] = re.findall(rb"([0-9]+) lines of the log of messages were lost", found)
            assert [int(number) for number in kept] == list(range(len(kept)))
            assert 0 < len(kept) < 100
            assert len(kept) + int(lost) == 100
            logger.warning("again")
            assert b"again\n" in await pipe.said(rb"again\n")
        finally:
            logger.removeHandler(log)
            logging.getLogger("fairgate").removeHandler(log)
            log.close()


# --- on a terminal the banner stays in sight: no log scrolls by ---


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
