"""A client of the feed in which an engine reports its state after each step.

A message carries the engine's own clock. `_Clock` maps that clock to ours: no message was made before the feed was
requested, and none after it arrived. So a message delayed on its way is known to be old. Metrics are the fallback
whenever the feed fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Final, NoReturn

import aiohttp
import msgspec

from backends.control_client import ControlClient
from backends.vllm_plugin.steps import CONTENT_TYPE, VERSION, RankState
from policies.capacity.gauges import Gauges

SILENCE_S: Final = 0.75
"""Time without a newer message after which the feed is lost. Heartbeats come three times as often."""
LATE_S: Final = 0.5
"""Messages older than this on arrival are ignored."""
STEP_AGE_S: Final = 0.1
"""A report this young is a fact. Later another step is on its way, so the report is no better than a page of
metrics."""
CREEP: Final = 1e-3
"""Seconds per second by which the engine's clock may be slower than ours."""
CONNECT_S: Final = 2.0
RETRY_S: Final = 0.5
"""Delay before a lost feed is requested again; doubled by each loss in a row."""
RETRY_S_MAX: Final = 10.0
"""Maximum of that delay, and the delay where the engine has no feed."""
WRONG_S: Final = 300.0
"""Delay before a feed with an invalid message is requested again."""
LASTING_S: Final = 60.0
"""A loss after this time is the first in a row."""
LINE_BYTES_MAX: Final = 65_536
WHY_BYTES_MAX: Final = 200

COUNT_MAX: Final = 1 << 40
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class _FeedMessage(msgspec.Struct):
    """A message of the feed: the state of each rank, by the engine's own clock."""

    v: int
    start: Annotated[str, msgspec.Meta(max_length=64)]
    seq: int
    now_s: Seconds
    age_s: Seconds
    ranks: Annotated[list[RankState], msgspec.Meta(min_length=1, max_length=256)]


_decoder: Final = msgspec.json.Decoder(_FeedMessage)


class _FeedFault(Exception):
    """The end of a feed. `again_s`: the delay until it is requested again, 0.0 for that of a lost feed."""

    def __init__(self, why: str, again_s: float = 0.0) -> None:
        super().__init__(why)
        self.again_s = again_s


def _invalid(why: str) -> _FeedFault:
    return _FeedFault(f"the feed of its steps cannot be right: {why}", WRONG_S)


class _Clock:
    """A map from the engine's clock to ours, in monotonic seconds. The map errs towards too early."""

    def __init__(self, asked_s: float) -> None:
        """Start with a lower bound: no message was made before `asked_s`."""
        self._asked_s = asked_s
        self._ahead_s: float | None = None
        """Least amount by which our clock is ahead of the engine's."""
        self._made_s = 0.0

    def ours(self, made_s: float, now: float) -> float:
        """Return our time of a message made at `made_s` by the engine's clock and arrived by `now`."""
        if self._ahead_s is None:
            self._ahead_s = self._asked_s - made_s
        else:
            self._ahead_s = min(self._ahead_s + CREEP * max(made_s - self._made_s, 0.0), now - made_s)
        self._made_s = made_s
        return min(made_s + self._ahead_s, now)


