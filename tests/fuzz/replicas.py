"""The readers of what other processes of a gateway say: workers to their hub and back, replicas by their store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

import hiredis
import msgspec
from redis.exceptions import ResponseError

from gateway.config.model import Config
from gateway.keys.in_redis import RedisKeys
from gateway.operator.snapshots.of_replicas import decode_answer
from gateway.operator.snapshots.snapshot import GatewaySnapshot, together
from gateway.operator.snapshots.state_document import state
from gateway.pool.dispatcher import Dispatcher
from gateway.pool.learned import FILE_BYTES_MAX, LearnedFile, LearnedSync
from gateway.pool.replication.prefix_broadcast import PrefixBroadcast
from gateway.pool.replication.ticker import SyncRounds
from gateway.storage.hub.exchange_server import ExchangeServer, _Worker
from gateway.storage.hub.hub_store import _Hub
from gateway.storage.hub.run_directory import RunDirectory
from gateway.storage.redis.redis_store import RedisStore
from gateway.storage.store import PoolIdentity, Store
from gateway.storage.store_errors import StoreError, StoreUnavailable
from gateway.telemetry.background import Tasks
from gateway.telemetry.recent_requests import RecentRequests
from policies.admission.decisions import Dispatch
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.admission.takeover import snapshot
from policies.interactions import Interactions
from policies.limits.quotas import Quota, Quotas
from policies.limits.throttle import Ceilings, ThrottleSettings
from policies.queue.bounds import QueueLimits
from policies.replicas.messages import ReplicaView, is_answer, is_countable
from policies.replicas.pool_replica import PoolReplica
from policies.replicas.schedule import ReportSource
from policies.replicas.tenant_replica import TenantReplica
from policies.request import Claim, Flow, Request, ServiceTokens
from tests.fuzz.harness import Harness
from tests.fuzz.transport import Transport, in_loop, pieces
from tests.kit.typed_script_store import TypedScriptStore

MEETING = RunDirectory("/nowhere", workers=2, epoch_s=0.0)
LIMITS = QueueLimits(queue_requests_max=8, queue_bytes_max=4000, queue_wait_s_max=2.0)
ANSWERS_MAX = 64
_VAST = re.compile(rb"[*%~>|][0-9]{4}")
TURNS = 8
"""Of the loop, until an answer that is there at once was read."""


class Gateway:
    """One whose engine runs a request and has another in its queue, so that there is something to tell."""

    def __init__(self, policy: str = "fairserve") -> None:
        limits: dict[str, Any] = (
            {"throttle": ThrottleSettings(user=Ceilings(starts=5))} if policy == "fairserve" else {}
        )
        self.quotas, self.interactions = Quotas(Quota(requests_per_minute=5)), Interactions()
        self.engine = AdmissionEngine(
            named_policy(policy, **limits), limits=LIMITS, quotas=self.quotas, interactions=self.interactions
        )
        self.engine.add_backend("b", max_num_seqs=1)

    def of_pool(self) -> PoolReplica:
        self.serve("first")
        replica = PoolReplica(self.engine)
        self.engine.arrived(_request("second"), 0.0)
        return replica

    def of_tenants(self) -> TenantReplica:
        replica = TenantReplica(self.quotas, self.interactions, [self.engine])
        self.engine.arrived(_request("second"), 0.0)
        return replica

    def serve(self, name: str) -> None:
        """A request comes, is answered, and something is learned of it."""
        [decision] = self.engine.arrived(_request(name), 0.0)
        assert isinstance(decision, Dispatch)
        self.engine.progressed(name, 10, 0.0)
        self.engine.finished(name, ServiceTokens(100, 10), 0.0)


def _request(name: str) -> Request:
    flow, claim = Flow("t", "app", "u"), Claim("interaction", explicit=True)
    return Request(name, flow, 1.0, 100, 20, 0.0, claim=claim, body_bytes=100)


# --- workers and their hub ---


def read_frames(data: bytes) -> None:
    """Whatever a worker says, the hub answers the others as ever; whatever a hub says, its worker goes on."""
    server = ExchangeServer(MEETING)
    good = _Ours(server)
    good.exchange()
    in_loop(_from_both_ends(server, data))
    good.exchange()


async def _from_both_ends(server: ExchangeServer, data: bytes) -> None:
    """Hear this from a worker, and from a hub."""
    for is_hub in (False, True):
        reader = asyncio.StreamReader()
        writer = asyncio.StreamWriter(Transport(), asyncio.Protocol(), reader, asyncio.get_running_loop())
        end = (
            _Hub(reader, writer, lambda: None).reading if is_hub else asyncio.create_task(server.serve(reader, writer))
        )
        for piece in pieces(data):
            reader.feed_data(piece)
            await asyncio.sleep(0)
        reader.feed_eof()
        await end


class _Ours:
    """A worker that says what makes sense, and must be answered."""

    def __init__(self, server: ExchangeServer) -> None:
        self.server = server
        self.worker = _Worker(cast(asyncio.StreamWriter, None))
        self.replica = Gateway().of_pool()
        self.number = 0

    def exchange(self) -> None:
        self.number += 1
        report = self.replica.report(float(self.number))
        asked = ["ours", "p", self.number, msgspec.msgpack.encode(report)]
        content = self.server.answer(self.worker, "exchange", asked)
        view = msgspec.msgpack.decode(content, type=ReplicaView)
        assert is_answer(view, report)
        self.replica.receive(view, float(self.number), float(self.number))


# --- replicas and their store ---


class _Answers:
    """A `Store` that answers everything with the same bytes, once."""

    replica, epoch_s, pools, fault = "one", 0.0, (), None

    def __init__(self, data: bytes) -> None:
        self._data = [data]

    async def exchange(self, about: str, number: int, report: bytes) -> bytes:
        return self._once()

    async def learned_state(self, pool: str) -> bytes | None:
        return self._once()

    async def learn(self, pool: str, content: bytes) -> None:
        assert len(content) < 10_000

    async def subscribe(self, pool: str, view: Callable[[bytes], None]) -> None:
        view(self._once())
        raise StoreUnavailable("no more")

    def _once(self) -> bytes:
        if not self._data:
            raise StoreUnavailable("no more")
        return self._data.pop()


def store(data: bytes) -> Store:
    return cast("Store", _Answers(data))


class _Unexpected(logging.Handler):
    """What is logged with a traceback is a fault that nobody has thought of."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found = record.exc_info[1]

    found: BaseException | None = None


