"""The command on a terminal of its own."""

from __future__ import annotations

import asyncio
import os
import pty
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.commands import FAIRGATE


class Terminal:
    """What it was sent so far, and the process of the command."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said = ""


@asynccontextmanager
async def on_terminal(*arguments: str) -> AsyncIterator[Terminal]:
    ours, theirs = pty.openpty()
    loop = asyncio.get_running_loop()
    files = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    size = {"TERM": "xterm", "COLUMNS": "80", "LINES": "30"}
    process = await asyncio.create_subprocess_exec(FAIRGATE, *arguments, **files, env={**os.environ, **size})
    os.close(theirs)
    terminal = Terminal(process)

    def read() -> None:
        try:
            terminal.said += os.read(ours, 65536).decode()
        except OSError:  # the other side is closed
            loop.remove_reader(ours)

    loop.add_reader(ours, read)
    try:
        yield terminal
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        loop.remove_reader(ours)
        os.close(ours)
