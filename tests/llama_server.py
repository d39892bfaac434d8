"""A real llama.cpp server, which listens within a second.

As a program, `python -m tests.llama_server` takes some of the options of llama.cpp's own `llama-server`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from argparse import ArgumentParser
from pathlib import Path
from types import TracebackType

from tests.ports import free_port
from tests.waiting import WAIT_S


class LlamaServer:
    """`async with LlamaServer(model, slots=6, context=49_152) as server`: a process that serves until its end."""

    def __init__(self, model: Path, *, slots: int, context: int, metrics: bool = True, port: int = 0) -> None:
        """`context`: tokens of all slots together."""
        self.port = port or free_port()
        self._arguments = ["-m", str(model), "--port", str(self.port), "--parallel", str(slots), "-c", str(context)]
        self._arguments += ["--metrics"] if metrics else []
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> LlamaServer:
        root = Path(__file__).parents[1]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.llama_server", *self._arguments, cwd=root,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(root)},
        )  # fmt: skip
        assert self._process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            assert await self._process.stdout.readline() == b"listening\n"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    async def kill(self) -> None:
        """End the server as a crash does."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


def main() -> None:
    import xllamacpp

    options = ArgumentParser()
    options.add_argument("-m", required=True)
    options.add_argument("--alias")
    options.add_argument("--metrics", action="store_true")
    for number in ("--port", "--parallel", "-c"):
        options.add_argument(number, type=int, required=True)
    asked = options.parse_args()
    terms = xllamacpp.CommonParams()
    terms.model.path, terms.port, terms.n_parallel, terms.n_ctx = asked.m, asked.port, asked.parallel, asked.c
    terms.model_alias = {asked.alias or Path(asked.m).stem}
    terms.endpoint_metrics, terms.endpoint_slots, terms.cpuparams.n_threads = asked.metrics, True, 1
    server = xllamacpp.Server(terms)  # it has threads of its own
    print("listening", flush=True)
    while server:
        time.sleep(3600)


if __name__ == "__main__":
    main()
