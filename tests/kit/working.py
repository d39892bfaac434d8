"""A gateway of several processes, and which process is what."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.kit.served import Served, serving, status_of_one

WORKERS = 2


class Workers(Served):
    """A running gateway of several processes."""

    def pids(self) -> list[int]:
        """The process of each worker, the last that it said."""
        found = re.findall(r"worker (\d) serves \(process (\d+)\)", self.command.said)
        return [int(pid) for _, pid in sorted(dict(found).items())]

    def hub(self) -> int:
        """The process beside the workers."""
        pid = self.command.process.pid
        children = {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
        [hub] = children - set(self.pids())
        return hub

    async def serves(self) -> bool:
        return await status_of_one(self.url, self.key) == 200


@asynccontextmanager
async def working(directory: Path, url: str, **fields: Any) -> AsyncIterator[Workers]:
    async with serving(directory, url, workers=WORKERS, **fields) as gate:
        yield Workers(gate.command, gate.http, gate.url, gate.admin, gate.key)
