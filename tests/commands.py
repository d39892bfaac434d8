"""The command `fairgate` in a process of its own, and what a test sees of it.

The process is forked from one that has loaded all modules already, once for all tests: a command takes a second to load
them. With `by`, it is started as a shell would start it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.waiting import WAIT_S, until

FAIRGATE = str(Path(sys.executable).with_name("fairgate"))
_LOADED = get_context("forkserver")
_LOADED.set_forkserver_preload(
    ["gateway.commands.main", "gateway.commands.checking", "gateway.commands.top", "gateway.process.gateway",
     "gateway.process.hub", "gateway.process.supervisor", "gateway.keys.in_redis", "gateway.keys.issuance",
     "gateway.usage.usage_report", "gateway.storage.redis.redis_store", "backends.simulated.simulated_server",
     "simulation.report"]
)  # fmt: skip


def _fairgate(arguments: tuple[str, ...], environment: Mapping[str, str], directory: str, *pipes: Connection) -> None:
    """Be the command, in the new process."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    for number, pipe in enumerate(pipes):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.stdin, sys.stdout = open(0), open(1, "w", buffering=1)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")
    sys.argv = ["fairgate", *arguments]
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # where tests run in the background some are ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from gateway.commands.main import main

    main(prog_name="fairgate")


class Running:
    """A process of the command, and what it has said so far."""

    def __init__(self, process: BaseProcess | subprocess.Popen[bytes], output: int, errors: int) -> None:
        self.process = process
        self.said = ""
        self.out = b""
        self._reading = asyncio.gather(self._read_output(output), self._read_errors(errors))

    @property
    def exit_code(self) -> int | None:
        """None: it has not ended."""
        return self.process.poll() if isinstance(self.process, subprocess.Popen) else self.process.exitcode

    async def _read_output(self, pipe: int) -> None:
        async for data in _read(pipe):
            self.out += data

    async def _read_errors(self, pipe: int) -> None:
        async for data in _read(pipe):
            self.said += data.decode()

    async def says(self, pattern: str) -> re.Match[str]:
        """What it wrote to standard error, or to standard output, once the pattern is in it."""
        await until(lambda: re.search(pattern, self.said + self.out.decode()) or self.exit_code is not None)
        found = re.search(pattern, self.said + self.out.decode())
        assert found is not None, self.said
        return found

    def signal(self, number: signal.Signals) -> None:
        if self.exit_code is None and self.process.pid is not None:
            os.kill(self.process.pid, number)

    async def ended(self) -> int:
        async with asyncio.timeout(WAIT_S):
            await self._reading
        await until(lambda: self.exit_code is not None)
        assert self.exit_code is not None
        return self.exit_code


async def _read(pipe: int) -> AsyncIterator[bytes]:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(pipe, "rb", 0))
    try:
        while data := await reader.read(65536):
            yield data
    finally:
        transport.close()


def _started(
    arguments: tuple[str, ...], by: tuple[str, ...], program: str, descriptors: tuple[int, ...], *pipes: int
) -> BaseProcess | subprocess.Popen[bytes]:
    """With these pipes as its standard input, output and errors; they are closed here."""
    theirs = [Connection(pipe, readable=number == 0, writable=number > 0) for number, pipe in enumerate(pipes)]
    try:
        if by:
            given, output, errors = pipes
            command = [*by, program, *arguments]
            return subprocess.Popen(command, stdin=given, stdout=output, stderr=errors, pass_fds=descriptors)
        process = _LOADED.Process(target=_fairgate, args=(arguments, dict(os.environ), os.getcwd(), *theirs))
        process.start()
        return process
    finally:
        for each in theirs:
            each.close()


@asynccontextmanager
async def running(
    *arguments: str,
    given: bytes | None = None,
    by: tuple[str, ...] = (),
    program: str = FAIRGATE,
    descriptors: tuple[int, ...] = (),
) -> AsyncIterator[Running]:
    """`given`: all of its standard input. `by`: what starts the program, and passes on `descriptors`."""
    theirs_in, ours_in = os.pipe()
    (output, theirs_out), (errors, theirs_err) = os.pipe(), os.pipe()
    if given is not None:
        os.write(ours_in, given)  # a pipe takes so much at once
    process = _started(arguments, by, program, descriptors, theirs_in, theirs_out, theirs_err)
    if given is not None:
        os.close(ours_in)
    started = Running(process, output, errors)
    try:
        yield started
    finally:
        if started.exit_code is None:
            process.kill()
        await started.ended()
        if given is None:
            os.close(ours_in)


async def run(*arguments: str, given: bytes | None = None) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    async with running(*arguments, given=given) as command:
        code = await command.ended()
    return code, command.out.decode(), command.said
