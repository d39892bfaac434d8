"""Nobody waits for standard error: a real pipe that nobody reads stops neither requests nor the end of a gateway."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
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
from tests.gateway.capture import Peer, Seen, Upstream, answer
from tests.gateway.live import WAIT_S, chat
from tests.kit.served import config_file, status_of_one

PIPE_BYTES = 4096


class Pipe:
    """A small pipe. Nobody reads it unless a test does."""

    def __init__(self) -> None:
        self.ours, self.theirs = os.pipe()
        fcntl.fcntl(self.theirs, getattr(fcntl, "F_SETPIPE_SZ", 1031), PIPE_BYTES)
        self.filled = 0

    def fill(self) -> None:
        """No byte more fits in."""
        os.set_blocking(self.theirs, False)
        try:
            while True:
                self.filled += os.write(self.theirs, b"." * (1 if self.filled else PIPE_BYTES))
        except BlockingIOError:
            os.set_blocking(self.theirs, True)

    async def said(self, pattern: bytes) -> bytes:
        """What was written, once the pattern is in it."""
        found = b""
        os.set_blocking(self.ours, False)
        async with asyncio.timeout(WAIT_S):
            while re.search(pattern, found) is None:
                try:
                    found += os.read(self.ours, 65536)
                except BlockingIOError:
                    await self._readable()
        return found

    async def _readable(self) -> None:
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.ours, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self.ours)

    def close(self) -> None:
        os.close(self.ours)
        os.close(self.theirs)


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
    pipe = Pipe()
    saved = os.dup(2)
    os.dup2(pipe.theirs, 2)
    logger = logging.getLogger("fairgate.stalled")
    logger.propagate = False
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
        os.dup2(saved, 2)
        os.close(saved)
        logger.removeHandler(log)
        logging.getLogger("fairgate").removeHandler(log)
        log.close()
        pipe.close()