@contextlib.contextmanager
def _hushed() -> Iterator[logging.Logger]:
    """What is said of foreign bytes a thousand times is said to nobody."""
    logger = logging.getLogger("fairgate")
    level, propagates = logger.level, logger.propagate
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    try:
        yield logger
    finally:
        logger.setLevel(level)
        logger.propagate = propagates


async def _runs(*turns: Callable[[], Awaitable[None]]) -> None:
    """For some turns of the loop; what it does must not end it, and must not be a surprise."""
    unexpected = _Unexpected()
    background = Tasks()
    with _hushed() as logger:
        logger.addHandler(unexpected)
        for turn in turns:
            background.repeat(turn, "fuzzed")
        try:
            for _ in range(TURNS):
                await asyncio.sleep(0)
            assert unexpected.found is None, unexpected.found
        finally:
            await background.stop()
            logger.removeHandler(unexpected)


def read_heard(data: bytes) -> None:
    """Whatever the store answers, the gateway goes on, and tells nothing afterwards that nobody could count."""
    in_loop(_hear(data))


async def _hear(data: bytes) -> None:
    for policy in ("fairserve", "fcfs"):
        gateway = Gateway(policy)
        replicas: list[ReportSource] = [gateway.of_pool(), Gateway(policy).of_tenants()]
        for replica in replicas:
            rounds = SyncRounds(store(data), "p", replica, lambda decisions: None)
            await _runs(rounds.run_once)
            assert rounds.answered + rounds.lost >= 1
            assert is_countable(replica.report(1e6))


def read_news(data: bytes) -> None:
    """Whatever is told of prompts elsewhere, it is taken in or ignored."""
    in_loop(_hear_news(data))


