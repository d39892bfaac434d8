"""What a tenant's first tokens take while another one holds each resource of the gateway at its limit, and all of them.

    python -m bench.hostile [--requests 600] [--block 50] [--resources queue,slow heads,...]

Engine, gateway, attacker and measured client are processes of their own. The measured tenant asks for a short stream
again and again, one after the other, in blocks: without the attack and with it, in turns, as often each. An engine that
is full can start nobody, so the queue that is full is that of another pool; who is next in the same one is shown by
`tests/gateway/test_one_tenant_at_all_limits.py`.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from bench import report
from bench.attacks import FLOOD, HOLD, Attack, Attacker, all_of, attacks
from bench.load import Client, Request
from bench.ports import free_port
from bench.stack import BenchError, fairgate, process, run_bench, wait_ready

MODEL, FULL = "bench", "full"
SLOTS = 64
QUEUED, CONNECTIONS = 500, 1500
SETTLE_S = 1.5
RATIO_MAX = 1.5
EVENT = b"data: %b\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chosen_attacks(key: str) -> dict[str, Attack]:
    return attacks(
        key,
        MODEL,
        FULL,
        connections=CONNECTIONS,
        queued=QUEUED + SLOTS,
        bodies=100,
        readers=8,
        requests=4,
        every_s=0.05,
    )


# the engine


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve_engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection: a token at once; then the end, no end, or large tokens without end."""
    token = EVENT % json.dumps({"object": "chat.completion.chunk", "choices": [{"delta": {"content": "a"}}]}).encode()
    usage = EVENT % b'{"choices":[],"usage":{"prompt_tokens":30,"completion_tokens":1}}'
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = int(head.partition("content-length:")[2].split("\r\n", 1)[0] or 0)
            body = await reader.readexactly(length)
            if head.startswith("get"):
                models = json.dumps(
                    {"object": "list", "data": [{"id": name, "object": "model"} for name in (MODEL, FULL)]}
                ).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(models), models))
                continue
            writer.write(HEAD + chunk(token))
            if b'"content": "%b' % HOLD.encode() in body or b'"prompt"' in body:
                await reader.read()
            while b'"content": "%b"' % FLOOD.encode() in body:
                writer.write(chunk(EVENT % json.dumps({"choices": [{"delta": {"content": "a" * 65536}}]}).encode()))
                await writer.drain()
                await asyncio.sleep(0.02)  # large tokens, and not too many: what is to be full is the reader's buffers
            writer.write(chunk(usage) + chunk(EVENT % b"[DONE]") + b"0\r\n\r\n")
    writer.close()


async def run_engine(port: int) -> None:
    server = await asyncio.start_server(serve_engine, "127.0.0.1", port, limit=1 << 26, backlog=1024)
    async with server:
        await server.serve_forever()


# the attacker


async def lines_in() -> asyncio.StreamReader:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    return lines


async def run_attacker(port: int, key: str) -> None:
    """For each line, the name of what to hold; an empty one ends it. Says what it was answered when it lets go."""
    lines, found = await lines_in(), dict(all_of(chosen_attacks(key)))
    while name := (await lines.readline()).decode().strip():
        attacker = Attacker(port, again_s=1.0)
        async with attacker.holding(found[name]):
            await lines.readline()
        print(json.dumps({each: dict(counts) for each, counts in attacker.statuses.items()}), flush=True)


# the measured client


async def run_client(port: int, key: str) -> None:
    """For each line, a number: asks so often, one after the other, and says what each first token took."""
    client, request = Client(f"http://127.0.0.1:{port}"), Request(30, 1, key=key, model=MODEL)
    lines = await lines_in()
    while line := await lines.readline():
        replies = [await client.send(request) for _ in range(int(line))]
        failures = [reply.failure for reply in replies if not reply.ok]
        print(json.dumps({"ttft_s": [reply.ttft_s for reply in replies], "failures": failures}), flush=True)


