"""An admin listener for all workers: it asks each worker, for a bounded time, and merges their answers.

docs/workers.md says how each answer is merged. An answer names workers only where they differ.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final, NamedTuple

import aiohttp
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.utils import floatToGoString
from yarl import URL

from gateway.config.model import Config
from gateway.operator.admin_listener import health, ready
from gateway.operator.guard import guard
from gateway.operator.page.files import page
from gateway.operator.snapshots.snapshot import NO_ANSWER, grouped_by_text, state_of
from gateway.telemetry.metric_families import FAMILIES, LEAST, MOST, SUM

ANSWER_S: Final = 2.5
"""Seconds after which a silent worker is left out and named. Commands wait for 3 s. Until its late answer has come, the
worker is not asked again, so a hanging worker delays one caller and not all in turn.
"""
CHANGE_S: Final = 60.0
"""Seconds for a change: a reload asks new engines for their state, and a database may take long."""
ANSWER_BYTES_MAX: Final = 64 << 20
as_text: Callable[[float], str] = floatToGoString
_OF_PROCESSES: Final = {"process_max_fds": LEAST, "process_start_time_seconds": LEAST}
"""Merge rules for process metrics of the client library; its other metrics are added up."""


class WorkerAnswer(NamedTuple):
    """Answer of one worker. `status` is 0 if the worker did not answer."""

    name: str
    status: int
    content: bytes


class WorkersClient:
    """Client of all workers' admin sockets."""

    def __init__(self, config: Config, sockets: Sequence[str]) -> None:
        self.config = config
        self._sockets = sockets
        self._late: dict[int, asyncio.Task[WorkerAnswer]] = {}
        """Requests that a worker has not answered in time, by worker."""
        self._sessions: list[aiohttp.ClientSession] = []

    async def open(self, stack: AsyncExitStack) -> None:
        """Open a session to each worker until the stack is closed."""
        stack.callback(lambda: [late.cancel() for late in self._late.values()])
        for path in self._sockets:
            session = aiohttp.ClientSession("http://worker", connector=aiohttp.UnixConnector(path, limit=0))
            self._sessions.append(await stack.enter_async_context(session))

    async def ask(self, index: int, path: str, *, method: str = "GET", within_s: float = ANSWER_S) -> WorkerAnswer:
        """Return the answer of one worker. `path`: as in a request, with its query."""
        silent, late = WorkerAnswer(f"worker {index}", 0, b""), self._late.get(index)
        if late is not None and not late.done():
            return silent
        asked = asyncio.ensure_future(self._ask(index, path, method, silent))
        try:
            await asyncio.wait({asked}, timeout=within_s)
        except asyncio.CancelledError:
            asked.cancel()
            raise
        if asked.done():
            return asked.result()
        self._late[index] = asked
        return silent

    async def _ask(self, index: int, path: str, method: str, silent: WorkerAnswer) -> WorkerAnswer:
        try:
            async with self._sessions[index].request(method, URL(path, encoded=True)) as response:
                found = await response.content.read(ANSWER_BYTES_MAX)
                while not response.content.at_eof() and len(found) < ANSWER_BYTES_MAX:
                    found += await response.content.read(ANSWER_BYTES_MAX - len(found))
                return WorkerAnswer(silent.name, response.status, found)
        except (OSError, TimeoutError, aiohttp.ClientError):
            return silent

    async def ask_all(self, path: str, *, method: str = "GET") -> list[WorkerAnswer]:
        """Ask all workers at once and return their answers; `status` is 0 for those that did not answer."""
        asked = (self.ask(index, path, method=method) for index in range(len(self._sockets)))
        return list(await asyncio.gather(*asked))


