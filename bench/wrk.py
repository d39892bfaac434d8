"""A load that costs little: wrk, in C, on the core the proxy does not use."""

# The script below is a few hundred bytes.
# ruff: noqa: ASYNC240

import asyncio
import contextlib
import re
import shutil
import signal
import ssl
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from bench.load import Client
from bench.stack import BenchError, Route
from bench.upstream import OTHER_CORE, Case

TENANT = "bench"
COUNTED = re.compile(r"^counted (\d+) (\d+) (\d+) ([\d.]+) ([\d.]+)$", re.M)

SCRIPT = """
wrk.method, wrk.path = "POST", "/v1/chat/completions"
{headers}
wrk.body = [==[{body}]==]
local begun = 0
local function spread()
   begun = begun + 1
   return begun <= {connections} and math.random(0, {spread_ms}) or 0
end
local function paced() return math.random(0, {pause_ms} * 2) end
if {pause_ms} > 0 then delay = paced elseif {spread_ms} > 0 then delay = spread end
function done(summary, latency)
   local e = summary.errors
   io.write(string.format("counted %d %d %d %.1f %.1f\\n", summary.requests, summary.bytes,
      e.connect + e.read + e.write + e.status + e.timeout, latency:percentile(50), latency:percentile(99)))
end
"""


@dataclass(frozen=True, slots=True)
class Counted:
    """What wrk saw: whole replies, bytes of all replies, errors, and the time of whole replies."""

    requests: int
    read_bytes: int
    errors: int
    p50_s: float
    p99_s: float


def headers(route: Route) -> dict[str, str]:
    """The header fields of every request on this route."""
    auth = {"Content-Type": "application/json", "Authorization": f"Bearer {route.key(TENANT) or 'none'}"}
    return auth | dict(route.headers)


@contextlib.asynccontextmanager
async def running(route: Route, case: Case, seconds: float, pause_ms: int = 0) -> AsyncIterator["Load"]:
    """wrk at work for `seconds`, or until the block ends. `pause_ms`: mean time between two requests of a client."""
    with tempfile.TemporaryDirectory(prefix="fairgate-bench-") as folder:
        script = Path(folder, "post.lua")
        values = {"headers": "\n".join(f'wrk.headers["{name}"] = "{text}"' for name, text in headers(route).items())}
        values |= {"body": case.body(), "connections": str(case.connections), "spread_ms": str(case.spread_ms)}
        text = SCRIPT
        for name, value in (values | {"pause_ms": str(pause_ms)}).items():
            text = text.replace(f"{{{name}}}", value)
        script.write_text(text)
        command = ["taskset", "-c", str(OTHER_CORE), shutil.which("wrk") or "wrk", "-t1", f"-c{case.connections}"]
        command += [f"-d{seconds:.0f}s", "--timeout", "30s", "-s", str(script), route.url]
        child = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1)
        load = Load(child)
        try:
            yield load
        finally:
            load.interrupt()
            await child.wait()


class Load:
    """A running wrk."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child

    async def counted(self) -> Counted:
        """What it saw, at its end. Raises BenchError."""
        out, err = await self._child.communicate()
        counted = COUNTED.search(out.decode())
        if counted is None:
            raise BenchError(f"wrk did not finish: {out.decode()} {err.decode()}")
        requests, read_bytes, errors = map(int, counted.groups()[:3])
        p50_us, p99_us = map(float, counted.groups()[3:])
        return Counted(requests, read_bytes, errors, p50_us / 1e6, p99_us / 1e6)

    async def stop(self) -> Counted:
        """End it now; what it saw so far."""
        self.interrupt()
        return await self.counted()

    def interrupt(self) -> None:
        """Tell it to end, if it has not."""
        if self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.send_signal(signal.SIGINT)


async def wrk(route: Route, case: Case, seconds: float, pause_ms: int = 0) -> Counted:
    """Runs wrk against a route."""
    async with running(route, case, seconds, pause_ms) as load:
        return await load.counted()


async def reply_bytes(route: Route, case: Case) -> int:
    """How many bytes one whole reply has on this route, head and framing included. Raises BenchError if it is none."""
    client = Client(route.url)
    believing = ssl.create_default_context()
    believing.check_hostname, believing.verify_mode = False, ssl.CERT_NONE
    speaks = believing if route.url.startswith("https:") else None
    reader, writer = await asyncio.open_connection(client.host, client.port, ssl=speaks)
    body = case.body().encode()
    fields = {"Host": f"{client.host}:{client.port}", **headers(route), "Connection": "close"}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    head = f"POST /v1/chat/completions HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await reader.read(-1)
    writer.close()
    if b" 200 " not in answer[:20] or (case.events and b"[DONE]" not in answer):
        raise BenchError(f"{route.name} does not relay: {answer[:300]!r}")
    return len(answer)