class Child:
    """A process of this module that is told and asked in lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process, self.told, self.said = process, process.stdin, process.stdout

    def tell(self, line: str) -> None:
        self.told.write(line.encode() + b"\n")

    async def ask(self, line: str) -> Any:
        self.tell(line)
        said = await asyncio.wait_for(self.said.readline(), 120)
        if not said:
            raise BenchError("a process of the benchmark ended; see above")
        return json.loads(said)


@contextlib.asynccontextmanager
async def child(*arguments: str) -> AsyncIterator[Child]:
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "bench.hostile", *arguments)
    started = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        yield Child(started)
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        await started.wait()


# the measurement


async def measure(name: str, attacker: Child, client: Child, requests: int, block: int) -> dict[str, Any]:
    """The same requests without the attack and with it, block by block."""
    ttft: dict[str, list[float]] = {"alone": [], "attacked": []}
    failures: list[str] = []
    await client.ask(str(block))
    for turn in range(-(-requests // block)):
        for side in ("alone", "attacked") if turn % 2 else ("attacked", "alone"):
            if side == "attacked":
                attacker.tell(name)
                await asyncio.sleep(SETTLE_S)
            found = await client.ask(str(block))
            ttft[side] += found["ttft_s"]
            failures += found["failures"]
            if side == "attacked":
                held = await attacker.ask("")
                await asyncio.sleep(SETTLE_S)
    return {"ttft_s": ttft, "failures": failures, "attacker": held}


def row(name: str, found: dict[str, Any]) -> list[str]:
    alone, attacked = found["ttft_s"]["alone"], found["ttft_s"]["attacked"]
    sides = [[report.quantile(side, share) * 1000 for share in (0.5, 0.99)] for side in (alone, attacked)]
    times = [f"{p50:.1f} / {p99:.1f} ms" for p50, p99 in sides]
    ratios = f"{sides[1][0] / sides[0][0]:.2f} / {sides[1][1] / sides[0][1]:.2f}"
    return [name, *times, ratios, str(len(found["failures"]))]


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[tuple[Child, Child]]:
    """Engine and gateway, and the attacker and the client before it."""
    port = free_port()
    keys = {"attacker": 1.0, "victim": 1.0}
    pools = [
        {"name": model, "models": [model], "backends": [{"url": f"http://{host}:{port}", "max_num_seqs": SLOTS}]}
        for model, host in ((MODEL, "127.0.0.1"), (FULL, "localhost"))
    ]
    limits = {
        "queue_requests_max": QUEUED,
        "client_connections_max": CONNECTIONS - 100,
        "response_buffer_bytes_max": 65536,  # slow readers are stuck soon, and the engine has nothing to do for them
    }
    with tempfile.TemporaryDirectory(prefix="fairgate-bench-") as folder:
        log = Path(folder, "engine.log")
        with process([sys.executable, "-m", "bench.hostile", "engine", str(port)], log) as engine:
            await wait_ready(f"http://127.0.0.1:{port}", "/health", engine, log, 20.0)
            async with (
                fairgate(f"http://127.0.0.1:{port}", keys, pools=pools, limits=limits) as route,
                child("attacker", route.url.rpartition(":")[2], route.key("attacker")) as attacker,
                child("client", route.url.rpartition(":")[2], route.key("victim")) as client,
            ):
                yield attacker, client


async def run(options: argparse.Namespace) -> None:
    rows, results = [], {}
    async with running() as (attacker, client):
        for name, _ in all_of(chosen_attacks("")):
            if options.resources and name not in options.resources.split(","):
                continue
            found = results[name] = await measure(name, attacker, client, options.requests, options.block)
            rows.append(row(name, found))
            print(f"  {' | '.join(rows[-1])}; attacker: {found['attacker']}", flush=True)
    report.save("hostile", {"resources": results, "ratio_max": RATIO_MAX})
    heads = ["resource", "p50 / p99 alone", "p50 / p99 under attack", "ratio of p50 / p99", "failed"]
    print(f"\n{report.table(heads, rows)}\n\n{report.SHARED_CORES}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="one tenant holds everything, another one is measured")
    parser.add_argument("part", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument(
        "--requests", type=int, default=600, help="on each side, for each resource; the p99 of few is noise"
    )
    parser.add_argument("--block", type=int, default=50, help="requests in a turn")
    parser.add_argument("--resources", help="some of them, with commas between")
    options = parser.parse_args()
    match options.part:
        case ["engine", port]:
            asyncio.run(run_engine(int(port)))
        case ["attacker", port, key]:
            asyncio.run(run_attacker(int(port), key))
        case ["client", port, key]:
            asyncio.run(run_client(int(port), key))
        case _:
            run_bench("bench.hostile", run(options))


if __name__ == "__main__":
    main()