async def _hear_news(data: bytes) -> None:
    for policy in ("vtc", "dlpm"):
        channel = PrefixBroadcast(store(data), "p", Dispatcher(Gateway(policy).engine))
        await _runs(channel.report, channel.listen)


CONFIG = Config.model_validate({"open_access": True, "pools": [{"name": "p", "backends": [{"url": "http://e"}]}]})


def read_seen(data: bytes) -> None:
    """Whatever another process says of how it stands, it can be shown beside this one, or is ignored."""
    own = GatewaySnapshot(0.0, [], None, 1, [])
    try:
        answer = decode_answer(data)
    except ValueError:
        return
    answer.move(1.0)
    whole = together([("own", own), (answer.name, answer.snapshot)])
    msgspec.json.encode(state(whole, RecentRequests(), CONFIG)())


# --- Redis ---


class _Redis(RedisStore):
    """One that hears these answers, in this order, whatever it asks."""

    def __init__(self, answers: list[object]) -> None:
        super().__init__("redis://nowhere", (PoolIdentity("p", "vtc", ("http://a:1",)),))
        self._answers = answers

    async def _shielded(self, ask: Coroutine[Any, Any, Any]) -> Any:
        ask.close()
        answer = self._answers.pop(0) if self._answers else None
        if answer is None or isinstance(answer, Exception):
            raise StoreUnavailable("no more") from ResponseError()
        return answer


def read_redis(data: bytes) -> None:
    """Whatever a server answers, it is what was asked for, or the server cannot be used."""
    if _VAST.search(data):
        return  # hiredis makes room for as many as are announced
    reader, answers = hiredis.Reader(), list[object]()
    try:
        reader.feed(data)
        while len(answers) < ANSWERS_MAX and (answer := reader.gets()) is not False:
            answers.append(answer)
    except (hiredis.ProtocolError, TypeError):  # a TypeError for a map whose key is a list
        pass  # the connection ends
    in_loop(_ask(answers))


async def _ask(answers: list[object]) -> None:
    store = _Redis(answers)
    try:
        await store.open()
        assert math.isfinite(store.epoch_s)
        assert type(await store.exchange("p", 1, b"")) is bytes
        assert type(await store.learned_state("p")) is bytes
        keys = RedisKeys(store)
        assert type(await keys.change_mark()) is bytes
        async for name, noted in keys.entries():
            assert type(name) is type(noted) is bytes
    except StoreError:
        return


# --- what was learned ---


def read_learned(data: bytes) -> None:
    """From a file, or from the store: what can be learned is, and what is learned can be written down and read."""
    in_loop(_adopt(data))
    gateway, again = Gateway(), Gateway()
    with tempfile.TemporaryDirectory() as directory, _hushed():
        path = Path(directory, "learned")
        path.write_bytes(data)
        restored = LearnedFile(path, {"p": gateway.engine})
        restored.restore()
        gateway.serve("first")
        in_loop(restored.save())
        LearnedFile(path, {"p": again.engine}).restore()
    assert snapshot(again.engine) == snapshot(gateway.engine)


async def _adopt(data: bytes) -> None:
    gateway = Gateway()
    await _runs(LearnedSync(store(data), "p", gateway.engine).sync_once)
    gateway.serve("first")
    msgspec.json.encode(snapshot(gateway.engine))


