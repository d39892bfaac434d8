"""A gateway in a process of its own, started by the command with a config file."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.commands import Running, running
from tests.gateway.capture import DONE, STREAM_END, STREAM_HEAD, Peer, Seen, answer, chunk, token
from tests.gateway.live import WAIT_S, chat

OK = answer(b'{"usage":{"prompt_tokens":1,"completion_tokens":1}}')


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
    async with running("serve", "-c", config_file(directory, url, **fields)) as command:
        found = await command.says(r"serving on (http://\S+)(?: with \d workers)?, admin on (http://[^ ]+:\d+)")
        for worker in range(fields.get("workers", 1) if fields.get("workers", 1) > 1 else 0):
            await command.says(f"worker {worker} serves")
        key = await command.says(r"alice +(fg-\S+)")
        async with aiohttp.ClientSession() as http:
            yield Served(command, http, found[1], found[2], key[1])


class Served:
    def __init__(self, command: Running, http: aiohttp.ClientSession, url: str, admin: str, key: str) -> None:
        self.command = command
        self.http = http
        self.url = url
        self.admin = admin
        self.key = key

    def ask(self, **fields: Any) -> Any:
        headers = {"authorization": f"Bearer {self.key}"}
        return self.http.post(self.url + "/v1/chat/completions", json=chat(**fields), headers=headers)


class Streams:
    """An engine that sends one token and goes on when told."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def __call__(self, seen: Seen, peer: Peer) -> None:
        if not seen.json.get("stream"):
            await peer.send(OK)
            return
        await peer.send(STREAM_HEAD + chunk(token("a")))
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
