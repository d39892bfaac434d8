"""A gateway of several processes, and which process is what."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.commands import Running, running
from tests.gateway.live import chat, until
from tests.kit.served import OK, config_file

WORKERS = 2


class Workers:
    """A running gateway of several processes."""

    def __init__(self, command: Running, url: str, key: str) -> None:
        self.command = command
        self.url = url
        self.key = key

    def pids(self) -> list[int]:
        """The process of each worker, the last that it said."""
        found = re.findall(r"worker (\d) serves \(process (\d+)\)", self.command.said)
        return [int(pid) for _, pid in sorted(dict(found).items())]

    @property
    def admin(self) -> str:
        """The admin listener of all workers."""
        found = re.search(r"admin on (http://\S+) for all of them", self.command.said)
        assert found is not None
        return found[1]

    def hub(self) -> int:
        """The process beside the workers."""
        pid = self.command.process.pid
        children = {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
        [hub] = children - set(self.pids())
        return hub

    @asynccontextmanager
    async def ask(self, **fields: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """On a connection of its own."""
        headers = {"authorization": f"Bearer {self.key}"}
        async with aiohttp.ClientSession() as http:
            async with http.post(self.url + "/v1/chat/completions", json=chat(**fields), headers=headers) as response:
                yield response

    async def serves(self) -> bool:
        async with self.ask() as response:
            return await response.read() == OK.partition(b"\r\n\r\n")[2]


@asynccontextmanager
async def working(directory: Path, url: str, **fields: Any) -> AsyncIterator[Workers]:
    config = config_file(directory, url, workers=WORKERS, **fields)
    async with running("serve", "-c", config) as command:
        found = await command.says(r"serving on (http://\S+) with 2 workers")
        key = await command.says(r"alice +(fg-\S+)")
        started = Workers(command, found[1], key[1])
        await until(lambda: len(started.pids()) == WORKERS)
        yield started
