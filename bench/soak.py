"""Whether fairgate leaks: memory and everything that is borrowed, under mixed load with clients that give up.

    python -m bench.soak [--minutes 60] [--clients 48]

Clients keep coming: streams, whole answers, embeddings, calls of one interaction, and readers that take a little at a
time; a tenth of them hang up at a random moment. Two simulated engines answer. Memory is said every minute. In the end
nothing may be left over: no request queued or dispatched, no KV or slot counted, no open interaction, no connection
more than before the load. Exits with 1 if something is, or if memory grew by more than a tenth after the first third.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import yaml

from bench import report
from bench.load import VOCABULARY, Client
from bench.ports import free_port
from bench.stack import BenchError, memory_bytes, open_files, process, run_bench, wait_ready
from gateway.config.sections.keys import hash_key

MODEL = "simulated"
ENGINES = 2
TENANTS = ("alice", "bob")
START_S = 60.0
INTERACTION_IDLE_S = 5.0
ABORTS = 0.1
ABORT_S = 2.0
SLOW_PAUSE_S = 0.05
CALL_LIMIT_S = 120.0
REST_S = 60.0
GROWTH_MAX = 1.1
# What must be 0 when nothing is asked any more.
GAUGES = (
    "fairgate_queued_requests", "fairgate_queued_bytes", "fairgate_dispatched_sequences", "fairgate_starting_requests",
    "fairgate_kv_projected_ratio", "fairgate_open_interactions",
)  # fmt: skip
FILES_SPARE = 2 * ENGINES + 1
"""Probes and scrapers open connections when it suits them."""
LAST_BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "bye"}], "max_tokens": 1}).encode()
LAST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: soak\r\nAuthorization: Bearer KEY\r\nConnection: close\r\n"
    b"x-fairgate-interaction: last\r\nx-fairgate-end: true\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % len(LAST_BODY)
) + LAST_BODY
SAMPLE = re.compile(r"^(\w+)(?:\{[^}]*\})? (\S+)$", re.M)


class Gate:
    """The gateway under test."""

    def __init__(self, pid: int, port: int, admin_port: int, keys: list[str]) -> None:
        self.pid = pid
        self.port = port
        self.keys = keys
        self._admin = Client(f"http://127.0.0.1:{admin_port}")

    async def left_over(self) -> dict[str, float]:
        """Gauges that are not 0, summed over their labels."""
        page = (await self._admin.get("/metrics")).body.decode()
        found = Counter[str]()
        for name, value in SAMPLE.findall(page):
            if name in GAUGES:
                found[name] += float(value)
        if set(found) != set(GAUGES):
            raise BenchError(f"/metrics lacks {set(GAUGES) - set(found)}")
        return {name: value for name, value in found.items() if value}


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Gate]:
    """fairgate with the default policy in front of simulated engines."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fairgate-bench-")))

        async def started(name: str, ready_port: int, path: str, *arguments: str) -> int:
            log = folder / f"{name}.log"
            child = stack.enter_context(process([sys.executable, "-m", "gateway.commands.main", *arguments], log))
            await wait_ready(f"http://127.0.0.1:{ready_port}", path, child, log, START_S)
            return child.pid

        ports = [free_port() for _ in range(ENGINES)]
        for port in ports:
            await started(f"engine-{port}", port, "/health", "sim", "--port", str(port))
        keys = [f"bench-key-of-{tenant}" for tenant in TENANTS]
        port, admin_port = free_port(), free_port()
        settings = {
            "listen": f"127.0.0.1:{port}",
            "admin": f"127.0.0.1:{admin_port}",
            "access_log": str(folder / "access.log"),
            "interactions": {"idle_s": INTERACTION_IDLE_S},
            "pools": [{"name": "soak", "backends": [{"url": f"http://127.0.0.1:{port}"} for port in ports]}],
            "tenants": [{"name": n, "keys": [hash_key(key)]} for n, key in zip(TENANTS, keys, strict=True)],
        }
        config = folder / "fairgate.yaml"
        config.write_text(yaml.safe_dump(settings))
        pid = await started("fairgate", admin_port, "/ready", "serve", "-c", str(config))
        yield Gate(pid, port, admin_port, keys)
        if "Traceback" in (said := (folder / "fairgate.log").read_text()):
            raise BenchError(f"fairgate had a fault:\n{said[-3000:]}")


