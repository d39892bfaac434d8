"""What does an engine hold after its last step? Sent to every listener; the engine never waits for one.

vLLM's process runs this, and the simulated engine: nothing but the standard library. All of it on one event loop.
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
"""Of the messages. A gateway that knows another one reads metrics."""
INTERVAL_S: Final = 0.01
"""Between two messages. Steps that end sooner go into one message: the newest counts."""
HEARTBEAT_S: Final = 0.25
"""So often a message comes if there is no step."""
LISTENERS_MAX: Final = 64


@dataclass
class Rank:
    """One engine of this process (one rank of data parallelism): its state after its last step, and its size. The names
    are those of the message."""

    rank: int
    block_size: int
    scheduled_tokens_max: int
    """The most tokens that one step computes."""
    max_num_seqs: int
    total_blocks: int = 0
    """That requests can hold, as many tokens as the next says."""
    kv_tokens: int = 0
    free_blocks: int = 0
    running: int = 0
    waiting: int = 0
    deferred: int = 0
    """Requests that wait in the engine for something else than room, such as an adapter or a grammar."""
    scheduled_tokens: int | None = None
    """Computed by the step, if the engine says."""
    preemptions_total: int = 0
    prompt_tokens_total: int = 0

    def set_usage(self, kv_usage: float) -> None:
        """So much of the KV cache is held, of 1."""
        self.free_blocks = round((1.0 - kv_usage) * self.total_blocks)


class Listener:
    """Receives the newest message. Messages that came while the listener did not ask are gone."""

    def __init__(self) -> None:
        self._line: bytes | None = None
        self._ended = False
        self._awaited: asyncio.Future[None] | None = None

    def put(self, line: bytes) -> None:
        self._line = line
        self._wake()

    def end(self) -> None:
        """It hears nothing more."""
        self._ended = True
        self._wake()

    async def get(self) -> bytes:
        """The next message, a line of JSON; b"" when there will be none."""
        while self._line is None and not self._ended:
            self._awaited = asyncio.get_running_loop().create_future()
            await self._awaited
        line, self._line = self._line, None
        return b"" if line is None or self._ended else line

    def _wake(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)


class Steps:
    """`stepped` after each step; `listen` gives a listener until `leave`.

    Attributes:
        missing: why no steps can be reported; "": they can. unfinished: how many requests the process has, including
        requests that the engine has not seen. None: not known.
            Without it, an idle engine looks like an engine that is in a long step.
    """

    def __init__(self) -> None:
        self.ranks: dict[int, Rank] = {}
        self.missing = ""
        self.unfinished: Callable[[], int] | None = None
        self._start = secrets.token_hex(8)
        self._serial = 0
        self._stepped_s = time.monotonic()
        self._sent_s = 0.0
        self._listeners: set[Listener] = set()
        self._next: asyncio.TimerHandle | None = None
        self._heartbeat: asyncio.TimerHandle | None = None

    def stepped(self) -> None:
        """The ranks say what holds now."""
        self._stepped_s = now = time.monotonic()
        if self._listeners and self._next is None:
            wait_s = max(self._sent_s + INTERVAL_S - now, 0.0)
            self._next = asyncio.get_running_loop().call_later(wait_s, self._publish)

    def listen(self) -> Listener | None:
        """It hears the present state at once. None: there are too many."""
        if len(self._listeners) >= LISTENERS_MAX:
            return None
        listener = Listener()
        self._listeners.add(listener)
        listener.put(self._line(time.monotonic()))
        if self._heartbeat is None:
            self._heartbeat = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)
        return listener

    def leave(self, listener: Listener) -> None:
        self._listeners.discard(listener)

    def give_up(self, why: str) -> None:
        """No step can be reported from now on."""
        self.missing = why
        for listener in self._listeners:
            listener.end()

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
        """Is there nothing that a step could change?"""
        if self.unfinished is None or any(rank.running or rank.waiting for rank in self.ranks.values()):
            return False
        return self.unfinished() == 0
