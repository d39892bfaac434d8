"""What does one request cost, station by station, in what does not depend on the machine?

    python -m bench.stations

A whole gateway in this process, as production composes it, with its default policy; one request of each kind is sent
again and again, and every instruction of our code is followed. Counted for each station: calls of our functions,
instructions of Python, blocks of memory that were allocated, and objects that the collector of cycles follows. What a
library in C does counts for the line that called it.

A function belongs to the station that `STATIONS` names it or its module for, and else to that of its caller. The least
of several requests counts: some are disturbed by timers, and by tables that grow.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

from bench import report
from bench.kinds import KINDS, Client, Kind, engine
from gateway.config.model import Config
from gateway.process.gateway import Gateway

__all__ = ["MEASURES", "STATIONS", "Cost", "costs", "table"]

ROOT: Final = Path(__file__).parents[1]
OURS: Final = tuple(f"{ROOT / package}/" for package in ("gateway", "policies", "backends"))
REQUESTS: Final = 4
APART_S: Final = 61.0
"""Between two requests, by the clock of admission: each finds that the one before can be forgotten, as one of long ago
can under load."""
CHUNK_S: Final = 0.02
FRAME: Final = 1
"""Objects that a call has only because it is followed."""

STATIONS: Final[dict[str, tuple[str, ...]]] = {
    "read": (
        "gateway/http/connection.py", "gateway/http/request.py", "Pipeline.handle", "Pipeline.refused",
    ),
    "identify": ("Pipeline.authorize", "Principal.app"),
    "interaction": (
        "ClaimReader.read", "given", "Interactions.arrived", "Interactions.admitted", "Interactions.served",
    ),
    "admit": ("Pipeline._admit", "Pipeline._submit", "Dispatcher.submit"),
    "place": ("gateway/request/prefixes.py", "policies/placements/", "Pool.prefix_of"),
    "send": ("Exchange.dispatched", "Backend.send", "upstream_head"),
    "relay": (
        "_Connection.data_received", "Exchange.head_received", "Exchange.body_received", "Exchange._complete_body",
        "Exchange._complete_stream", "Outbox._end_turn", "Reply.begin", "Reply.whole",
    ),
    "settle": ("Exchange._settle", "Exchange._settle_body", "Dispatcher.finished", "Exchange._end"),
    "account": ("Gateway._settled", "Pool.ended"),
    "log": ("AccessLog.write",),
}  # fmt: skip
"""Modules, folders and functions with which work at a station begins."""
MEASURES: Final = ("calls", "instructions", "blocks", "objects")


class Cost(NamedTuple):
    """What was done for one request at one station?"""

    calls: int
    instructions: int
    blocks: int
    objects: int


class Follower:
    """Counts what our code does, by station. It follows instruction after instruction, so all is slow meanwhile."""

    def __init__(self, root: str) -> None:
        self._root = root
        self.counts: dict[str, list[int]] = {}
        self.functions: dict[str, list[int]] = {}
        """The same by function."""
        self._stations: list[str] = []
        self._names: list[str] = []
        self._blocks = self._objects = 0
        self._own: dict[Any, str | None] = {}
        self._follow = self._stepped  # made once: it is an object, too

    def __enter__(self) -> Follower:
        _keep_spares()
        sys.settrace(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _station_of(self, frame: FrameType) -> str | None:
        """Where a call of this function is the first of a station's work; None: it is that of its caller."""
        code = frame.f_code
        if code in self._own:
            return self._own[code]
        path, name = code.co_filename.removeprefix(self._root), code.co_qualname
        found = None
        for station, begins in STATIONS.items():
            if name in begins:
                found = station
                break
            if found is None and path.startswith(tuple(each for each in begins if "/" in each)):
                found = station
        self._own[code] = found
        return found

    def _called(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if not code.co_filename.startswith(OURS):
            return None
        station = self._station_of(frame)
        if station is None:
            station = self._stations[-1] if self._stations else ""
        if self._stations:
            self._note(FRAME)
        self._stations.append(station)
        self._names.append(f"{station:12} {code.co_filename.removeprefix(self._root)}:{code.co_qualname}")
        if station not in self.counts:
            self.counts[station] = [0, 0, 0, 0]
        if self._names[-1] not in self.functions:
            self.functions[self._names[-1]] = [0, 0, 0, 0]
        self.counts[station][0] += 1
        self.functions[self._names[-1]][0] += 1
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        self._objects = gc.get_count()[0]
        self._blocks = sys.getallocatedblocks()
        return self._follow

    def _stepped(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        self._note()
        if event == "opcode":
            self.counts[self._stations[-1]][1] += 1
            self.functions[self._names[-1]][1] += 1
        elif event == "return":
            self._stations.pop()
            self._names.pop()
        self._objects = gc.get_count()[0]
        self._blocks = sys.getallocatedblocks()
        return self._follow

    def _note(self, frames: int = 0) -> None:
        blocks = sys.getallocatedblocks() - self._blocks - frames
        objects = gc.get_count()[0] - self._objects - frames
        for counts in (self.counts[self._stations[-1]], self.functions[self._names[-1]]):
            if blocks > 0:
                counts[2] += blocks
            if objects > 0:
                counts[3] += objects


def _keep_spares() -> None:
    """Have the interpreter's lists of spare dicts, lists, tuples and floats full, as they are under load: what comes
    from them costs no allocation, and tracing takes dicts from them, too."""
    for size in range(1, 20):
        held = [tuple([number] * size) for number in range(300, 2400)]
    del held
    dicts, lists, floats = [{1: 1} for _ in range(90)], [[1] for _ in range(90)], [0.1 * n for n in range(110)]
    del dicts, lists, floats


class Clock:
    """Of admission: it goes on only when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def composed(log: str, **fields: Any) -> AsyncIterator[tuple[Client, Clock]]:
    """A gateway before an engine that answers at once, and a client of it."""
    async with engine() as answering:
        config = Config.model_validate({
            "listen": "127.0.0.1:0",
            "admin": "127.0.0.1:0",
            "access_log": log,
            "open_access": True,
            "pools": [{"name": "pool", "backends": [{"url": answering.url}]}],
            **fields,
        })  # fmt: skip
        gateway = Gateway(config)
        clock = Clock()
        try:
            await gateway.start()
            while gateway.not_ready():
                await asyncio.sleep(0.01)
            for pool in gateway.pools:
                pool.dispatcher.clock = clock
            client = Client(gateway.port, "a key")
            await asyncio.get_running_loop().create_connection(lambda: client, "127.0.0.1", gateway.port)

            def on_piece() -> None:
                clock.now += CHUNK_S
                answering.next_chunk()

            client.on_piece = on_piece
            yield client, clock
        finally:
            await gateway.stop(0)


async def cost_of(kind: Kind, client: Client, clock: Clock) -> tuple[dict[str, Cost], dict[str, Cost]]:
    """By station, and by function."""
    runs: list[Follower] = []
    for number in range(2 * REQUESTS):
        body = kind.body(number)
        clock.now += APART_S
        if number < REQUESTS:  # what is made once is there
            await client.ask(body)
            continue
        with Follower(f"{ROOT}/") as follower:
            await client.ask(body)
            await asyncio.sleep(0)
        runs.append(follower)
    for run in runs:
        run.counts.pop("", None)  # timers
    return _least([run.counts for run in runs]), _least([run.functions for run in runs])


def _least(runs: list[dict[str, list[int]]]) -> dict[str, Cost]:
    names = [name for name in runs[0] if all(name in run for run in runs)]
    return {name: Cost(*[min(run[name][at] for run in runs) for at in range(len(MEASURES))]) for name in names}


async def _costs(log: str, fields: dict[str, Any]) -> dict[str, tuple[dict[str, Cost], dict[str, Cost]]]:
    gc.collect()
    gc.disable()
    try:
        found = {}
        for kind in KINDS:
            async with composed(log, **fields) as (client, clock):
                found[kind.name] = await cost_of(kind, client, clock)
        return found
    finally:
        gc.enable()


def costs(log: str = "/dev/null", **fields: Any) -> dict[str, tuple[dict[str, Cost], dict[str, Cost]]]:
    """Of each kind of request, by station and by function. `fields` go over the config."""
    return asyncio.run(_costs(log, fields))


def main() -> None:
    policy = sys.argv[1:2]
    for kind, (stations, functions) in costs(**({"policy": policy[0]} if policy else {})).items():
        rows = [[name, *map(str, cost)] for name, cost in stations.items()]
        total = [str(sum(cost[at] for cost in stations.values())) for at in range(len(MEASURES))]
        print(f"\n{kind}\n\n{report.table(['station', *MEASURES], [*rows, ['all', *total]])}")
        if len(sys.argv) > 2:
            for name, cost in sorted(functions.items(), key=lambda item: -item[1].instructions):
                print(f"{cost.instructions:6} {cost.calls:4} {cost.blocks:4} {cost.objects:4}  {name}")


if __name__ == "__main__":
    main()