class Call:
    """One request of a kind that the dice choose."""

    def __init__(self, rng: random.Random, gate: Gate) -> None:
        self.kind = rng.choices(("stream", "whole", "embeddings", "slow", "interaction"), (45, 20, 15, 10, 10))[0]
        self._port = gate.port
        text = " ".join(rng.choices(VOCABULARY, k=rng.randint(5, 400)))
        fields: dict[str, Any] = {"model": MODEL, "user": f"u{rng.randrange(50)}"}
        more = ""
        if self.kind == "embeddings":
            path = "/v1/embeddings"
            fields["input"] = text
        else:
            path = "/v1/chat/completions"
            fields |= {"messages": [{"role": "user", "content": text}], "max_tokens": rng.randint(1, 200)}
            fields["stream"] = self.kind != "whole"
        if self.kind == "interaction":
            more = f"x-fairgate-interaction: {rng.randrange(1000)}\r\n"
        body = json.dumps(fields).encode()
        self.request = (
            f"POST {path} HTTP/1.1\r\nHost: soak\r\nAuthorization: Bearer {rng.choice(gate.keys)}\r\n{more}"
            f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        self._limit_s = rng.uniform(0, ABORT_S) if rng.random() < ABORTS else CALL_LIMIT_S

    async def outcome(self) -> str:
        """The status of its answer, or how it ended without a whole one."""
        status = ""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=4096)
        except OSError:
            return "not connected"
        try:
            async with asyncio.timeout(self._limit_s):
                writer.write(self.request)
                while piece := await reader.read(512 if self.kind == "slow" else 65536):
                    status = status or piece[9:12].decode()
                    if self.kind == "slow":
                        await asyncio.sleep(SLOW_PAUSE_S)
            return status or "no answer"
        except TimeoutError:
            writer.transport.abort()
            return "hung up" if self._limit_s < CALL_LIMIT_S else "too late"
        except OSError:
            return "connection lost"
        finally:
            writer.close()


async def keep_calling(gate: Gate, seed: int, until_s: float, ends: Counter[str]) -> None:
    rng = random.Random(seed)
    while time.monotonic() < until_s:
        ends[await Call(rng, gate).outcome()] += 1


async def watch(gate: Gate, memory: list[int], ends: Counter[str]) -> None:
    """Say every minute what it holds."""
    while True:
        await asyncio.sleep(60)
        memory.append(memory_bytes(gate.pid))
        print(f"  minute {len(memory)}: {memory[-1] / 1e6:.1f} MB, {ends.total()} calls", flush=True)


async def at_rest(gate: Gate, files: int) -> dict[str, float]:
    """What is left over once nothing is asked any more; empty as soon as it is nothing."""
    until_s = time.monotonic() + REST_S
    while True:
        left = await gate.left_over()
        if (more := open_files(gate.pid) - files) > FILES_SPARE:
            left["open files"] = more
        if not left or time.monotonic() > until_s:
            return left
        # Interactions that fell silent are found out when a request arrives.
        await Client(f"http://127.0.0.1:{gate.port}").raw(LAST.replace(b"KEY", gate.keys[0].encode()))
        await asyncio.sleep(0.5)


async def run(options: argparse.Namespace) -> bool:
    memory: list[int] = []
    ends = Counter[str]()
    async with running() as gate:
        await keep_calling(gate, 0, time.monotonic() + 2, Counter())  # what is opened once is open
        await asyncio.sleep(5)
        files = open_files(gate.pid)
        until_s = time.monotonic() + options.minutes * 60
        watching = asyncio.create_task(watch(gate, memory, ends))
        await asyncio.gather(*(keep_calling(gate, seed, until_s, ends) for seed in range(1, options.clients + 1)))
        memory.append(memory_bytes(gate.pid))
        watching.cancel()
        left = await at_rest(gate, files)
    growth = memory[-1] / memory[len(memory) // 3]
    result = {"minutes": options.minutes, "memory_bytes": memory, "growth": growth, "ends": ends, "left_over": left}
    report.save("soak", result)
    print(report.table(["calls ended with", "count"], [[end, f"{count:,}"] for end, count in ends.most_common()]))
    print(f"\nmemory: {', '.join(f'{size / 1e6:.0f}' for size in memory)} MB; {growth:.2f} times that of a third")
    print(f"left over: {left or 'nothing'}")
    return not left and growth <= GROWTH_MAX


def main() -> None:
    parser = argparse.ArgumentParser(description="what leaks under mixed load")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=48)
    sys.exit(0 if run_bench("bench.soak", run(parser.parse_args())) else 1)


if __name__ == "__main__":
    main()
