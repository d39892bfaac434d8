"""A feed of the engine's state after each step. The engine never waits for a listener.

Both vLLM's process and the simulated engine run this module, so it needs only the standard library. All calls come from
one event loop.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

PATH: Final = "/v1/fairgate/steps"
"""Below /v1, which vLLM guards by its API key if it has one."""
CONTENT_TYPE: Final = "application/x-ndjson"
VERSION: Final = 1
"""Version of the messages. A gateway that does not know the version reads metrics."""
INTERVAL_S: Final = 0.01
"""Minimum between two messages. Steps that end sooner share a message with the newest state."""
HEARTBEAT_S: Final = 0.25
"""Interval of messages without a step."""
LISTENERS_MAX: Final = 64


@dataclass
class RankState:
    """An engine of this process (one rank of data parallelism): state after its last step, and size. The fields have
    the names of the message."""

    rank: int
    block_size: int
    scheduled_tokens_max: int
    """Limit of tokens that one step computes."""
    max_num_seqs: int
    total_blocks: int = 0
    """Blocks that requests can hold, of `kv_tokens` in all."""
    kv_tokens: int = 0
    free_blocks: int = 0
    running: int = 0
    waiting: int = 0
    deferred: int = 0
    """Requests that wait in the engine for something other than room, such as an adapter or a grammar."""
    scheduled_tokens: int | None = None
    """Tokens computed by the step; None where the engine does not report them."""
    preemptions_total: int = 0
    prompt_tokens_total: int = 0

    def set_usage(self, kv_usage: float) -> None:
        """Derive the free blocks from the used share of the KV cache."""
        self.free_blocks = round((1.0 - kv_usage) * self.total_blocks)


class StepListener:
    """A receiver of the newest message. Older messages that were not fetched are dropped."""

    def __init__(self) -> None:
        self._line: bytes | None = None
        self._wakes = asyncio.Event()

    def put(self, line: bytes) -> None:
        """Replace the message. An empty one ends the stream of messages for good."""
        if self._line != b"":
            self._line = line
            self._wakes.set()

    async def get(self) -> bytes:
        """Wait for the next message, a line of JSON. Return b"" after the end."""
        await self._wakes.wait()
        line = self._line or b""
        if line:
            self._line = None
            self._wakes.clear()
        return line


class StepPublisher:
    """The feed: call `stepped` after each step; `listen` returns a listener, to be given to `leave`.

    Attributes:
        missing: the reason why no steps can be reported, or "".
        unfinished: returns the number of requests in the process, including those that the engine has not seen. Without
            it, an idle engine looks like an engine in a long step.
    """

    def __init__(self) -> None:
        self.ranks: dict[int, RankState] = {}
        self.missing = ""
        self.unfinished: Callable[[], int] | None = None
        self._start = secrets.token_hex(8)
        self._serial = 0
        self._stepped_s = time.monotonic()
        self._sent_s = 0.0
        self._listeners: set[StepListener] = set()
        self._next: asyncio.TimerHandle | None = None
        self._heartbeat: asyncio.TimerHandle | None = None

    def stepped(self) -> None:
        """Publish the state of the ranks after a step, at most once per `INTERVAL_S`."""
        self._stepped_s = now = time.monotonic()
        if self._listeners and self._next is None:
            wait_s = max(self._sent_s + INTERVAL_S - now, 0.0)
            self._next = asyncio.get_running_loop().call_later(wait_s, self._publish)

    def listen(self) -> StepListener | None:
        """Return a listener that already has the present state, or None beyond LISTENERS_MAX."""
        if len(self._listeners) >= LISTENERS_MAX:
            return None
        listener = StepListener()
        self._listeners.add(listener)
        listener.put(self._line(time.monotonic()))
        if self._heartbeat is None:
            self._heartbeat = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)
        return listener

    def leave(self, listener: StepListener) -> None:
        self._listeners.discard(listener)

    def end(self, why: str) -> None:
        """End the feed for good."""
        self.missing = why
        for listener in self._listeners:
            listener.put(b"")

    def _publish(self) -> None:
        self._next = None
        self._sent_s = now = time.monotonic()
        if not self.missing:
            line = self._line(now)
            for listener in self._listeners:
                listener.put(line)

    def _beat(self) -> None:
        self._heartbeat = None
        if not self._listeners:
            return
        self._heartbeat = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)
        if time.monotonic() - self._sent_s > HEARTBEAT_S / 2 and self._next is None:
            self._publish()

    def _line(self, now: float) -> bytes:
        self._serial += 1
        age_s = 0.0 if self._is_idle() else now - self._stepped_s
        head = {"v": VERSION, "start": self._start, "seq": self._serial, "now_s": now, "age_s": age_s}
        return json.dumps({**head, "ranks": [vars(rank) for rank in self.ranks.values()]}).encode() + b"\n"

    def _is_idle(self) -> bool:
        """Return whether there is nothing that a step could change."""
        if self.unfinished is None or any(rank.running or rank.waiting for rank in self.ranks.values()):
            return False
        return self.unfinished() == 0
