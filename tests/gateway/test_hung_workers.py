"""A worker or a replica that hangs is waited for once: whoever asks next gets what the others say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import cast

import pytest

from gateway.config.model import Config
from gateway.operator.of_workers import Workers
from gateway.operator.snapshots.of_replicas import Replicas
from gateway.storage.store import Store
from gateway.telemetry.background import Background
from tests.gateway.capture import Upstream, replies
from tests.gateway.live import Starter
from tests.waiting import WAIT_S, eventually, until

CONFIG = {"pools": [{"name": "p", "backends": [{"url": "http://127.0.0.1:1"}]}], "open_access": True, "workers": 2}
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Worker:
    """Answers at a unix socket, unless it hangs."""

    def __init__(self) -> None:
        self.asked = 0
        self.goes_on = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                self.asked += 1
                await self.goes_on.wait()
                writer.write(ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


async def test_a_worker_that_hangs_is_waited_for_once(tmp_path: Path) -> None:
    hung, well = Worker(), Worker()
    well.goes_on.set()
    async with AsyncExitStack() as stack:
        paths = [str(tmp_path / name) for name in ("hung", "well")]
        for path, worker in zip(paths, (hung, well), strict=True):
            await stack.enter_async_context(await asyncio.start_unix_server(worker.serve, path))
        workers = Workers(Config.model_validate(CONFIG), paths, port=1, has_reloaded=lambda: None)
        await workers.open(stack)
        assert (await workers.ask(0, "/x", within_s=0.01)).status == 0
        for _ in range(50):  # tenants, one after the other
            answers = await asyncio.gather(workers.ask(0, "/x", within_s=60), workers.ask(1, "/x", within_s=60))
            assert [each.status for each in answers] == [0, 200]
        assert (hung.asked, well.asked) == (1, 50)
        hung.goes_on.set()

        async def answers_again() -> bool:
            return (await workers.ask(0, "/x", within_s=60)).status == 200

        await eventually(answers_again)
        assert hung.asked == 2


class Channel:
    """A store whose replicas hear each other, but those that hang."""

    def __init__(self, replica: str, channel: list[Channel]) -> None:
        self.replica = replica
        self.epoch_s = 0.0
        self.hears: Callable[[bytes], None] | None = None
        self.heard = 0
        self.unheard: list[bytes] = []
        self.is_hung = False
        self._channel = channel
        channel.append(self)

    async def subscribe(self, pool: str, hears: Callable[[bytes], None]) -> None:
        self.hears = hears
        await asyncio.Event().wait()

    async def publish(self, pool: str, content: bytes) -> int:
        for each in self._channel:
            if each.is_hung:
                each.unheard.append(content)
            elif each.hears is not None:
                each.heard += 1
                each.hears(content)
        return len(self._channel)

    def go_on(self) -> None:
        self.is_hung = False
        assert self.hears is not None
        for content in self.unheard:
            self.hears(content)
        self.unheard.clear()


async def test_a_replica_that_hangs_is_waited_for_once(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    channel: list[Channel] = []
    background = Background()

    def within(answer_s: float) -> None:
        monkeypatch.setattr("gateway.operator.snapshots.of_replicas.ANSWER_S", answer_s)

    async with Upstream(replies(b"")) as upstream, start(upstream.url) as one, start(upstream.url) as two:
        stores = [Channel(name, channel) for name in ("one", "two")]
        asking, other = [
            Replicas(live.gateway, cast(Store, store), background, "")
            for live, store in zip((one, two), stores, strict=True)
        ]
        for each in (asking, other):
            background.start(each.listen())
        await until(lambda: all(store.hears for store in stores))
        within(WAIT_S)
        for _ in range(2):
            assert not (await asking.snapshot()).not_ready
            stores[1].is_hung = True
            within(0.01)
            assert (await asking.snapshot()).not_ready, "it is named"
            within(WAIT_S)
            for _ in range(50):  # tenants, one after the other
                assert not (await asking.snapshot()).not_ready
            answers = stores[0].heard + len(stores[1].unheard)
            stores[1].go_on()
            await until(lambda answers=answers: stores[0].heard >= answers)  # type: ignore[misc]
        await background.stop()
