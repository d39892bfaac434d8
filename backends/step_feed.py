"""What does an engine report after each step? Its reports count while they agree with its page of metrics.

A message says by the engine's own clock when it was made. `_Clock` puts that on ours: none was made before it was asked
for, and none after it came. So a message that was held up on its way is known to be old.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Final

import aiohttp
import msgspec

from backends.vllm_plugin.steps import CONTENT_TYPE, VERSION
from policies.capacity.gauges import Gauges

SILENCE_S: Final = 0.75
"""Nothing new for so long: the feed is lost. The engine's heart beats three times as often."""
LATE_S: Final = 0.5
"""A message that is older when it comes counts as none."""
STEP_AGE_S: Final = 0.1
"""So long after a step what it left is a fact. Then another step is on its way, and this is no better than a page."""
CREEP: Final = 1e-3
"""Seconds per second by which the engine's clock may go slower than ours, at most."""
CONNECT_S: Final = 2.0
RETRY_S: Final = 0.5
"""Before a feed that was lost is asked for again; twice as long after each loss in a row."""
RETRY_S_MAX: Final = 10.0
"""Also before one that was not there is asked for again."""
WRONG_S: Final = 300.0
"""Before one is asked for again that said what cannot be."""
LASTING_S: Final = 60.0
"""A feed that lasted for so long was well: the next loss is the first in a row."""
LINE_BYTES_MAX: Final = 65_536
WHY_BYTES_MAX: Final = 200
CONTRADICTIONS_MAX: Final = 3
"""Pages that contradict a feed before it is wrong."""
AGREEMENTS_MIN: Final = 3
"""Pages that agree with a feed that was contradicted before it is believed again. A new one needs one."""
REQUESTS_SLACK: Final = 4
KV_SLACK: Final = 0.1
"""By so much a page may differ from the steps before and after it: what the engine held between two steps is not
reported."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class _Rank(msgspec.Struct):
    rank: Count
    running: Count
    waiting: Count
    free_blocks: Count
    total_blocks: Count
    block_size: Count
    kv_tokens: Count
    scheduled_tokens_max: Count
    max_num_seqs: Count
    preemptions_total: Count
    prompt_tokens_total: Count
    scheduled_tokens: Count | None = None
    deferred: Count = 0

    def size(self) -> tuple[int, ...]:
        return self.rank, self.total_blocks, self.block_size, self.kv_tokens, self.max_num_seqs


class _Message(msgspec.Struct):
    v: int
    start: Annotated[str, msgspec.Meta(max_length=64)]
    seq: Count
    now_s: Seconds
    age_s: Seconds
    ranks: Annotated[list[_Rank], msgspec.Meta(min_length=1, max_length=256)]


_decoder: Final = msgspec.json.Decoder(_Message)


class _Missing(Exception):
    """The engine has no feed: what it answered."""


class _Lost(Exception):
    """It has ended."""


class _Wrong(Exception):
    """It said what cannot be."""


class _Clock:
    """When, on our clock, was a message made? Rather too early than too late. Times in monotonic seconds."""

    def __init__(self, asked_s: float) -> None:
        """No message was made before `asked_s`."""
        self._asked_s = asked_s
        self._ahead_s: float | None = None
        """By so much ours is ahead of theirs, at least."""
        self._made_s = 0.0

    def ours(self, made_s: float, now: float) -> float:
        """`made_s`: on theirs. `now`: it has come."""
        if self._ahead_s is None:
            self._ahead_s = self._asked_s - made_s
        else:
            self._ahead_s = min(self._ahead_s + CREEP * max(made_s - self._made_s, 0.0), now - made_s)
        self._made_s = made_s
        return min(made_s + self._ahead_s, now)


class _Believed:
    """Do the pages of metrics agree with the steps? `doubts`: how many more pages must agree; 0 if they agree.

    A page is compared with the last step before the page was asked for, the first step after it came, and all steps
    between.
    """

    def __init__(self) -> None:
        self.doubts = 1
        self._contradictions = 0
        self._last: list[float] | None = None
        self._steps: list[list[float]] = []
        """Since the page was asked for, and the one before; empty if there was none."""
        self._page: list[float | None] | None = None
        self._page_came_s = 0.0

    def ask(self) -> None:
        """A page is asked for."""
        if self._page is None:
            self._steps = [] if self._last is None else [self._last]

    def read(self, page: Gauges, now: float) -> None:
        """A page came; it is compared when a step arrives that was made later."""
        if self._page is None and self._steps:
            requests = None if page.running is None or page.waiting is None else page.running + page.waiting
            self._page = [requests, page.kv_usage, page.preemptions_total, page.prompt_tokens_total]
            self._page_came_s = now

    def receive(self, snapshot: Gauges, made_s: float) -> None:
        """Raises _Wrong."""
        requests = (snapshot.running or 0) + (snapshot.waiting or 0)
        last = [requests, snapshot.kv_usage or 0.0, snapshot.preemptions_total or 0, snapshot.prompt_tokens_total or 0]
        self._last = last
        if self._steps:
            self._steps.append(last)
        if self._page is not None and made_s >= self._page_came_s:
            self._compare(self._page)
            self._page = None

    def _compare(self, page: list[float | None]) -> None:
        """Raises _Wrong."""
        requests_max = max(step[0] for step in self._steps)
        slacks = (REQUESTS_SLACK + requests_max / 4, KV_SLACK, 0.0, 0.0)
        names = ("requests", "KV usage", "preemptions", "prompt tokens")
        for name, snapshot, steps, slack in zip(names, page, zip(*self._steps, strict=True), slacks, strict=True):
            low, high = min(steps), max(steps)
            if snapshot is not None and not low - slack <= snapshot <= high + slack:
                self.doubts = AGREEMENTS_MIN
                self._contradictions += 1
                if self._contradictions >= CONTRADICTIONS_MAX:
                    raise _Wrong(f"{name}: {low:g} to {high:g} by its steps, {snapshot:g} by its page of metrics")
                return
        self.doubts = max(self.doubts - 1, 0)
        if not self.doubts:
            self._contradictions = 0


@dataclass(eq=False)
class StepFeed:
    """Receives the steps of one engine, one `turn` after another. While `silent` is set, no steps come, and the
    engine's page is to be read as often as ever.

    `on_turn(is_received, why)` is called when that changes; and if the engine has no feed, once for each reason.
    """

    url: str
    """Of the feed."""
    session: aiohttp.ClientSession
    on_snapshot: Callable[[Gauges], None]
    on_turn: Callable[[bool, str], None]
    api_key: str | None = field(default=None, kw_only=True)
    tls: ssl.SSLContext | None = field(default=None, kw_only=True)
    silent: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    why: str = field(default="it was not asked yet", init=False)
    """Why no steps are received; "": they are."""
    _believed: _Believed = field(default_factory=_Believed, init=False)
    _retry_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.silent.set()

    async def turn(self) -> None:
        """Until it is lost, and the time until it is asked for again."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        pause_s: float | None = None
        try:
            await self._listen()
        except _Missing as error:
            self._turn(f"it has no feed of its steps: {error}", is_news=True)
            pause_s = RETRY_S_MAX
        except _Wrong as error:
            self._turn(f"the feed of its steps cannot be right: {error}", is_news=True)
            pause_s = WRONG_S
        except TimeoutError:
            self._turn(f"the feed of its steps said nothing new for {SILENCE_S:g} s")
        except (_Lost, aiohttp.ClientError, OSError, ValueError) as error:
            self._turn(f"the feed of its steps has ended: {str(error) or type(error).__name__}")
        lasted = clock() - began_s >= LASTING_S
        self._retry_s = RETRY_S if lasted or not self._retry_s else min(2 * self._retry_s, RETRY_S_MAX)
        await asyncio.sleep(pause_s or self._retry_s)

    def asking(self) -> None:
        """Its page is asked for now."""
        self._believed.ask()

    def read(self, page: Gauges) -> bool:
        """Its page came. Is it only for comparison?"""
        self._believed.read(page, asyncio.get_running_loop().time())
        return not self.silent.is_set()

    async def _listen(self) -> None:
        """Raises what ended it."""
        self._believed = _Believed()
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=CONNECT_S)
        async with self.session.get(
            self.url, headers=headers, timeout=timeout, allow_redirects=False, ssl=self.tls or True
        ) as response:
            if response.status != 200 or response.content_type != CONTENT_TYPE:
                body = (await response.content.read(WHY_BYTES_MAX)).decode("utf-8", "replace").split("\n")[0]
                raise _Missing(f"status {response.status}, {body}" if response.status != 200 else "another answer")
            stream = _StepStream(_Clock(asked_s))
            async with asyncio.timeout(SILENCE_S) as silence:
                while data := await response.content.readany():
                    now = loop.time()
                    snapshot = stream.feed(data, now)
                    if snapshot is not None:
                        silence.reschedule(now + SILENCE_S)
                        self._take(snapshot, stream.made_s)
        raise _Lost("the engine closed it")

    def _take(self, snapshot: Gauges, made_s: float) -> None:
        """Raises _Wrong."""
        believed = self._believed
        believed.receive(snapshot, made_s)
        if believed.doubts:
            self._turn("the feed of its steps is held against its metrics")
            return
        if self.why:
            self.why = ""
            self.silent.clear()
            self.on_turn(True, "")
        self.on_snapshot(snapshot)

    def _turn(self, why: str, *, is_news: bool = False) -> None:
        """The engine's steps are not received, or not any more."""
        before, self.why = self.why, why
        if not self.silent.is_set() or (is_news and why != before):
            self.silent.set()
            self.on_turn(False, why)


