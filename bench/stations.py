"""What does one request cost, station by station, in what does not depend on the machine?

    python -m bench.stations [--functions] [--json] [--write]

--functions: the functions of each station as well. --write: the table of docs/budget.md, which tests hold.

A whole gateway in this process, as production composes it, with its default policy; one request of each kind is sent
again and again, and every instruction of our code is followed. Counted for each station: calls of our functions,
instructions of Python, blocks of memory that were allocated, and objects that the collector of cycles follows: lists,
dicts, sets, tuples and functions that an instruction makes, and instances that a class of ours begins. What a library
in C allocates counts for the line that called it.

A function belongs to the station that `STATIONS` names it or its module for, and else to that of its caller. The least
of several requests counts: some are disturbed by timers, and by tables that grow.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dis import get_instructions
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

from bench import report
from bench.kinds import KINDS, Client, Kind, engine
from bench.stack import BenchError
from gateway.config.model import Config
from gateway.process.gateway import Gateway
from tests.waiting import until

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "budget.md"
OURS: Final = tuple(f"{ROOT / package}/" for package in ("gateway", "policies", "backends"))
WARM_UP: Final = 3
REQUESTS, REQUESTS_MAX = 3, 9
APART_S: Final = 61.0
"""Between two requests, by the clock of admission: each finds that the one before can be forgotten, as one of long ago
can under load."""
CHUNK_S: Final = 0.02
FRAME: Final = 1
"""Objects that a call has only because it is followed."""

STATIONS: Final[dict[str, tuple[str, ...]]] = {
    "read": (
        "gateway/http/connection.py", "gateway/http/http_request.py", "Pipeline.handle",
    ),
    "identify": ("Pipeline.authorize", "Principal.app"),
    "interaction": (
        "Payload.conversation", "ClaimReader.read", "answer_keys", "Interactions.arrived", "Interactions.admitted",
        "Interactions.served",
    ),
    "admit": ("Pipeline._admit", "Dispatcher.submit"),
    "place": ("prefix_hashes", "policies/placements/", "Pool.hash_prefix"),
    "send": ("Exchange.dispatched", "Backend.send", "RequestContext.upstream_head"),
    "relay": (
        "_Connection.data_received", "Exchange.head_received", "Exchange.body_received", "Exchange._complete_body",
        "Exchange._complete_stream", "Outbox.flush", "RequestContext.begin_answer", "RequestContext.answer",
    ),
    "settle": ("Exchange._settle", "Dispatcher.finished", "Exchange.end"),
    "account": ("Gateway._settled", "Pool.ended"),
    "log": ("AccessLog.write",),
}  # fmt: skip
"""Modules, folders and functions with which work at a station begins."""
MEASURES: Final = ("calls", "instructions", "blocks", "objects")


BEGIN: Final = range(1000, 1000 + len(MEASURES))
"""Counts begin here: smaller numbers are no objects of their own."""


class Cost(NamedTuple):
    """The work for one request at one station."""

    calls: int
    instructions: int
    blocks: int
    objects: int


MAKING: Final = frozenset(
    {"BUILD_CONST_KEY_MAP", "BUILD_LIST", "BUILD_MAP", "BUILD_SET", "BUILD_TUPLE", "LIST_TO_TUPLE", "MAKE_FUNCTION"}
)


Costs = dict[str, tuple[dict[str, Cost], dict[str, Cost]]]
"""Costs of each kind of request, by station and by function."""


class Follower:
    """Counts what our code does, by station. It follows instruction after instruction, so all is slow meanwhile."""

    def __init__(self) -> None:
        self.stations: dict[str, list[int]] = {}
        self.functions: dict[str, list[int]] = {}
        self._under_way: list[tuple[str, list[int], list[int]]] = []
        """Station of each call under way, and the counts of the station and of the function."""
        self._blocks = 0
        self._follow = self._stepped  # made once: it is an object, too

    def __enter__(self) -> Follower:
        _keep_spares()
        sys.settrace(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if not code.co_filename.startswith(OURS):
            return None
        station = _station_of(code)
        if self._under_way:
            self._note(FRAME)
            station = station or self._under_way[-1][0]
        name = f"{station:12}{code.co_filename.removeprefix(f'{ROOT}/')}:{code.co_qualname}"
        counts = (self.stations.setdefault(station, [*BEGIN]), self.functions.setdefault(name, [*BEGIN]))
        self._under_way.append((station, *counts))
        for each in counts:
            each[0] += 1
            each[3] += code.co_name == "__init__"
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        self._blocks = sys.getallocatedblocks()
        return self._follow

    def _stepped(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        self._note(0)
        if event == "opcode":
            _, station, function = self._under_way[-1]
            makes = frame.f_lasti in _makers(frame.f_code)
            for counts in (station, function):
                counts[1] += 1
                counts[3] += makes
        elif event == "return":
            self._under_way.pop()
            self._blocks = sys.getallocatedblocks()
        return self._follow

    def _note(self, frames: int) -> None:
        """Count the blocks allocated since the last call."""
        blocks = sys.getallocatedblocks()
        _, station, function = self._under_way[-1]
        if blocks > self._blocks + frames:
            station[2] += blocks - self._blocks - frames
            function[2] += blocks - self._blocks - frames
        self._blocks = blocks


@cache
def _makers(code: CodeType) -> frozenset[int]:
    """Where are the instructions that make an object?"""
    return frozenset(each.offset for each in get_instructions(code) if each.opname in MAKING)


@cache
def _station_of(code: CodeType) -> str:
    """At which station does a call of this begin work? "": at that of its caller."""
    path, name, found = code.co_filename.removeprefix(f"{ROOT}/"), code.co_qualname, ""
    for station, begins in STATIONS.items():
        if name in begins:
            return station
        if path.startswith(tuple(each for each in begins if "/" in each)):
            found = station
    return found


def _keep_spares() -> None:
    """Have the interpreter's lists of spare dicts, lists, tuples and floats full, as they are under load: what comes
    from them costs no allocation, and tracing takes dicts from them, too."""
    for size in range(1, 20):
        held = [tuple([number] * size) for number in range(300, 2400)]
    del held
    dicts, lists, floats = [{1: 1} for _ in range(90)], [[1] for _ in range(90)], [0.1 * n for n in range(110)]
    del dicts, lists, floats


class Clock:
    """The clock of admission, which advances only when told to."""

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
            await until(lambda: not gateway.not_ready())
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
    """Return the cost of a request by station, and by function."""
    runs: list[Follower] = []
    for number in range(WARM_UP + REQUESTS_MAX):
        body = kind.body(number)
        clock.now += APART_S
        if number < WARM_UP:  # what is made once is there
            await client.ask(body)
            continue
        with Follower() as follower:
            answer = await client.ask(body)
            await asyncio.sleep(0)
        if answer.startswith(b"HTTP/1.1 200 "):  # not so where the machine stood still for seconds
            runs.append(follower)
        if len(runs) == REQUESTS:
            break
    else:
        raise BenchError(f"{kind.name}: too few answers, the last one {answer[:100]!r}")
    for run in runs:
        run.stations.pop("", None)  # timers
    return _least([run.stations for run in runs]), _least([run.functions for run in runs])


def _least(runs: list[dict[str, list[int]]]) -> dict[str, Cost]:
    names = [name for name in runs[0] if all(name in run for run in runs)]
    return {
        name: Cost(*[min(run[name][at] for run in runs) - BEGIN[at] for at in range(len(MEASURES))]) for name in names
    }


async def _costs(log: str, fields: dict[str, Any]) -> Costs:
    gc.collect()
    gc.disable()
    try:
        found: Costs = {}
        for kind in KINDS:
            async with composed(log, **fields) as (client, clock):
                found[kind.name] = await cost_of(kind, client, clock)
        return found
    finally:
        gc.enable()


def costs(log: str = "/dev/null", **fields: Any) -> Costs:
    """Return the costs of each kind of request, by station and by function. `fields` override the config."""
    return asyncio.run(_costs(log, fields))


def table(found: Costs) -> str:
    """All of it, a row for each station."""
    rows = [[station, *[_cell(found[kind.name][0].get(station)) for kind in KINDS]] for station in STATIONS]
    total = [_cell(Cost(*map(sum, zip(*found[kind.name][0].values(), strict=True)))) for kind in KINDS]
    return report.table(["station", *[kind.name for kind in KINDS]], [*rows, ["all", *total]])


def _cell(cost: Cost | None) -> str:
    return "-" if cost is None else " / ".join(f"{count:,}" for count in cost)


def written(page: str) -> dict[str, dict[str, Cost]]:
    """The costs that the page states, by kind and station."""
    heads, _, *rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("|")]
    found: dict[str, dict[str, Cost]] = {head.strip(): {} for head in heads[1:]}
    for station, *cells in rows:
        for own, cell in zip(found.values(), cells, strict=True):
            own[station.strip()] = Cost(*[int(count.replace(",", "")) for count in cell.split("/")])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="what one request costs, station by station")
    parser.add_argument("--functions", action="store_true")
    parser.add_argument("--json", action="store_true", help="of each kind, by station and by function")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--policy", help="instead of the default")
    options = parser.parse_args()
    found = costs(**({} if options.policy is None else {"policy": options.policy}))
    if options.json:
        print(json.dumps(found))
        return
    for kind, (_, functions) in found.items() if options.functions else ():
        rows = [[*map(str, cost), *name.split()] for name, cost in functions.items() if len(name.split()) > 1]
        rows.sort(key=lambda row: (row[4], -int(row[1])))
        print(f"{kind}\n\n{report.table([*MEASURES, 'station', 'function'], rows)}\n")
    print(table(found))
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        begin = page.index("| station |")
        end = page.index("\n\n", begin)
        PAGE.write_text(page[:begin] + table(found).strip() + page[end:], encoding="utf-8")


if __name__ == "__main__":
    main()
