"""Whether memory and disk stay within their bounds beside an engine with faults and batches of large answers.

    python -m bench.bounds [--minutes 60] [--memory-max 469762048] [--large-every 4]

One tenant's requests meet every fault in turn: cut streams, streams without `[DONE]`, errors in the middle, bytes that
are not HTTP. One has batches of short answers and one of answers of 8 MB, and each deletes its files only when none has
room. One cancels its batches. Memory, the database on disk and the files of each tenant are said every minute. Exits
with 1 if memory was more than `memory_max`, if a tenant kept more than `stored_bytes_max` or `files_max`, if the
database took more than all tenants may keep, or if memory grew by more than a tenth from the third quarter to the last.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import openai

from bench import report
from bench.load import Client
from bench.stack import BenchError, Route, fairgate, memory_bytes, process, run_bench, wait_ready
from tests.ports import free_port

MODEL = "bench"
CHAT: Any = "/v1/chat/completions"
FAULTS = ("stream", "cut", "stream", "nodone", "whole", "error", "stream", "garbage", "whole", "status", "closes")
LARGE_BYTES = 8_000_000
FILES_MAX, STORED_BYTES_MAX = 30, 100_000_000
DISK_SPARE = 1.2
"""Pages of SQLite that are not full, and its journal, over the bytes of lines."""
SHORT_S, FAULT_EVERY_S = 0.4, 0.15
GROWTH_MAX = 1.1
OVER = ("completed", "failed", "expired", "cancelled")
WHOLE = {
    "id": "1", "object": "chat.completion", "created": 1, "model": MODEL,
    "usage": {"prompt_tokens": 30, "completion_tokens": 1, "total_tokens": 31},
}  # fmt: skip
TOKEN = b'data: {"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"a"}%b}]}\n\n'
ENDS = {
    "stream": [TOKEN % b"", TOKEN % b',"finish_reason":"stop"', b"data: [DONE]\n\n", None],
    "nodone": [TOKEN % b',"finish_reason":"stop"', None],
    "error": [TOKEN % b"", b'data: {"error":{"message":"out of memory","code":500}}\n\n', None],
    "cut": [TOKEN % b""],
}


# the engine


def whole(text: str, status: str = "200 OK") -> bytes:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    body = json.dumps(WHOLE | {"choices": [choice]}).encode()
    return f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def stream(parts: list[bytes | None]) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join([b"0\r\n\r\n" if part is None else b"%x\r\n%b\r\n" % (len(part), part) for part in parts])


async def serve_engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve a connection: each request says in its `user` how its answer goes."""
    models = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()
    large = whole("a" * LARGE_BYTES)
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            body = await reader.readexactly(int(head.partition("content-length:")[2].split("\r\n", 1)[0] or 0))
            if head.startswith("get"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(models), models))
                continue
            do = json.loads(body)["messages"][0]["content"].split()[0]
            if do == "garbage":
                writer.write(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
            elif do in ENDS:
                writer.write(stream(ENDS[do]))
            elif do == "status":
                writer.write(whole("", "500 Internal Server Error"))
            elif do == "large":
                writer.write(large)
            elif do != "closes":
                await asyncio.sleep(SHORT_S if do == "short" else 0)
                writer.write(whole("hello"))
            if do in ("garbage", "cut", "closes"):
                break
            await writer.drain()
    writer.close()


async def run_engine(port: int) -> None:
    server = await asyncio.start_server(serve_engine, "127.0.0.1", port, limit=1 << 26)
    async with server:
        await server.serve_forever()


# the tenants


async def meet_faults(route: Route, ends: Counter[str]) -> None:
    """Send requests one after another, as a user that comes back."""
    client = Client(route.url)
    for number, do in zip(itertools.count(), itertools.cycle(FAULTS)):
        fields: dict[str, Any] = {"model": MODEL, "user": f"u{number % 500}", "stream": do in ENDS, "max_tokens": 5}
        body = json.dumps(fields | {"messages": [{"role": "user", "content": f"{do} {number} {'word ' * 200}"}]})
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer {route.key('faults')}\r\nConnection: close\r\n"
        )
        reply = await client.raw(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        ends[f"faults: {reply.status}"] += 1
        await asyncio.sleep(FAULT_EVERY_S)


def jsonl(do: str, count: int) -> bytes:
    return b"\n".join(
        json.dumps({"custom_id": f"item-{n}", "method": "POST", "url": CHAT, "body": {
            "model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": f"{do} {n}"}]}}).encode()
        for n in range(count)
    )  # fmt: skip


async def keep_batches(
    route: Route, tenant: str, lines: bytes, every_s: float, ends: Counter[str], *, cancels: bool
) -> None:
    """One batch after another; what it kept is deleted when nothing has room any longer."""
    async with openai.AsyncOpenAI(base_url=f"{route.url}/v1", api_key=route.key(tenant), max_retries=3) as api:
        while True:
            try:
                file = await api.files.create(file=("ask.jsonl", lines), purpose="batch")
                batch = await api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
                while batch.status not in OVER:
                    await asyncio.sleep(every_s)
                    look = api.batches.cancel if cancels and batch.status == "in_progress" else api.batches.retrieve
                    batch = await look(batch.id)
                ends[f"{tenant}: {batch.status}"] += 1
                errors = await api.files.content(batch.error_file_id) if batch.error_file_id else None
                is_full = bool(batch.errors) or (errors is not None and b"no_room" in errors.content)
            except openai.APIStatusError as error:
                ends[f"{tenant}: {error.status_code}"] += 1
                is_full = True
            if is_full:
                async for old in api.files.list():
                    await api.files.delete(old.id)
            await asyncio.sleep(every_s)


