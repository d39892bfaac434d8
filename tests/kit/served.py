"""A gateway in a process of its own, started by the command with a config file."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.commands import Running, running
from tests.gateway.capture import BEGUN, DONE, OK, STREAM_END, Peer, Seen, chunk, token
from tests.gateway.live import WAIT_S, chat


def config_file(directory: Path, url: str, **fields: Any) -> str:
    """JSON is YAML too."""
    config = {
        "listen": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "tenants": [{"name": "alice"}],
        "pools": [{"name": "pool", "backends": [{"url": url}]}],
        **fields,
    }
    path = directory / "config.yaml"
    path.write_text(json.dumps(config))
    return str(path)


@asynccontextmanager
async def serving(directory: Path, url: str, **fields: Any) -> AsyncIterator[Served]:
    """One whose tenant alice has a key that it minted."""
    async with served(config_file(directory, url, **fields)) as gate:
        for worker in range(fields.get("workers", 1) if fields.get("workers", 1) > 1 else 0):
            await gate.command.says(f"worker {worker} serves")
        gate.key = (await gate.command.says(r"alice +(fg-\S+)"))[1]
        yield gate


@asynccontextmanager
async def served(config: str) -> AsyncIterator[Served]:
    async with running("serve", "-c", config) as command:
        found = await command.says(r"serving on (http://[^ ,]+)(?: with \d workers)?, admin on (http://[^ ]+:\d+)")
        async with aiohttp.ClientSession() as http:
            yield Served(command, http, found[1], found[2])


class Served:
    def __init__(self, command: Running, http: aiohttp.ClientSession, url: str, admin: str, key: str = "") -> None:
        self.command = command
        self.http = http
        self.url = url
        self.admin = admin
        self.key = key
        """What `ask` shows."""

    def ask(self, key: str = "", **fields: Any) -> Any:
        headers = {"authorization": f"Bearer {key or self.key}"}
        return self.http.post(self.url + "/v1/chat/completions", json=chat(**fields), headers=headers)

    async def status(self, key: str, **fields: Any) -> int:
        """Of an answer that is read to its end."""
        async with self.ask(key, **fields) as response:
            await response.read()
            return int(response.status)

    async def page(self, path: str) -> str:
        """What the admin listener says there."""
        async with self.http.get(self.admin + path) as response:
            return await response.text()

    async def ends(self, number: signal.Signals) -> int:
        """Send this signal; the exit code."""
        self.command.signal(number)
        return await self.command.ended()


class Streams:
    """An engine that sends one token and goes on when told."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def __call__(self, seen: Seen, peer: Peer) -> None:
        if not seen.json.get("stream"):
            await peer.send(OK)
            return
        await peer.send(BEGUN)
        await self.go_on.wait()
        await peer.send(chunk(token("b", "stop") + DONE) + STREAM_END)


async def status_of_one(url: str, key: str = "k", **fields: Any) -> int:
    """Ask one chat request on a connection of its own, and return the status of its whole answer."""
    headers = {"authorization": f"Bearer {key}", "connection": "close"}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S)) as http:
        async with http.post(f"{url}/v1/chat/completions", json=chat(**fields), headers=headers) as response:
            await response.read()
            return response.status


def is_refused(url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) != 0