@dataclass(eq=False)
class StepFeed:
    """A receiver of one engine's steps, one `run_once` after another. While `silent` is set no steps come, and the
    engine's metrics are read at the usual rate.

    `on_turn(is_received, why)` is called at each change, and once for each reason why an engine has no feed.
    """

    client: ControlClient
    path: str
    """Path of the feed."""
    on_snapshot: Callable[[Gauges], None]
    on_turn: Callable[[bool, str], None]
    silent: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    why: str = field(default="it was not asked yet", init=False)
    """Reason why no steps are received, or ""."""
    _retry_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.silent.set()

    async def run_once(self) -> None:
        """Receive until the feed is lost; then wait until the next try."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            await self._listen()
        except _FeedFault as error:
            fault = error
        except TimeoutError:
            fault = _FeedFault(f"the feed of its steps said nothing new for {SILENCE_S:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            fault = _FeedFault(f"the feed of its steps has ended: {str(error) or type(error).__name__}")
        self._turn(str(fault), is_news=fault.again_s > 0)
        lasted = clock() - began_s >= LASTING_S
        self._retry_s = RETRY_S if lasted or not self._retry_s else min(2 * self._retry_s, RETRY_S_MAX)
        await asyncio.sleep(fault.again_s or self._retry_s)

    async def _listen(self) -> NoReturn:
        """Receive until the feed fails, and raise the cause."""
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=CONNECT_S)
        async with self.client.request(self.path, timeout) as response:
            if response.status != 200 or response.content_type != CONTENT_TYPE:
                body = (await response.content.read(WHY_BYTES_MAX)).decode("utf-8", "replace").split("\n")[0]
                why = f"status {response.status}, {body}" if response.status != 200 else "another answer"
                raise _FeedFault(f"it has no feed of its steps: {why}", RETRY_S_MAX)
            stream = _StepStream(_Clock(asked_s))
            async with asyncio.timeout(SILENCE_S) as silence:
                while data := await response.content.readany():
                    now = loop.time()
                    snapshot = stream.feed(data, now)
                    if snapshot is not None:
                        silence.reschedule(now + SILENCE_S)
                        self._take(snapshot)
        raise _FeedFault("the feed of its steps has ended: the engine closed it")

    def _take(self, snapshot: Gauges) -> None:
        """Report a snapshot. The first one after a fault ends the fault."""
        if self.why:
            self.why = ""
            self.silent.clear()
            self.on_turn(True, "")
        self.on_snapshot(snapshot)

    def _turn(self, why: str, *, is_news: bool) -> None:
        """Report that no steps are received."""
        before, self.why = self.why, why
        if not self.silent.is_set() or (is_news and why != before):
            self.silent.set()
            self.on_turn(False, why)


class _StepStream:
    """The messages on one connection, from one start of one engine."""

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock
        self._rest = b""
        self._last: _FeedMessage | None = None

    def feed(self, data: bytes, now: float) -> Gauges | None:
        """Return the newest message as gauges, or None without a newer one. Raise _FeedFault."""
        data = self._rest + data if self._rest else data
        end = data.rfind(b"\n")
        self._rest = data[end + 1 :]
        if len(self._rest) > LINE_BYTES_MAX:
            raise _invalid(f"a line is longer than {LINE_BYTES_MAX} bytes")
        if end < 0:
            return None
        try:
            message = _decoder.decode(data[data.rfind(b"\n", 0, end) + 1 : end])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _invalid(str(error)) from error
        if not all(0 <= count <= COUNT_MAX for rank in message.ranks for count in vars(rank).values() if count):
            raise _invalid("a count is out of its bounds")
        if self._last is not None and message.start == self._last.start and message.seq <= self._last.seq:
            return None
        if message.v != VERSION:
            raise _invalid(f"version {message.v}, not {VERSION}")
        if self._last is not None and message.start != self._last.start:
            why = "another engine, or a restarted one, answers on the connection"
            raise _FeedFault(f"the feed of its steps has ended: {why}")
        made_s = self._clock.ours(message.now_s, now)
        if now - made_s > LATE_S:
            return None
        self._last = message
        return _snapshot(message, made_s)


def _snapshot(message: _FeedMessage, made_s: float) -> Gauges:
    """Sum the ranks, as metrics do. Only a single rank's report is that of a step."""
    ranks = message.ranks
    is_recent = message.age_s <= STEP_AGE_S
    one = ranks[0] if is_recent and len(ranks) == 1 else None
    free, blocks = sum(rank.free_blocks for rank in ranks), sum(rank.total_blocks for rank in ranks)
    return Gauges(
        taken_s=made_s - message.age_s if is_recent else made_s,
        running=sum(rank.running for rank in ranks),
        waiting=sum(rank.waiting for rank in ranks),
        kv_usage=max(1.0 - free / blocks, 0.0) if blocks else None,
        kv_capacity_tokens=sum(rank.kv_tokens for rank in ranks) or None,
        block_size=ranks[0].block_size or None,
        preemptions_total=sum(rank.preemptions_total for rank in ranks),
        prompt_tokens_total=sum(rank.prompt_tokens_total for rank in ranks),
        is_step=one is not None,
        scheduled_tokens=one.scheduled_tokens if one is not None else None,
        scheduled_tokens_max=(one.scheduled_tokens_max or None) if one is not None else None,
        max_num_seqs=(one.max_num_seqs or None) if one is not None else None,
        deferred=sum(rank.deferred for rank in ranks),
    )