# the measurement


def kept(database: Path) -> dict[str, tuple[int, int]]:
    """Files and bytes of each tenant, as the database has them."""
    statement = (
        "SELECT tenant, COUNT(DISTINCT f.id), COALESCE(SUM(length(line)), 0) FROM fairgate_files f"
        " LEFT JOIN fairgate_lines l ON l.file = f.id GROUP BY tenant"
    )
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=60)) as asked:
        return {tenant: (files, size) for tenant, files, size in asked.execute(statement)}


def sizes(folder: Path) -> Iterator[int]:
    for each in folder.glob("u.db*"):
        with contextlib.suppress(FileNotFoundError):
            yield each.stat().st_size


async def watch(route: Route, folder: Path, samples: list[dict[str, Any]], ends: Counter[str], every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        held = await asyncio.to_thread(kept, folder / "u.db")
        samples.append({"memory": memory_bytes(route.pid), "disk": sum(sizes(folder)), "kept": held})
        print(
            f"  {len(samples) * every_s / 60:.1f} min: memory {samples[-1]['memory'] / 1e6:.1f} MB, disk"
            f" {samples[-1]['disk'] / 1e6:.0f} MB, kept {held}, {dict(ends)}",
            flush=True,
        )


def faults_of(samples: list[dict[str, Any]], memory_max: int) -> Iterator[str]:
    memory, disk = (max(one[what] for one in samples) for what in ("memory", "disk"))
    if memory > memory_max:
        yield f"memory was {memory} of {memory_max} bytes"
    most = [max((one["kept"].values()), default=(0, 0)) for one in samples]
    files, stored = max(files for files, _ in most), max(size for one in samples for _, size in one["kept"].values())
    if files > FILES_MAX or stored > STORED_BYTES_MAX:
        yield f"a tenant kept {files} of {FILES_MAX} files, {stored} of {STORED_BYTES_MAX} bytes"
    if disk > DISK_SPARE * 3 * STORED_BYTES_MAX:
        yield f"the database took {disk} bytes"
    # An answer of 8 MB that is under way shows in a sample, so medians tell whether memory grows.
    quarters = [one["memory"] for one in samples[len(samples) // 2 :]]
    third, last = (median(part) for part in (quarters[: len(quarters) // 2], quarters[len(quarters) // 2 :]))
    if last > GROWTH_MAX * third:
        yield f"memory grew from {third} bytes in the third quarter to {last} in the last"


async def run(options: argparse.Namespace) -> bool:
    samples: list[dict[str, Any]] = []
    ends = Counter[str]()
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="fairgate-bench-") as made:
        folder = Path(made)
        log = folder / "engine.log"
        with process([sys.executable, "-m", "bench.bounds", "engine", str(port)], log) as engine:
            await wait_ready(f"http://127.0.0.1:{port}", "/health", engine, log, 20.0)
            gateway = fairgate(
                f"http://127.0.0.1:{port}", dict.fromkeys(("faults", "short", "large", "cancels"), 1.0), model=MODEL,
                memory_max=options.memory_max, usage=str(folder / "u.db"),
                batches={"running_max": 8, "files_max": FILES_MAX, "stored_bytes_max": STORED_BYTES_MAX},
            )  # fmt: skip
            async with gateway as route, asyncio.TaskGroup() as group:
                tasks = [
                    meet_faults(route, ends),
                    keep_batches(route, "short", jsonl("short", 1000), 1.0, ends, cancels=False),
                    keep_batches(route, "large", jsonl("large", 1), options.large_every, ends, cancels=False),
                    keep_batches(route, "cancels", jsonl("short", 1000), 2.0, ends, cancels=True),
                    watch(route, folder, samples, ends, min(60.0, options.minutes * 60 / 4)),
                ]
                running = [group.create_task(task) for task in tasks]
                until_s = time.monotonic() + options.minutes * 60
                while time.monotonic() < until_s:  # noqa: ASYNC110
                    await asyncio.sleep(0.5)
                for task in running:
                    task.cancel()
    wrong = list(faults_of(samples, options.memory_max))
    report.save("bounds", {"minutes": options.minutes, "samples": samples, "ends": ends, "wrong": wrong})
    print("\n".join(wrong) or "all within bounds")
    return not wrong


def main() -> None:
    parser = argparse.ArgumentParser(description="memory and disk beside faults and batches of large answers")
    parser.add_argument("part", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--memory-max", type=int, default=448 << 20)
    parser.add_argument("--large-every", type=float, default=4.0, help="seconds between two looks at a batch")
    options = parser.parse_args()
    match options.part:
        case ["engine", port]:
            asyncio.run(run_engine(int(port)))
        case _:
            try:
                is_right = run_bench("bench.bounds", run(options))
            except* BenchError as errors:
                raise SystemExit(f"bench.bounds: {errors.exceptions[0]}") from None
            sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
