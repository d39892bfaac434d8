"""The clients: they send a workload's requests on time and note what became of each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from random import Random
from typing import Any, Protocol

import aiohttp

from tenantbench.events import content_of, marker
from tenantbench.workloads import Ask, Session, Workload

RETRIES_MAX = 5
UNTOLD_WAIT_S = 1.0
REJECTED = (429, 503)
BEAT_S, BEATS_PER_REPORT = 0.1, 10


class Rejected(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, told_wait_s: float | None = None) -> None:
        super().__init__(status)
        self.status = status
        self.told_wait_s = told_wait_s


class Transport(Protocol):
    def ask(self, tenant: str, user: str, prompt: str, output: int, route: int) -> AsyncGenerator[str, None]:
        """Yield the pieces of an answer. Raises Rejected."""
        ...


@dataclass
class Record:
    """A request as its client saw it. Times count from the begin of the workload."""

    request: str
    tenant: str
    session: str
    task: int
    due_s: float
    prompt: int
    output: int
    lag_s: float = 0.0
    sent_s: float = 0.0
    first_s: float | None = None
    end_s: float | None = None
    tokens: int = 0
    doubled: int = 0
    outcome: str = "cut"
    """`done`, `aborted` by the client, `bad` (refused as it should be), `refused`, `error`, or `cut` by the end."""
    attempts: list[tuple[float, int, float | None]] = field(default_factory=list)
    """Time, status and told wait of each try that was rejected."""


class HttpTransport:
    """Asks gateways over HTTP with one key per tenant."""

    def __init__(self, urls: Sequence[str], keys: Mapping[str, str], model: str) -> None:
        self._urls, self._keys, self._model = urls, keys, model
        timeout = aiohttp.ClientTimeout(total=None)
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)

    async def close(self) -> None:
        await self._http.close()

    async def ask(self, tenant: str, user: str, prompt: str, output: int, route: int) -> AsyncGenerator[str, None]:
        message = {"role": "user", "content": prompt}
        body: dict[str, Any] = {"model": self._model, "messages": [message], "max_tokens": output, "stream": True}
        if user:
            body["user"] = user
        headers = {"Authorization": f"Bearer {self._keys[tenant]}"}
        url = f"{self._urls[route % len(self._urls)]}/v1/chat/completions"
        async with self._http.post(url, json=body, headers=headers) as response:
            if response.status != 200:
                told = response.headers.get("Retry-After", "")
                raise Rejected(response.status, float(told) if told.isdigit() else None)
            is_done = False
            async for line in response.content:
                if text := content_of(line):
                    yield text
                is_done = is_done or line.startswith(b"data: [DONE]")
            if not is_done:
                raise Rejected(502)


def prompt_text(stream: str, characters: int, mark: str) -> str:
    """Return a prompt that ends with its marker. Prompts of one stream begin with equal text."""
    size = max(0, characters - len(mark))
    return Random(stream).randbytes(size // 2 + 1).hex()[:size] + mark


class Driver:
    """Runs one workload through a transport."""

    def __init__(self, workload: Workload, transport: Transport, characters_per_token: int) -> None:
        self.records: list[Record] = []
        self.lags_s: list[float] = []
        """Delays of this process: of requests after their time, and of a timer that fires all the while."""
        self._workload = workload
        self._transport = transport
        self._characters = characters_per_token
        self._origin_s = 0.0
        self._numbers = 0

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time() - self._origin_s

    async def run(self, progress: Callable[[float, int], None] = lambda now_s, requests: None) -> float:
        """Return the time of the loop at which the workload began."""
        self._origin_s = asyncio.get_running_loop().time()
        tasks = [asyncio.create_task(self._session(session)) for session in self._workload.sessions]
        try:
            for beat in range(1, ceil(self._workload.seconds / BEAT_S) + 1):
                due_s = min(beat * BEAT_S, self._workload.seconds)
                await self._until(due_s)
                self.lags_s.append(self.now_s - due_s)
                if beat % BEATS_PER_REPORT == 0:
                    progress(self.now_s, len(self.records))
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return self._origin_s

    async def _session(self, session: Session) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(session.ends_s - self.now_s):
                await self._open(session) if session.arrivals_s else await self._closed(session)

    async def _open(self, session: Session) -> None:
        async with asyncio.TaskGroup() as group:
            for ask, due_s in zip(session.asks, session.arrivals_s, strict=True):
                await self._until(due_s)
                group.create_task(self._request(session, ask, due_s, 0))

    async def _closed(self, session: Session) -> None:
        await self._until(session.begins_s)
        task = 0
        while True:
            for ask in session.asks:
                record = await self._request(session, ask, self.now_s, task)
                if record.outcome in ("refused", "error"):  # a client that is turned away does not ask at once
                    await asyncio.sleep(UNTOLD_WAIT_S)
                await asyncio.sleep(session.pause_s)
            task += 1

    async def _until(self, due_s: float) -> None:
        await asyncio.sleep(due_s - self.now_s)

    async def _request(self, session: Session, ask: Ask, due_s: float, task: int) -> Record:
        self._numbers += 1
        mark = marker(session.tenant, session.name, self._numbers)
        stream = f"{session.tenant} {session.name} {task if session.is_task else -self._numbers}"
        text = prompt_text(stream, ask.prompt * self._characters, mark)
        record = Record(mark[2:-2], session.tenant, session.name, task, due_s, ask.prompt, ask.output)
        record.sent_s = self.now_s
        record.lag_s = record.sent_s - due_s
        self.lags_s.append(record.lag_s)
        self.records.append(record)
        for _ in range(RETRIES_MAX):
            try:
                await self._attempt(record, session, ask, text)
                return record
            except Rejected as rejected:
                record.attempts.append((self.now_s, rejected.status, rejected.told_wait_s))
                record.outcome = "bad" if ask.is_bad and rejected.status == 400 else "error"
                record.end_s = self.now_s
                if rejected.status not in REJECTED:
                    return record
                record.outcome = "refused"
                if rejected.told_wait_s is None:
                    return record
                await asyncio.sleep(rejected.told_wait_s)
            except (aiohttp.ClientError, ConnectionError, ValueError):
                record.outcome, record.end_s = "error", self.now_s
                return record
        return record

    async def _attempt(self, record: Record, session: Session, ask: Ask, text: str) -> None:
        pieces: list[str] = []
        answer = self._transport.ask(session.tenant, session.user, text, ask.output, session.route)
        record.outcome, record.end_s = "cut", None
        try:
            async with contextlib.aclosing(answer):
                async for piece in answer:
                    record.first_s = self.now_s if record.first_s is None else record.first_s
                    pieces.append(piece)
                    if ask.abort_after and len(pieces) >= ask.abort_after:
                        record.outcome = "aborted"
                        return
            record.outcome = "done"
        finally:
            record.end_s = self.now_s
            record.tokens, record.doubled = count_tokens(pieces)


def count_tokens(pieces: list[str]) -> tuple[int, int]:
    """Return tokens and doubled tokens. The simulated engine numbers its tokens; of others each piece counts."""
    words = "".join(pieces).split()
    if words and all(word.isdigit() for word in words):
        return len(set(words)), len(words) - len(set(words))
    return len(pieces), 0
