"""What workers share by their hub, how their pages become one, and that whoever hangs is waited for once."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec
import pytest
from prometheus_client.metrics_core import GaugeMetricFamily

from gateway.config.model import Config
from gateway.operator.of_workers import WorkersClient, merged
from gateway.operator.snapshots.of_replicas import Replicas
from gateway.process.hub import continue_quotas
from gateway.process.supervisor import open_unix_listener
from gateway.storage.hub.exchange_server import CONNECTIONS_PER_WORKER, ExchangeServer
from gateway.storage.hub.hub_store import HubStore
from gateway.storage.hub.run_directory import RunDirectory, WorkerSlot
from gateway.storage.hub.wire import FRAME_BYTES_MAX
from gateway.storage.redis.redis_connection import PUBLISHED_BYTES_MAX
from gateway.storage.store import ALL_POOLS, Store
from gateway.telemetry.background import Tasks
from gateway.telemetry.ends import EndedRequest
from gateway.telemetry.metric_families import FAMILIES
from gateway.telemetry.recent_requests import ENDS_MAX, RecentRequests
from gateway.usage.counts import UsageTotals
from gateway.usage.database import Database
from gateway.usage.written import UsageBatch, add_batch
from policies.capacity.obstacle import Obstacle
from policies.replicas.messages import ReplicaReport
from policies.replicas.schedule import DEADLINE_S
from tests.gateway.capture import Upstream, replies
from tests.gateway.live import Starter, chat, simulated
from tests.gateway.load import tenants
from tests.kit.run_directory import WORKERS, hang_up, run_directory
from tests.kit.standing_still import stood_still
from tests.kit.turns import ask, cached_in_turns, index_of, text
from tests.waiting import WAIT_S, eventually, until

REPORT = ReplicaReport([], [], [], [], [], [], [], 0.0)
encode = msgspec.msgpack.encode


def frame(said: list[Any]) -> bytes:
    content = encode(said)
    return len(content).to_bytes(4, "big") + content


async def test_a_prompt_is_found_where_another_worker_sent_it(start: Starter) -> None:
    async with simulated() as a, simulated() as b, simulated() as c, start(a.url, b.url, c.url) as one:
        expected = await cached_in_turns(one)
    async with AsyncExitStack() as stack:
        found, _ = await stack.enter_async_context(run_directory())
        engines = [(await stack.enter_async_context(simulated())).url for _ in range(3)]
        lives = [
            await stack.enter_async_context(start(*engines, worker_slot=WorkerSlot(at, found))) for at in range(WORKERS)
        ]
        await ask(lives[0], text(99, 100))
        await until(lambda: len(index_of(lives[1])) == len(index_of(lives[0])) > 0)
        assert await cached_in_turns(*lives) == pytest.approx(expected, rel=0.01)


NONSENSE = {
    "no MessagePack": b"\x00\x00\x00\x03abc",
    "too long": (FRAME_BYTES_MAX + 1).to_bytes(4, "big"),
    "no such thing": frame([1, "delete"]),
    "nested": b"\x00\x01\x00\x00" + b"\x91" * 65_536,
    "not a number": frame([1, "exchange", "me", "default", 1, encode(REPORT._replace(quantum=math.nan))]),
}
"""The harness `frames` of `tests/fuzz` has all else that a worker might say."""


async def test_what_makes_no_sense_ends_that_connection_only(start: Starter) -> None:
    async with (
        run_directory() as (found, server),
        simulated(time_scale=0) as sim,
        start(sim.url, worker_slot=WorkerSlot(0, found)) as live,
    ):
        for name, said in NONSENSE.items():
            reader, writer = await asyncio.open_unix_connection(found.exchange)
            writer.write(said)
            assert await reader.read() == b"", name
            writer.close()
            await until(lambda: len(server.connections) == 1)
            before = live.gateway.sync_rounds[0].answered
            await until(lambda before=before: live.gateway.sync_rounds[0].answered > before)  # type: ignore[misc]
            assert live.gateway.store_state() == "shared", name


async def test_connections_are_bounded() -> None:
    async with run_directory() as (found, server):
        opened = [await asyncio.open_unix_connection(found.exchange) for _ in range(CONNECTIONS_PER_WORKER * WORKERS)]
        await until(lambda: len(server.connections) == CONNECTIONS_PER_WORKER * WORKERS)
        reader, writer = await asyncio.open_unix_connection(found.exchange)
        assert await reader.read() == b""
        for _, each in [*opened, (reader, writer)]:
            each.close()
        await until(lambda: not server.connections)


@pytest.mark.parametrize("is_grouped", [False, True])
async def test_a_longer_limit_goes_on_from_what_was_used_before(
    start: Starter, tmp_path: Path, is_grouped: bool
) -> None:
    url = str(tmp_path / "usage.db")
    tally = UsageTotals()
    tally.requests, tally.input_tokens, tally.output_tokens = 1, 480, 500
    named = [each | {"quota": {"tokens_per_day": 1000}} for each in tenants(spent=1, fresh=1)]
    groups: list[dict[str, Any]] = []
    if is_grouped:
        named = [named[0] | {"group": "g", "quota": None}, named[1]]
        groups = [{"name": "g", "quota": {"tokens_per_month": 1000}}]
    config = Config.model_validate({
        "usage": url, "pools": [{"name": "p", "backends": [{"url": "http://a:1"}]}], "tenants": named, "groups": groups,
    })  # fmt: skip
    assert config.usage is not None
    database = Database(config.usage, makes=True)
    now_s = int(time.time())
    add_batch(database, UsageBatch("before", 1, {(now_s // 3600, "spent", "", "", "", ""): tally}), now_s)
    database.close()
    async with run_directory() as (found, server), simulated(time_scale=0) as sim:
        await continue_quotas(config, server, is_first=True)
        async with (
            start(sim.url, worker_slot=WorkerSlot(0, found), tenants=named, groups=groups, usage=url) as first,
            start(sim.url, worker_slot=WorkerSlot(1, found), tenants=named, groups=groups, usage=url) as second,
        ):
            body = chat("word " * 60, max_tokens=2)
            for live in (first, second):
                assert (await live.ask("/v1/chat/completions", body, key="key-of-spent")).status == 429
                assert (await live.ask("/v1/chat/completions", body, key="key-of-fresh")).status == 200


async def test_an_answer_that_came_while_a_worker_stood_still_is_no_failure() -> None:
    found = RunDirectory.made(WORKERS)
    with closing(open_unix_listener(found.exchange)) as listener, ThreadPoolExecutor() as threads:

        def answers() -> None:
            """As the hub, which is another process."""
            with listener.accept()[0] as worker:
                worker.recv(FRAME_BYTES_MAX)
                worker.sendall(frame([1, b"what was learned"]))

        threads.submit(answers)
        store = HubStore(found, ())
        await store.open()
        assert await stood_still(store.learned_state("pool"), 1.2 * DEADLINE_S) == b"what was learned"
        await store.close()
    found.end()


@pytest.mark.slow
@pytest.mark.parametrize(("comes", "served"), [(True, 20), (False, 10 + 5)])
async def test_workers_whose_hub_starts_late_count_a_limit_together_and_by_parts_if_it_never_does(
    start: Starter, monkeypatch: pytest.MonkeyPatch, comes: bool, served: int
) -> None:
    if not comes:
        monkeypatch.setattr("gateway.pool.replication.ticker.START_S", 2.0)
    named = [each | {"quota": {"requests_per_day": 20}} for each in tenants(a=1)]
    found = RunDirectory.made(WORKERS)
    server, listener = ExchangeServer(found), open_unix_listener(found.exchange)
    async with AsyncExitStack() as stack:
        stack.callback(found.end)
        stack.callback(hang_up, server)
        stack.callback(listener.close)
        sim = await stack.enter_async_context(simulated(time_scale=0))
        first, second = [
            await stack.enter_async_context(start(sim.url, worker_slot=WorkerSlot(at, found), tenants=named))
            for at in range(WORKERS)
        ]
        body = chat(max_tokens=1)
        asked = [
            asyncio.create_task(live.ask("/v1/chat/completions", body, key="key-of-a"))
            for live in (*[first] * 35, *[second] * 5)
        ]
        rounds = [each for live in (first, second) for each in live.gateway.sync_rounds if each.about == ALL_POOLS]
        await until(lambda: all(each.lost >= 2 for each in rounds))
        if comes:
            stack.callback((await server.listen(listener)).close)
        statuses = [(await each).status for each in asked]
        assert (statuses.count(200), statuses.count(429)) == (served, 40 - served)


# --- metrics ---


def test_pages_are_put_together_by_what_their_numbers_mean() -> None:
    page = (
        "# HELP fairgate_requests_total Ended.\n# TYPE fairgate_requests_total counter\n"
        'fairgate_requests_total{tenant="a b"} %s\n'
        "# HELP fairgate_backend_slots Slots.\n# TYPE fairgate_backend_slots gauge\n"
        'fairgate_backend_slots{backend="x"} %s\n'
        "# HELP fairgate_backend_up Up.\n# TYPE fairgate_backend_up gauge\n"
        'fairgate_backend_up{backend="x"} %s\n'
    )
    more = '# HELP fairgate_requests_total Ended.\nfairgate_requests_total{tenant="c"} 5.0\nwithout a number\n'
    assert merged([page % ("2.0", "8.0", "1.0"), page % ("3.0", "9.0", "0.0"), more]) == (
        page.replace('{tenant="a b"} %s\n', '{tenant="a b"} 5.0\nfairgate_requests_total{tenant="c"} 5.0\n')
        % ("9.0", "0.0")
    )


async def test_each_gauge_has_a_rule_by_which_it_is_put_together(start: Starter, tmp_path: Path) -> None:
    quota = {"requests_per_minute": 100}
    async with run_directory() as (found, _), simulated() as sim:
        pool = {"name": "pool", "models": ["simulated"], "start_s_max": 60, "backends": [{"url": sim.url}]}
        async with start(
            pools=[pool], worker_slot=WorkerSlot(0, found), usage=str(tmp_path / "usage.db"), quota=quota
        ) as live:
            gateway = live.gateway
            await until(lambda: gateway.sync_rounds[0].answered > 0)
            async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(found.worker(0))) as session:
                async with session.get("http://worker/metrics") as answer:
                    page = await answer.text()
            gauges = set(re.findall(r"^# TYPE (\S+) gauge$", page, re.M))
    declared = {name for name, one in FAMILIES.items() if one.made_by is GaugeMetricFamily}
    assert {name for name in gauges if name.startswith("fairgate_")} == declared


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
        workers = WorkersClient(Config.model_validate(CONFIG), paths)
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
        assert len(content) < PUBLISHED_BYTES_MAX
        for each in self._channel:
            if each.is_hung:
                each.unheard.append(content)
            elif each.hears is not None:
                each.heard += 1
                each.hears(content)
        return len(self._channel)

    def resume(self) -> None:
        self.is_hung = False
        assert self.hears is not None
        for content in self.unheard:
            self.hears(content)
        self.unheard.clear()


async def test_a_replica_that_hangs_is_waited_for_once(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    channel: list[Channel] = []
    background = Tasks()

    def within(answer_s: float) -> None:
        monkeypatch.setattr("gateway.operator.snapshots.of_replicas.ANSWER_S", answer_s)

    async with Upstream(replies(b"")) as upstream, start(upstream.url) as one, start(upstream.url) as two:
        stores = [Channel(name, channel) for name in ("one", "two")]
        asking, other = [
            Replicas(live.gateway, cast(Store, store), background, store.replica)
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
            stores[1].resume()
            await until(lambda answers=answers: stores[0].heard >= answers)  # type: ignore[misc]
        channel.remove(stores[1])
        questions, publish = list[bytes](), stores[0].publish

        async def published(pool: str, content: bytes) -> int:
            questions.append(content)
            return await publish(pool, content)

        monkeypatch.setattr(stores[0], "publish", published)
        for _ in range(3):
            await asking.snapshot()
        assert len(msgspec.msgpack.decode(questions[-1])["known"]) == 1, "a replica that is gone is forgotten"
        await background.stop()


async def test_what_a_busy_replica_tells_fits_into_a_message(start: Starter) -> None:
    channel: list[Channel] = []
    background, name = Tasks(), "n" * 128
    waited_s = {f"{obstacle}": 1.5 for obstacle in Obstacle}
    longest = EndedRequest(
        name, name, 1.5, "completed", "", 1.5, 1.5, 1.5, 1.5, name, name, name, name, waited_s, 1.5, 1 << 20, 1 << 20
    )
    async with Upstream(replies(b"")) as upstream, start(upstream.url) as one, start(upstream.url) as two:
        busy = two.gateway.recent = RecentRequests(4 * ENDS_MAX)
        busy.add_reported([longest] * (2 * ENDS_MAX))
        asking, _ = both = [
            Replicas(live.gateway, cast(Store, Channel(name, channel)), background, name)
            for name, live in (("one", one), ("two", two))
        ]
        for each in both:
            background.start(each.listen())
        await until(lambda: all(store.hears for store in channel))
        assert not (await asking.snapshot()).not_ready
        assert len(asking.recent.latest(3 * ENDS_MAX)) == ENDS_MAX
        await background.stop()
