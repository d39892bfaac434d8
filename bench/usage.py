"""Whether what is counted durably equals the access log, whatever happens to the gateway and to its database.

    python -m bench.usage [--minutes 60] [--clients 24] [--every 20] [--database sqlite|postgresql]

Clients keep coming, of every kind that `bench.soak` has, some without a right key. In turns the gateway is killed (-9),
and its disk is full (a limit on the size of its files) or its PostgreSQL is killed and started again. In the end, of
each tenant, user and model, the database must have at least what the log says of requests that ended a second before a
kill, and at most that and what ended within that second. Exits with 1 if it has not.
"""

import argparse
import asyncio
import contextlib
import json
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import SecretStr

from bench import report
from bench.load import Client
from bench.ports import free_port
from bench.soak import START_S, TENANTS, Call, Gate
from bench.stack import BenchError, process, run_bench, wait_ready
from gateway.config.sections.keys import hash_key
from gateway.config.sections.usage import UsageConfig
from gateway.usage.database import Database
from gateway.usage.usage_report import Question, read
from tests.postgres_server import PostgresServer

DOUBT_S = 1.0
OUT_S = 5.0
"""How long a disk is full, or a server is gone."""
MEASURES = ("requests", "refused", "input_tokens", "cached_tokens", "output_tokens", "wasted_tokens", "queue_us")
Key = tuple[str, str, str]
Sums = dict[Key, Counter[str]]


class Killable:
    """A gateway in a process of its own, whose access log this one reads."""

    def __init__(self, config: Path, port: int, admin_port: int, folder: Path) -> None:
        self.gate = Gate(0, port, admin_port, [f"bench-key-of-{name}" for name in TENANTS] + ["nobody's"])
        self.lines: list[dict[str, Any]] = []
        self.killed_s: list[float] = []
        self._config = config
        self._url = f"http://127.0.0.1:{admin_port}"
        self._log = folder / "fairgate.log"
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        command = [sys.executable, "-m", "gateway.commands.main", "serve", "-c", str(self._config)]
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=log, limit=1 << 20
            )
        self._reading = asyncio.create_task(self._read())
        looks_left, client = 10 * START_S, Client(self._url)
        while (await client.get("/ready")).status != 200:
            looks_left -= 1
            if (status := self._process.returncode) is not None or not looks_left:
                raise BenchError(f"the gateway does not start (status {status}):\n{self._log.read_text()[-3000:]}")
            await asyncio.sleep(0.1)
        client.close()

    async def end(self, number: signal.Signals) -> None:
        assert self._process is not None
        assert self._reading is not None
        self._process.send_signal(number)
        if number is signal.SIGKILL:
            self.killed_s.append(time.time())
        await self._process.wait()
        await self._reading

    def leave(self) -> None:
        """Whatever became of the benchmark, the process does not outlive it."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def fill_disk(self) -> None:
        """For a while no file of the gateway takes a byte more."""
        assert self._process is not None
        _, most = resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (1, most))
        await asyncio.sleep(OUT_S)
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (most, most))

    def said(self, text: str) -> int:
        """How often its log says it."""
        return self._log.read_text().count(text)

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # a kill may cut the last one
                self.lines.append(json.loads(line))


@contextlib.asynccontextmanager
async def running(
    database: str, *, engines: int = 2, profile: str = "demo", **fields: object
) -> AsyncIterator[tuple[Killable, str]]:
    """A gateway in front of simulated engines, and where it counts. `fields` of its config go over the rest."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fairgate-bench-")))
        ports = [free_port() for _ in range(engines)]
        for engine in ports:
            log = folder / f"engine-{engine}.log"
            command = [sys.executable, "-m", "gateway.commands.main", "sim", "--port", str(engine)]
            command += ["--profile", profile]
            child = stack.enter_context(process(command, log))
            await wait_ready(f"http://127.0.0.1:{engine}", "/health", child, log, START_S)
        port, admin_port = free_port(), free_port()
        settings: dict[str, object] = {
            "listen": f"127.0.0.1:{port}",
            "admin": f"127.0.0.1:{admin_port}",
            "usage": database or str(folder / "usage.db"),
            "drain_s": 5,
            "pools": [{"name": "usage", "backends": [{"url": f"http://127.0.0.1:{each}"} for each in ports]}],
            "tenants": [{"name": name, "keys": [hash_key(f"bench-key-of-{name}")]} for name in TENANTS],
        }
        config = folder / "fairgate.yaml"
        config.write_text(yaml.safe_dump(settings | fields))
        gateway = Killable(config, port, admin_port, folder)
        stack.callback(gateway.leave)
        await gateway.start()
        yield gateway, str(settings["usage"])