class _Answers:
    """Handlers that ask the workers and merge their answers."""

    def __init__(self, workers: WorkersClient, has_reloaded: Callable[[], None]) -> None:
        self._workers = workers
        self._has_reloaded = has_reloaded

    async def ready(self, request: web.Request) -> web.Response:
        readiness = [(one.name, _readiness(one)) for one in await self._workers.ask_all("/ready")]
        return ready(
            grouped_by_text([(name, answer["why_not"]) for name, answer in readiness]),
            state_of([(name, answer.get("state")) for name, answer in readiness]),
            grouped_by_text([(name, answer.get("faults", [])) for name, answer in readiness]),
        )

    async def metrics(self, request: web.Request) -> web.Response:
        answers = [one for one in await self._workers.ask_all("/metrics") if one.status == 200]
        if not answers:
            return _nobody()
        text = await asyncio.to_thread(lambda: merged([one.content.decode() for one in answers]))
        count = (
            "# HELP fairgate_workers Workers that answered.\n# TYPE fairgate_workers gauge\n"
            f"fairgate_workers {float(len(answers))}\n"
        )
        return web.Response(body=(text + count).encode(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def one_knows(self, request: web.Request) -> web.Response:
        """Pass on the answer of the worker that knows the request."""
        answers = await self._workers.ask_all(request.raw_path)
        found = next((one for one in answers if one.status == 200), None)
        silent = [one.name for one in answers if not one.status]
        if found is None and silent:
            error = f"{', '.join(silent)} {NO_ANSWER}, and no other knows of it"
            return web.json_response({"error": error}, status=503)
        return _passed(found or answers[0])

    async def any_knows(self, request: web.Request) -> web.Response:
        """Pass on the answer of the first worker that answers: all would give an equal answer."""
        within_s = ANSWER_S if request.path == "/state" else CHANGE_S
        for index in range(self._workers.config.workers):
            answer = await self._workers.ask(index, request.raw_path, method=request.method, within_s=within_s)
            if answer.status:
                return _passed(answer)
        return _nobody()

    async def reload(self, request: web.Request) -> web.Response:
        """Reload at one worker; if it takes over the config, all other workers follow."""
        answer = await self.any_knows(request)
        if answer.status == 200:
            self._has_reloaded()
        return answer

    async def drain(self, request: web.Request) -> web.Response:
        """Drain or resume at all workers, and add up their counts."""
        answers = await self._workers.ask_all(request.raw_path, method="POST")
        done = [json.loads(one.content) for one in answers if one.status == 200]
        if not done:
            return _passed(max((one for one in answers if one.status), key=lambda one: one.status, default=None))
        answer = {**done[0], **{name: sum(one[name] for one in done) for name in ("running", "waiting")}}
        answer["in_service"] = any(one["in_service"] for one in done)
        missing = [f"{one.name} {NO_ANSWER}" for one in answers if one.status != 200]
        warnings = [*dict.fromkeys(one["warning"] for one in done if "warning" in one), *missing]
        if warnings:
            answer["warning"] = "; ".join(warnings)
        return web.json_response(answer)


def workers_app(workers: WorkersClient, has_reloaded: Callable[[], None]) -> web.Application:
    """Return the admin app of a gateway with several workers.

    `has_reloaded` is called after one worker has taken over a new config, so that the others follow.
    """
    answers = _Answers(workers, has_reloaded)
    app = web.Application(middlewares=[guard(lambda: workers.config)])
    app.add_routes(
        [
            web.get("/health", health),
            web.get("/ready", answers.ready),
            web.get("/metrics", answers.metrics),
            web.get("/explain/{id}", answers.one_knows),
            web.post("/reload", answers.reload),
            web.post("/drain/{backend:.+}", answers.drain),
            web.post("/resume/{backend:.+}", answers.drain),
            web.get("/usage", answers.any_knows),
            web.get("/state", answers.any_knows),
            *page(),
        ]
    )
    return app


def _readiness(one: WorkerAnswer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(one.content) if one.status in (200, 503) else {"why_not": [NO_ANSWER]}
    return found


def _passed(answer: WorkerAnswer | None) -> web.Response:
    if answer is None:
        return _nobody()
    return web.Response(body=answer.content, status=answer.status, content_type="application/json")


def _nobody() -> web.Response:
    return web.json_response({"error": "no worker answers: see /ready, and the log"}, status=503)


def merged(pages: Sequence[str]) -> str:
    """Merge pages in the Prometheus text format without timestamps. Lines that do not parse are left out.

    Counters are added up, and so are gauges of what each worker holds by itself. A gauge of what all workers see alike
    takes the largest or the smallest value, so that one worker in a bad state is enough to show it.
    """
    comments: defaultdict[str, dict[str, None]] = defaultdict(dict)
    values: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for text in pages:
        name = ""
        for line in text.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
            if line.startswith("#"):
                comments[name][line] = None
                continue
            series, _, number = line.rpartition(" ")
            try:
                value = float(number)
            except ValueError:
                continue
            known = values[name].get(series)
            values[name][series] = value if known is None else _one(name, known, value)
    return "".join(
        f"{line}\n"
        for name, lines in comments.items()
        for line in (*lines, *(f"{series} {as_text(value)}" for series, value in values[name].items()))
    )


def _one(name: str, known: float, value: float) -> float:
    family = FAMILIES.get(name)
    rule = family.merged if family is not None else _OF_PROCESSES.get(name, SUM)
    return max(known, value) if rule == MOST else min(known, value) if rule == LEAST else known + value