class _StepStream:
    """What comes over one connection, from one start of one engine."""

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock
        self._rest = b""
        self._last: _Message | None = None
        self.made_s = 0.0
        """When the last message was made that counted."""

    def feed(self, data: bytes, now: float) -> Gauges | None:
        """What the newest message in it says, if that is new. Raises _Wrong, _Lost."""
        data = self._rest + data if self._rest else data
        end = data.rfind(b"\n")
        self._rest = data[end + 1 :]
        if len(self._rest) > LINE_BYTES_MAX:
            raise _Wrong(f"a line is longer than {LINE_BYTES_MAX} bytes")
        if end < 0:
            return None
        try:
            message = _decoder.decode(data[data.rfind(b"\n", 0, end) + 1 : end])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _Wrong(str(error)) from error
        if self._last is not None and message.start == self._last.start and message.seq <= self._last.seq:
            return None
        self._check(message)
        made_s = self._clock.ours(message.now_s, now)
        if now - made_s > LATE_S:
            return None
        self._last = message
        self.made_s = made_s
        return _snapshot(message, made_s)

    def _check(self, message: _Message) -> None:
        """Can it be? Raises _Wrong, or _Lost if another engine says it."""
        ranks, last = message.ranks, self._last
        if message.v != VERSION:
            raise _Wrong(f"it is of version {message.v}, not {VERSION}")
        if any(rank.free_blocks > rank.total_blocks for rank in ranks):
            raise _Wrong("more blocks are free than there are")
        if len({rank.rank for rank in ranks}) < len(ranks):
            raise _Wrong("two engines have the same rank")
        if last is None:
            return
        if message.start != last.start:
            raise _Lost("another engine, or the same after a restart, answers amid it")
        if [rank.size() for rank in ranks] != [rank.size() for rank in last.ranks]:
            raise _Wrong("the engine's size has changed")
        for rank, before in zip(ranks, last.ranks, strict=True):
            if (
                rank.preemptions_total < before.preemptions_total
                or rank.prompt_tokens_total < before.prompt_tokens_total
            ):
                raise _Wrong("a total is less than before")