async def keep_calling(gate: Gate, seed: int, until_s: float, ended_s: list[float]) -> None:
    """Until then; notes when each call ended."""
    rng = random.Random(seed)
    while time.monotonic() < until_s:
        await Call(rng, gate).outcome()
        ended_s.append(time.time())
        await asyncio.sleep(rng.uniform(0, 0.1))


async def break_things(gateway: Killable, server: PostgresServer | None, every_s: float, until_s: float) -> None:
    """One after the other, as long as there is time for two."""
    while time.monotonic() + 2 * every_s + OUT_S < until_s:
        await asyncio.sleep(every_s)
        await gateway.end(signal.SIGKILL)
        await gateway.start()
        await asyncio.sleep(every_s)
        if server is None:
            await gateway.fill_disk()
        else:
            await server.crash()
            await asyncio.sleep(OUT_S)
            await server.start()


def logged(lines: Iterable[dict[str, Any]]) -> Sums:
    sums: Sums = {}
    for line in lines:
        is_refused = line["outcome"] == "refused"
        model = "" if is_refused and not line["policy"] else line["model"]
        own = sums.setdefault((line["tenant"], line["user"], model), Counter())
        values = (1, is_refused, *(line[f"tokens_{name}"] for name in ("in", "cached", "out", "wasted")))
        own.update(dict(zip(MEASURES, (*values, round(line["queue_ms"] * 1000)), strict=True)))
    return sums


def counted(url: str) -> Sums:
    database = Database(UsageConfig(url=SecretStr(url)), makes=False)
    try:
        found = read(database, Question("7d", None, ("tenant", "user", "model"), datetime.now(UTC)), {})
    finally:
        database.close()
    return {
        (row.by[0], row.by[1], row.by[2]): Counter(
            {name: getattr(row, name) for name in MEASURES[:-1]} | {"queue_us": round(row.queue_s * 1e6)}
        )
        for row in found.rows
    }


def beyond(sums: Sums, others: Sums) -> Counter[str]:
    """By how much some are above others, whoever's they are."""
    more: Counter[str] = Counter()
    for key, own in sums.items():
        more += own - others.get(key, Counter())
    return more


def total(sums: Sums) -> Counter[str]:
    found: Counter[str] = Counter()
    for own in sums.values():
        found += own
    return found


async def run(options: argparse.Namespace) -> bool:
    async with contextlib.AsyncExitStack() as stack:
        server = None
        if options.database == "postgresql":
            server = await stack.enter_async_context(PostgresServer())
        gateway, url = await stack.enter_async_context(running("" if server is None else server.url))
        ended_s: list[float] = []
        until_s = time.monotonic() + options.minutes * 60
        callers = [keep_calling(gateway.gate, seed, until_s, ended_s) for seed in range(options.clients)]
        await asyncio.gather(*callers, break_things(gateway, server, options.every, until_s))
        await gateway.end(signal.SIGTERM)
        lines, found = gateway.lines, await asyncio.to_thread(counted, url)
        outages = gateway.said("usage is written again")
    in_doubt = [line for line in lines if any(0 <= at - line["ts"] <= DOUBT_S for at in gateway.killed_s)]
    due = logged(line for line in lines if not any(0 <= at - line["ts"] <= DOUBT_S for at in gateway.killed_s))
    missing, surplus = beyond(due, found), beyond(found, logged(lines))
    # What ended just before a kill may be counted while its line was not written yet.
    unlogged = sum(0 <= end - at <= DOUBT_S for end in ended_s for at in gateway.killed_s) + len(gateway.killed_s)
    kinds = {"access log": total(logged(lines)), "of these in the second before a kill": total(logged(in_doubt))}
    kinds |= {"database": total(found), "missing": missing, "counted, without a line": surplus}
    rows = [[kind, *(f"{sums[name]:,}" for name in MEASURES)] for kind, sums in kinds.items()]
    print(report.table(["", *MEASURES], rows))
    print(f"\n{len(gateway.killed_s)} kills, {outages} times the database came back, {len(ended_s):,} calls")
    result = {"database": options.database, "minutes": options.minutes, "kills": len(gateway.killed_s)}
    report.save("usage", result | {"outages": outages, "sums": kinds})
    return not missing and surplus["requests"] <= unlogged


def main() -> None:
    parser = argparse.ArgumentParser(description="whether what is counted equals the access log")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two faults")
    parser.add_argument("--database", choices=["sqlite", "postgresql"], default="sqlite")
    sys.exit(0 if run_bench("bench.usage", run(parser.parse_args())) else 1)


if __name__ == "__main__":
    main()
