"""What a gateway holds while clients invent names without end: its memory over 1,000,000 requests, beside `memory_max`.

    python -m bench.names [--requests 1000000] [--open-access] [--memory-max 469762048]

Each request has a user, a session, a prompt and an id of its own, as long as they may be, and comes over a socket.
The engine answers at once, with a call of a tool that has an id of its own, so that an interaction stays open for each.
`--open-access`: each has a key of its own, and so is another tenant. Exits with 1 if the gateway ever held more.
"""

import argparse
import asyncio
import json
import sys
import time
from typing import Any, cast

from bench import report
from bench.stack import BenchError, fairgate, run_bench
from bench.upstream import MODEL, completion

CONNECTIONS = 48
SAID_EVERY = 50_000
WIDE = "\U0001f600"
"""Takes most memory: four bytes of each character of the name that it is in."""
ENGINES = 2
"""With one nobody asks how prompts begin."""
HEAD_END = b"\r\n\r\n"
LENGTH = b"ontent-length: "


def answer(number: int) -> bytes:
    """Asks for a tool, by an id that no other answer has."""
    made = json.loads(completion())
    made["choices"][0]["finish_reason"] = "tool_calls"
    call = {"id": f"call_{number:024d}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    made["choices"][0]["message"]["tool_calls"] = [call]
    body = json.dumps(made).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


MODELS = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 32768}]}).encode()


class Peer(asyncio.Protocol):
    """Reads whole messages, one at a time."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._read += data
        while (end := self._read.find(HEAD_END)) >= 0:
            head = self._read[:end].lower() + b"\r\n"
            at = head.find(LENGTH)
            size = end + 4 + (int(head[at + len(LENGTH) : head.index(b"\r", at)]) if at >= 0 else 0)
            if len(self._read) < size:
                return
            self._read = self._read[size:]
            self.whole(head)

    def whole(self, head: bytes) -> None:
        """A message is there."""
        raise NotImplementedError


class Engine(Peer):
    """One connection of a gateway to an engine that answers at once."""

    made = 0

    def whole(self, head: bytes) -> None:
        if head.startswith(b"post"):
            Engine.made += 1
            self.transport.write(answer(Engine.made))
        else:
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(MODELS), MODELS))


class Run:
    """All requests of one run."""

    def __init__(self, total: int, key: str, *, open_access: bool) -> None:
        self.total = total
        self.key = key
        self.open_access = open_access
        self.begun = self.ended = self.failed = 0
        self.sample = b""
        self.is_over = asyncio.Event()

    def next(self) -> bytes | None:
        """A request with names that nobody had before; None: there were enough."""
        if self.begun == self.total:
            return None
        self.begun += 1
        name = f"{self.begun:08d}"
        fields = {"model": MODEL, "messages": [{"role": "user", "content": f"{name} " + "a word " * 150}]}
        body = json.dumps(fields).encode()
        key = self.key + (name if self.open_access else "")
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {key}\r\n"
            f"x-fairgate-user: {name}{WIDE * 120}\r\nx-session-id: {name}{'s' * 240}\r\n"
            f"x-request-id: {name}{'r' * 120}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def answered(self, head: bytes) -> None:
        self.ended += 1
        if b" 200 " not in head[:16]:
            self.failed += 1
            self.sample = self.sample or head
        if self.ended == self.total:
            self.is_over.set()


class Caller(Peer):
    """One client: asks again as soon as it has its answer."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._ask()

    def whole(self, head: bytes) -> None:
        self._run.answered(head)
        self._ask()

    def _ask(self) -> None:
        request = self._run.next()
        if request is not None:
            self.transport.write(request)


def held_bytes(pid: int) -> int:
    """Resident memory of the process."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))


async def follow(pid: int, run: Run, seen: list[tuple[int, int]]) -> None:
    """Look at its memory every second, and say it now and then."""
    said, began_s = 0, time.monotonic()
    while not run.is_over.is_set():
        await asyncio.sleep(1.0)
        seen.append((run.ended, held_bytes(pid)))
        if run.ended >= said + SAID_EVERY:
            said = run.ended
            rate = run.ended / (time.monotonic() - began_s)
            print(f"  {run.ended:,} requests: {seen[-1][1] / 1e6:.0f} MB, {rate:.0f}/s", flush=True)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Engine, "127.0.0.1", 0) for _ in range(ENGINES)]
    urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    weights = {} if options.open_access else {"tenant": 1.0}
    more: dict[str, Any] = {"open_access": options.open_access}
    if options.memory_max is not None:
        more["memory_max"] = options.memory_max
    async with fairgate(urls, weights, "openai", MODEL, policy=options.policy, concurrency=64, **more) as route:
        key = "" if options.open_access else route.key("tenant")
        run = Run(options.requests, key, open_access=options.open_access)
        seen = [(0, held_bytes(route.pid))]
        host, _, port = route.url.rpartition("/")[2].partition(":")
        for _ in range(CONNECTIONS):
            await loop.create_connection(lambda: Caller(run), host, int(port))
        await follow(route.pid, run, seen)
    if run.failed:
        raise BenchError(f"{run.failed} of {run.total} requests failed, such as: {run.sample!r}")
    return {"requests": run.total, "open_access": options.open_access, "rss_bytes": seen}


async def main_of(options: argparse.Namespace) -> bool:
    result = await measure(options)
    seen = result["rss_bytes"]
    most = max(size for _, size in seen)
    result["most_bytes"], result["memory_max"] = most, options.memory_max
    report.save("names-open" if options.open_access else "names", result)
    tenth = [min(seen, key=lambda one: abs(one[0] - options.requests * part // 10)) for part in range(11)]
    print(report.table(["requests", "RSS"], [[f"{count:,}", f"{size / 1e6:.0f} MB"] for count, size in tenth]))
    print(f"\nat most {most / 1e6:.0f} MB")
    return bool(options.memory_max is None or most <= options.memory_max)


def main() -> None:
    parser = argparse.ArgumentParser(description="memory while clients invent names")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--open-access", action="store_true", help="a key for each request, too")
    parser.add_argument("--policy", default=None)
    parser.add_argument("--memory-max", type=int, default=None)
    sys.exit(0 if run_bench("bench.names", main_of(parser.parse_args())) else 1)


if __name__ == "__main__":
    main()