def _snapshot(message: _Message, made_s: float) -> Gauges:
    """Several ranks have a sum, as a page has; what is free in sum fits nobody for certain."""
    ranks = message.ranks
    is_recent = message.age_s <= STEP_AGE_S
    one = ranks[0] if is_recent and len(ranks) == 1 else None
    free, blocks = sum(rank.free_blocks for rank in ranks), sum(rank.total_blocks for rank in ranks)
    return Gauges(
        taken_s=made_s - message.age_s if is_recent else made_s,
        running=sum(rank.running for rank in ranks),
        waiting=sum(rank.waiting for rank in ranks),
        kv_usage=1.0 - free / blocks if blocks else None,
        kv_capacity_tokens=sum(rank.kv_tokens for rank in ranks) or None,
        block_size=ranks[0].block_size or None,
        preemptions_total=sum(rank.preemptions_total for rank in ranks),
        prompt_tokens_total=sum(rank.prompt_tokens_total for rank in ranks),
        is_step=one is not None,
        free_blocks=free if one is not None and blocks else None,
        total_blocks=blocks if one is not None and blocks else None,
        scheduled_tokens=one.scheduled_tokens if one is not None else None,
        scheduled_tokens_max=(one.scheduled_tokens_max or None) if one is not None else None,
        max_num_seqs=(one.max_num_seqs or None) if one is not None else None,
        deferred=sum(rank.deferred for rank in ranks),
    )
