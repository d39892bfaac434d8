"""Several gateways give the shares that one gives: production engines and the production script, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import msgspec
import pytest
from redis import Redis

from backends.simulated.engine import EngineModel
from backends.simulated.profiles import EngineProfile
from gateway.redis.store import Script, pool_key
from policies.admission.engine import AdmissionEngine
from policies.orders.registry import POLICIES, PolicyParams
from policies.replicas.messages import Heard, Told
from policies.request import Flow
from simulation.driver import LOST, Arrival, Record, Run, Stall, simulate
from tests.redis_server import redis_client

BACKEND = "engine"
SLOTS = 16
ENGINE = EngineProfile(
    name="slow",
    block_size=16,
    num_gpu_blocks=1025,
    max_model_len=4096,
    max_num_seqs=SLOTS,
    max_num_batched_tokens=2048,
    base_s=2e-2,
    per_prefill_token_s=2e-5,
    per_seq_s=1.5e-4,
    per_context_token_s=2e-7,
)
"""Few tokens in a second, so that a minute is simulated in seconds."""
WEIGHTS = {"heavy": 4.0, "light": 1.0}
RAMP_S = 3.0
WAITING_TARGET = 2
MEMBER_S = 3.0
"""Until a gateway that is not heard of has nothing any more: as the script has it."""

_SCRIPT = Script("exchange.lua")
_KEYS = (pool_key("p", "replicas"), pool_key("p", ""))
_decode = msgspec.msgpack.Decoder(Heard).decode


class RedisStore:
    """The store of `simulate`: the production script on a real server, at the time of the simulation."""

    way_s = 0.0003

    def __init__(self, redis: Redis, *, lost: float = 0.0, gone: Callable[[float], bool] = lambda now: False) -> None:
        """`lost`: so many of the requests get lost on the way, and of the answers; `gone`: does it not answer?"""
        redis.flushall()
        self._run = redis.register_script(_SCRIPT.source)
        self._lost = lost
        self._gone = gone
        self._rng = random.Random(0)
        self.exchanges = 0
        self.granted: dict[int, int] = {}
        """Sequences of the last grant of each gateway, and when it was."""
        self.granted_s: dict[int, float] = {}

    def exchange(self, gateway: int, number: int, told: Told, now: float) -> Heard | None:
        if self._gone(now) or self._rng.random() < self._lost:
            return None
        self.exchanges += 1
        now_ms = 1_000_000 + int(now * 1000)
        answer = self._run(keys=_KEYS, args=[f"gateway-{gateway}", number, msgspec.msgpack.encode(told), now_ms])
        heard = _decode(answer)
        self.granted[gateway], self.granted_s[gateway] = heard.grants[0].sequences, now
        return None if self._rng.random() < self._lost else heard


def make_engine(policy: str) -> AdmissionEngine:
    engine = AdmissionEngine(POLICIES[policy](PolicyParams()))
    engine.add_backend(BACKEND, max_num_seqs=SLOTS)
    return engine


@dataclass
class Floods:
    """Tenants that each keep `clients` requests open at gateways that `where` names, until `ends_s`."""

    ends_s: float
    where: Callable[[str, float, random.Random], int]
    clients: int = 40
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    serial: Iterator[int] = field(default_factory=count)

    def first(self) -> list[Arrival]:
        return [self.arrival(tenant, 0.0) for tenant in WEIGHTS for _ in range(self.clients)]

    def next(self, record: Record, now: float) -> Arrival | None:
        again_s = now if record.outcome in ("completed", LOST) else now + 1.0
        return self.arrival(record.arrival.flow.tenant, again_s) if again_s < self.ends_s else None

    def at(self, arrival: Arrival, now: float) -> int:
        return self.where(arrival.flow.tenant, now, self.rng)

    def arrival(self, tenant: str, now: float) -> Arrival:
        prompt, output = self.rng.randint(80, 160), self.rng.randint(20, 60)
        return Arrival(
            f"{tenant}-{next(self.serial)}", Flow(tenant, "app", "user"), now, prompt, output, 200, WEIGHTS[tenant]
        )


def run(
    floods: Floods,
    gateways: int,
    store: RedisStore | None,
    *,
    policy: str = "vtc",
    stalls: Sequence[Stall] = (),
) -> tuple[Run, list[AdmissionEngine]]:
    engines = [make_engine(policy) for _ in range(gateways)]
    found = simulate(
        floods.first(),
        engine=engines[0],
        others=engines[1:],
        backends={BACKEND: EngineModel(ENGINE)},
        next_arrival=floods.next,
        arrives_at=floods.at,
        store=store,
        stalls=stalls,
    )
    for index, engine in enumerate(engines):
        if not any(stall.gateway == index and stall.until_s == float("inf") for stall in stalls):
            assert (engine.queued, engine.dispatched) == (0, 0)
    return found, engines


def service(found: Run, from_s: float, until_s: float) -> dict[str, float]:
    """What each tenant received in this time: prompt tokens and twice the output tokens."""
    received = dict.fromkeys(WEIGHTS, 0.0)
    for record in found.records.values():
        if record.token_s:
            prompt = record.arrival.prompt_tokens if from_s <= record.token_s[0] < until_s else 0
            output = sum(from_s <= one < until_s for one in record.token_s)
            received[record.arrival.flow.tenant] += prompt + 2 * output
    return received


def off(found: Run, from_s: float, until_s: float) -> float:
    """How far is the ratio of what the two received from that of their weights?"""
    got = service(found, from_s, until_s)
    return abs(got["heavy"] / got["light"] / (WEIGHTS["heavy"] / WEIGHTS["light"]) - 1)


HOME = {"heavy": 0, "light": 1}
"""Where the tenants go if their traffic is skewed as far as it can be: to two gateways, or to two halves of them."""


def skewed(gateways: int, share: float = 1.0, moves_s: float = float("inf")) -> Callable[..., int]:
    """So much of a tenant's traffic goes to its own half of the gateways, which change their places now and then."""

    def where(tenant: str, now: float, rng: random.Random) -> int:
        half = HOME[tenant] if rng.random() < share else 1 - HOME[tenant]
        half = (half + int(now / moves_s)) % 2
        return rng.randrange(gateways // 2) + half * (gateways // 2)

    return where


def random_of(gateways: int) -> Callable[..., int]:
    return lambda tenant, now, rng: rng.randrange(gateways)


def waiting_bound(gateways: int) -> int:
    return WAITING_TARGET + gateways


def refused(found: Run) -> set[str]:
    return {record.outcome for record in found.records.values()} - {"completed"}


@pytest.fixture(scope="module")
def one_gateway() -> float:
    """Service in a second, of one gateway."""
    until_s = 20.0
    found, _ = run(Floods(until_s, lambda *_: 0), 1, None)
    return sum(service(found, RAMP_S, until_s).values()) / (until_s - RAMP_S)


@pytest.mark.parametrize(
    ("gateways", "where", "policy", "kept"),
    [
        (2, skewed(2), "fairserve", 0.98),
        (2, skewed(2, moves_s=7.0), "vtc", 0.96),
        (4, skewed(4), "vtc", 0.98),
        (4, skewed(4, share=0.9), "vtc", 0.96),
        (4, random_of(4), "fairserve", 0.98),
    ],
    ids=["2-all", "2-moving", "4-all", "4-nine-in-ten", "4-random"],
)
async def test_shares_are_those_of_one_gateway_wherever_traffic_comes(
    gateways: int, where: Callable[..., int], policy: str, kept: float, one_gateway: float
) -> None:
    """`kept`: throughput, of that of one gateway."""
    until_s = 60.0 if gateways == 2 else 30.0
    async with redis_client() as redis:
        store = RedisStore(redis)
        found, _ = run(Floods(RAMP_S + until_s, where), gateways, store, policy=policy)
    assert refused(found) == set()
    assert off(found, RAMP_S, RAMP_S + until_s) <= 0.05
    assert found.waiting_max <= waiting_bound(gateways)
    assert sum(service(found, RAMP_S, RAMP_S + until_s).values()) / until_s >= kept * one_gateway


async def test_a_burst_does_not_queue_in_the_engine() -> None:
    arrivals = [
        Arrival(f"{index}", Flow(f"tenant-{index % 3}", "app", "user"), 1.0 + index * 1e-5, 120, 10 + index % 30, 200)
        for index in range(200)
    ]
    early = Arrival("early", Flow("tenant-0", "app", "user"), 0.0, 120, 5, 200)
    async with redis_client() as redis:
        found = simulate(
            [early, *arrivals],
            engine=make_engine("fairserve"),
            others=[make_engine("fairserve") for _ in range(3)],
            backends={BACKEND: EngineModel(ENGINE)},
            arrives_at=lambda arrival, now: 0 if arrival.id == "early" else int(arrival.id) % 4,
            store=RedisStore(redis),
        )
    assert refused(found) == set()
    assert found.waiting_max <= waiting_bound(4)


async def test_exchanges_that_get_lost_are_made_good() -> None:
    until_s = 30.0
    async with redis_client() as redis:
        found, _ = run(Floods(until_s, skewed(2)), 2, RedisStore(redis, lost=0.05))
    assert refused(found) == set()
    # A gateway hears nothing for 0.35 s of every exchange that is lost, one in ten: it is late to use what it is owed.
    assert off(found, RAMP_S, until_s) <= 0.15
    assert found.waiting_max < SLOTS


async def test_while_the_store_is_gone_each_goes_on_with_its_share() -> None:
    gone_s, back_s, until_s = 10.0, 20.0, 50.0
    async with redis_client() as redis:
        store = RedisStore(redis, gone=lambda now: gone_s <= now < back_s)
        found, _ = run(Floods(until_s, skewed(2)), 2, store)
    assert refused(found) == set()
    assert off(found, gone_s, back_s) <= 0.15
    assert off(found, back_s + 10.0, until_s) <= 0.05


async def test_what_a_gateway_had_that_died_comes_back() -> None:
    died_s, until_s = 8.0, 30.0
    at: list[tuple[float, int]] = []

    class Watched(RedisStore):
        def exchange(self, gateway: int, number: int, told: Told, now: float) -> Heard | None:
            heard = super().exchange(gateway, number, told, now)
            if gateway == 0:
                at.append((now, self.granted[0]))
            return heard

    async with redis_client() as redis:
        floods = Floods(until_s, lambda tenant, now, rng: rng.randrange(2) if now < died_s else 0)
        found, _ = run(floods, 2, Watched(redis), stalls=[Stall(1, died_s)])
    assert refused(found) == {LOST}
    assert max(granted for now, granted in at if RAMP_S < now < died_s) < SLOTS
    assert max(granted for now, granted in at if now < died_s + MEMBER_S + 0.1) >= SLOTS
    assert off(found, died_s + MEMBER_S, until_s) <= 0.05
    # Until then the other one finds slots empty that it takes to be used, and dispatches more to fill them.
    assert found.waiting_max <= waiting_bound(2) + SLOTS // 2


async def test_a_gateway_that_stood_still_spends_nothing_that_is_no_longer_its_own() -> None:
    stands_s, goes_on_s, until_s = 8.0, 13.0, 30.0
    async with redis_client() as redis:
        floods = Floods(until_s, lambda tenant, now, rng: 0 if stands_s <= now < goes_on_s else rng.randrange(2))
        found, _ = run(floods, 2, RedisStore(redis), stalls=[Stall(1, stands_s, goes_on_s)])
    assert refused(found) == set()
    theirs = [record.dispatched_s for record in found.records.values() if record.gateway == 1 and record.dispatched_s]
    assert min(one for one in theirs if one >= stands_s) > goes_on_s, "it asked before it dispatched anything"
    # As after a death, the other one has dispatched more than there are slots; who goes on adds nothing to that.
    assert found.waiting_max <= waiting_bound(2) + SLOTS // 4
    assert off(found, goes_on_s, until_s) <= 0.05