def said_here() -> dict[str, list[bytes]]:
    """Seeds, as our own code says it."""
    exchange, gateways = TypedScriptStore(), [Gateway(), Gateway()]
    replicas: list[Any] = [gateways[0].of_pool(), gateways[1].of_pool()]
    encode = msgspec.msgpack.encode
    report = [encode(replica.report(0.0)) for replica in replicas]
    view = [encode(exchange.exchange(str(at), 1, replicas[at].report(0.0), 0)) for at in (0, 1)]
    tenants = Gateway().of_tenants().report(0.0)
    view.append(encode(exchange.exchange("tenants", 1, tenants, 0)))
    said: list[list[Any]] = [
        [1, "exchange", "a", "p", 1, report[0]], [2, "exchange", "ours", "p", 2, report[1]], [3, "leave", "a", "p"],
        [4, "learned", "p"], [5, "learn", "p", b"{}"], [0, "news", "p", b"news"], [6, view[0]], [0, "p", b"x"],
    ]  # fmt: skip
    frames = [len(content := encode(each)).to_bytes(4, "big") + content for each in said]
    learned = snapshot(gateways[0].engine)
    file = msgspec.json.encode({"version": 1, "pools": {"p": learned}})
    news = encode((1, "two", {"b": [(1, 2, 3), (1, 2)]}, {"b": {"t": 5.0}}))
    return {
        "frames": [*frames, b"".join(frames)],
        "heard": view,
        "news": [news],
        "redis": [ANSWERS],
        "learned": [file, msgspec.json.encode(learned)],
    }


ANSWERS = (
    b"$29\r\n# Server\r\nredis_version:7.2.4\r\n"
    + b"*2\r\n$10\r\n1700000000\r\n$6\r\n123456\r\n*2\r\n$6\r\njoined\r\n:1\r\n"
    + b"$3\r\nabc\r\n$2\r\n{}\r\n$1\r\n1\r\n*2\r\n$1\r\n0\r\n*2\r\n$1\r\na\r\n$1\r\nb\r\n"
)
"""Of a server in its right mind: its version, the time, joined, heard, learned, a mark, and the table of keys."""
_REDIS = (
    b"$-1\r\n", b"*-1\r\n", b":5\r\n", b"*0\r\n", b"-ERR x\r\n", b"+OK\r\n", b"$0\r\n\r\n", b"*2\r\n",
    b"$6\r\nlayout\r\n",
)  # fmt: skip
_REDIS += (b"*1\r\n" * 20, b"$9999999999\r\n", b":" + b"9" * 30 + b"\r\n", b"$6\r\npolicy\r\n", b"_\r\n", b",nan\r\n")
_MSGPACK = (b"\xc0", b"\xc2", b"\xc3", b"\xcb\x7f\xf0" + b"\0" * 6, b"\xcb\x7f\xf8" + b"\0" * 6, b"\x90", b"\x80")
_MSGPACK += (b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\0" * 7, b"\xcb\x7f\xef" + b"\xff" * 6, b"\xa1t", b"\xa4t\x1fap")
_MSGPACK += (b"\xdd\xff\xff\xff\xff", b"\x91" * 40, b"\x81\x90\x90", b"\xd6\xff\0\0\0\0", b"\xc4\x01x")
_FRAMES = (b"\0\0\0\1", b"\0\0\0\x20", b"\xff\xff\xff\xff", b"\xa8exchange", b"\xa5leave", b"\xa5learn", b"\xa4news")
_LEARNED = (b"[", b"]", b",", b"{", b"}", b":", b'"', b"9" * 400, b"1e308", b"-1", b"true", b"null", b'"app"', b"1e16")
_LEARNED += (b'"version"', b'"pools"', b'"p"', b'"interactions"', b'"policy"', b'"worths"', b'"pool"', b'"units"')

# An exchange, a gateway and what was learned each take as much, however short what is read.
HARNESSES = (
    Harness("frames", read_frames, (), _MSGPACK + _FRAMES, 5.0, memory_ratio_max=40.0, start_bytes=1 << 20),
    Harness("heard", read_heard, (), _MSGPACK, 5.0, memory_ratio_max=100.0, start_bytes=1 << 20),
    Harness("news", read_news, (), _MSGPACK, 5.0, memory_ratio_max=100.0, start_bytes=1 << 20),
    Harness("seen", read_seen, (), _MSGPACK, 5.0, memory_ratio_max=100.0, start_bytes=1 << 20),
    Harness("redis", read_redis, (), _REDIS, 5.0, memory_ratio_max=100.0, start_bytes=1 << 20),
    Harness("learned", read_learned, (), _LEARNED, 5.0, memory_ratio_max=100.0, start_bytes=FILE_BYTES_MAX + (1 << 20)),
)
