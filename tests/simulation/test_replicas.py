"""Several gateways give the shares that one gives: production engines and the twin of their store, in virtual time."""

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
from policies.admission.named import named_policy
from policies.replicas.exchange import Exchange
from policies.replicas.messages import Heard, News, Told
from policies.request import Flow
from simulation.driver import simulate
from simulation.run import LOST, Arrival, Record, Run, Stall
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
EPOCH_MS = 1_000_000
MEMBER_S = 3.0
"""Until a gateway that is not heard of has nothing any more: as the script has it."""

_SCRIPT = Script("exchange.lua")
_KEYS = (pool_key("p", "replicas"), pool_key("p", ""))
_decode = msgspec.msgpack.Decoder(Heard).decode


class TwinStore:
    """The store of `simulate`: the twin of the production script, at the time of the simulation."""

    way_s = 0.0003

    def __init__(self, *, lost: float = 0.0, gone: Callable[[float], bool] = lambda now: False, seed: int = 0) -> None:
        """`lost`: so many of the requests get lost on the way, and of the answers; `gone`: does it not answer?"""
        self.exchanges = Exchange()
        self._lost = lost
        self._gone = gone
        self._rng = random.Random(seed)
        self.granted: dict[int, int] = {}
        """Sequences of the last grant of each gateway."""

    def exchange(self, gateway: int, number: int, told: Told, now: float) -> Heard | None:
        if self._gone(now) or self._rng.random() < self._lost:
            return None
        heard = self.ask(f"gateway-{gateway}", number, told, EPOCH_MS + int(now * 1000))
        self.granted[gateway] = heard.grants[0].sequences
        return None if self._rng.random() < self._lost else heard

    def carries(self, news: News, now: float) -> bool:
        return not self._gone(now) and self._rng.random() >= self._lost

    def ask(self, gateway: str, number: int, told: Told, now_ms: int) -> Heard:
        return self.exchanges.exchange(gateway, number, told, now_ms)

    def flush(self) -> None:
        """All is lost."""
        self.exchanges = Exchange()


class BothStore(TwinStore):
    """The production script on a real server beside its twin: every answer must be the same."""

    def __init__(self, redis: Redis, *, lost: float = 0.0) -> None:
        super().__init__(lost=lost)
        self.compared = 0
        self._redis = redis
        self._run = redis.register_script(_SCRIPT.source)
        redis.flushall()

    def ask(self, gateway: str, number: int, told: Told, now_ms: int) -> Heard:
        ours = super().ask(gateway, number, told, now_ms)
        theirs = self._run(keys=_KEYS, args=[gateway, number, msgspec.msgpack.encode(told), now_ms])
        assert as_plain(_decode(theirs)) == as_plain(ours)
        self.compared += 1
        return ours

    def flush(self) -> None:
        super().flush()
        self._redis.flushall()


def as_plain(heard: Heard) -> list[object]:
    """For comparison: tables of Lua have no order of their own."""
    return [*heard[:8], sorted(heard.under_way), *heard[9:]]


def make_engine(policy: str) -> AdmissionEngine:
    engine = AdmissionEngine(named_policy(policy))
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
    store: TwinStore | None,
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
def test_shares_are_those_of_one_gateway_wherever_traffic_comes(
    gateways: int, where: Callable[..., int], policy: str, kept: float, one_gateway: float
) -> None:
    """`kept`: throughput, of that of one gateway."""
    until_s = 60.0 if gateways == 2 else 30.0
    store = TwinStore()
    found, _ = run(Floods(RAMP_S + until_s, where), gateways, store, policy=policy)
    assert refused(found) == set()
    assert off(found, RAMP_S, RAMP_S + until_s) <= 0.05
    assert found.waiting_max <= waiting_bound(gateways)
    assert sum(service(found, RAMP_S, RAMP_S + until_s).values()) / until_s >= kept * one_gateway


def test_a_burst_does_not_queue_in_the_engine() -> None:
    arrivals = [
        Arrival(f"{index}", Flow(f"tenant-{index % 3}", "app", "user"), 1.0 + index * 1e-5, 120, 10 + index % 30, 200)
        for index in range(200)
    ]
    early = Arrival("early", Flow("tenant-0", "app", "user"), 0.0, 120, 5, 200)
    found = simulate(
        [early, *arrivals],
        engine=make_engine("fairserve"),
        others=[make_engine("fairserve") for _ in range(3)],
        backends={BACKEND: EngineModel(ENGINE)},
        arrives_at=lambda arrival, now: 0 if arrival.id == "early" else int(arrival.id) % 4,
        store=TwinStore(),
    )
    assert refused(found) == set()
    assert found.waiting_max <= waiting_bound(4)


def test_exchanges_that_get_lost_are_made_good() -> None:
    until_s = 30.0
    missed = []
    for seed in range(3):
        found, _ = run(Floods(until_s, skewed(2)), 2, TwinStore(lost=0.05, seed=seed))
        assert refused(found) == set()
        assert found.waiting_max < SLOTS
        missed.append(off(found, RAMP_S, until_s))
    # A gateway hears nothing for 0.35 s of every exchange that is lost, one in ten: it is late to use what it is owed.
    assert sum(missed) / len(missed) <= 0.1


def test_while_the_store_is_gone_each_goes_on_with_its_share() -> None:
    gone_s, back_s, until_s = 10.0, 20.0, 50.0
    store = TwinStore(gone=lambda now: gone_s <= now < back_s)
    found, _ = run(Floods(until_s, skewed(2)), 2, store)
    assert refused(found) == set()
    assert off(found, gone_s, back_s) <= 0.15
    assert off(found, back_s + 10.0, until_s) <= 0.05


def test_what_a_gateway_had_that_died_comes_back() -> None:
    died_s, until_s = 8.0, 30.0
    at: list[tuple[float, int]] = []

    class Watched(TwinStore):
        def exchange(self, gateway: int, number: int, told: Told, now: float) -> Heard | None:
            heard = super().exchange(gateway, number, told, now)
            if gateway == 0:
                at.append((now, self.granted[0]))
            return heard

    floods = Floods(until_s, lambda tenant, now, rng: rng.randrange(2) if now < died_s else 0)
    found, _ = run(floods, 2, Watched(), stalls=[Stall(1, died_s)])
    assert refused(found) == {LOST}
    assert max(granted for now, granted in at if RAMP_S < now < died_s) < SLOTS
    assert max(granted for now, granted in at if now < died_s + MEMBER_S + 0.1) >= SLOTS
    assert off(found, died_s + MEMBER_S, until_s) <= 0.05
    # Until then the other one finds slots empty that it takes to be used, and dispatches more to fill them.
    assert found.waiting_max <= waiting_bound(2) + SLOTS // 2


def test_a_gateway_that_stood_still_spends_nothing_that_is_no_longer_its_own() -> None:
    stands_s, goes_on_s, until_s = 8.0, 13.0, 30.0
    floods = Floods(until_s, lambda tenant, now, rng: 0 if stands_s <= now < goes_on_s else rng.randrange(2))
    found, _ = run(floods, 2, TwinStore(), stalls=[Stall(1, stands_s, goes_on_s)])
    assert refused(found) == set()
    theirs = [record.dispatched_s for record in found.records.values() if record.gateway == 1 and record.dispatched_s]
    assert min(one for one in theirs if one >= stands_s) > goes_on_s, "it asked before it dispatched anything"
    # As after a death, the other one has dispatched more than there are slots; who goes on adds nothing to that.
    assert found.waiting_max <= waiting_bound(2) + SLOTS // 4
    assert off(found, goes_on_s, until_s) <= 0.05


# --- rounds: what was idle for a while comes back ---


@dataclass
class Rounds:
    """Floods of so long, each when the one before has drained and a pause has passed; a tenant stays at one gateway.

    `clients`: how many requests each tenant keeps open; who has more of them per weight is served alone at the end.
    """

    rounds: int
    pause_s: float
    clients: dict[str, int]
    length_s: float = 15.0
    flows: dict[str, Flow] = field(default_factory=lambda: {name: Flow(name, "app", "user") for name in WEIGHTS})
    weights: dict[str, float] = field(default_factory=lambda: WEIGHTS)
    home: dict[str, int] = field(default_factory=lambda: HOME)
    begins_s: list[float] = field(default_factory=lambda: [0.0])
    open: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    serial: Iterator[int] = field(default_factory=count)

    def first(self) -> list[Arrival]:
        now = self.begins_s[-1]
        self.open = sum(self.clients.values())
        return [self.arrival(name, now) for name, clients in self.clients.items() for _ in range(clients)]

    def next(self, record: Record, now: float) -> Arrival | list[Arrival] | None:
        if now < self.begins_s[-1] + self.length_s:
            return self.arrival(record.arrival.id.partition("-")[0], now)
        self.open -= 1
        if self.open or len(self.begins_s) == self.rounds:
            return None
        self.begins_s.append(now + self.pause_s)
        return self.first()

    def at(self, arrival: Arrival, now: float) -> int:
        return self.home[arrival.id.partition("-")[0]]

    def arrival(self, name: str, now: float) -> Arrival:
        prompt, output = self.rng.randint(80, 160), self.rng.randint(20, 60)
        return Arrival(f"{name}-{next(self.serial)}", self.flows[name], now, prompt, output, 200, self.weights[name])


def ratios(found: Run, rounds: Rounds) -> list[float]:
    """In each round, what the first received over what the second did."""
    one, other = rounds.clients
    ratios = []
    for begins_s in rounds.begins_s:
        received = {one: 0.0, other: 0.0}
        from_s, until_s = begins_s + ROUND_RAMP_S, begins_s + rounds.length_s
        for record in found.records.values():
            if record.token_s:
                prompt = record.arrival.prompt_tokens if from_s <= record.token_s[0] < until_s else 0
                output = sum(from_s <= token_s < until_s for token_s in record.token_s)
                received[record.arrival.id.partition("-")[0]] += prompt + 2 * output
        ratios.append(received[one] / received[other])
    return ratios


def play(rounds: Rounds, gateways: int, store: TwinStore | None, policy: str, stalls: Sequence[Stall] = ()) -> Run:
    engines = [make_engine(policy) for _ in range(gateways)]
    return simulate(
        rounds.first(),
        engine=engines[0],
        others=engines[1:],
        backends={BACKEND: EngineModel(ENGINE)},
        next_arrival=rounds.next,
        arrives_at=rounds.at if gateways > 1 else lambda arrival, now: 0,
        store=store,
        stalls=stalls,
    )


ROUND_RAMP_S = RAMP_S
LIGHT_DRAINS_LAST = {"heavy": 40, "light": 40}
HEAVY_DRAINS_LAST = {"heavy": 200, "light": 24}


@pytest.mark.parametrize(
    ("policy", "clients", "pause_s"),
    [
        ("vtc", LIGHT_DRAINS_LAST, 0.0),
        ("vtc", HEAVY_DRAINS_LAST, 12.0),
        ("fairserve", LIGHT_DRAINS_LAST, 60.0),
        ("fairserve", HEAVY_DRAINS_LAST, 0.5),
    ],
)
def test_every_round_is_served_by_weight_whoever_was_idle(policy: str, clients: dict[str, int], pause_s: float) -> None:
    rounds = Rounds(3, pause_s, clients, length_s=30.0)
    found = play(rounds, 2, TwinStore(), policy)
    assert refused(found) == set()
    assert len(rounds.begins_s) == 3
    assert ratios(found, rounds) == pytest.approx([4.0] * len(rounds.begins_s), rel=0.05)


@pytest.mark.parametrize("pause_s", [0.0, 12.0])
def test_every_round_is_equal_between_the_flows_of_a_tenant(pause_s: float) -> None:
    rounds = Rounds(
        4,
        pause_s,
        {"one": 20, "other": 60},
        flows={"one": Flow("tenant", "app", "one"), "other": Flow("tenant", "app", "other")},
        weights={"one": 1.0, "other": 1.0},
        home={"one": 0, "other": 1},
    )
    found = play(rounds, 2, TwinStore(), "vtc")
    assert ratios(found, rounds) == pytest.approx([1.0] * 4, rel=0.05)


def test_rounds_after_the_store_has_lost_all() -> None:
    rounds = Rounds(2, 5.0, LIGHT_DRAINS_LAST, length_s=30.0)

    class Flushed(TwinStore):
        is_flushed = False

        def exchange(self, gateway: int, number: int, told: Told, now: float) -> Heard | None:
            if len(rounds.begins_s) == 2 and not self.is_flushed and now > rounds.begins_s[1] - 2.0:
                self.is_flushed = True
                self.flush()
            return super().exchange(gateway, number, told, now)

    store = Flushed()
    found = play(rounds, 2, store, "vtc")
    assert store.is_flushed
    assert ratios(found, rounds) == pytest.approx([4.0] * len(rounds.begins_s), rel=0.05)


def test_rounds_after_the_gateway_died_at_which_the_last_one_left() -> None:
    rounds = Rounds(2, 10.0, LIGHT_DRAINS_LAST)

    def home(arrival: Arrival, now: float) -> int:
        """The light one comes to the second gateway, and to the third one when that has died."""
        if arrival.id.startswith("heavy"):
            return 0
        return 1 if len(rounds.begins_s) == 1 else 2

    engines = [make_engine("vtc") for _ in range(3)]
    found = simulate(
        rounds.first(),
        engine=engines[0],
        others=engines[1:],
        backends={BACKEND: EngineModel(ENGINE)},
        next_arrival=rounds.next,
        arrives_at=home,
        store=TwinStore(),
        stalls=[Stall(1, 26.0)],
    )
    assert rounds.begins_s[1] > 26.0, "it died in the pause"
    assert refused(found) == set()
    assert ratios(found, rounds) == pytest.approx([4.0] * 2, rel=0.05)


async def test_the_twin_answers_as_the_script_does() -> None:
    async with redis_client() as redis:
        store = BothStore(redis, lost=0.02)
        play(Rounds(2, 1.0, LIGHT_DRAINS_LAST, length_s=6.0), 2, store, "fairserve")
        store.flush()
        until_s = 10.0
        floods = Floods(until_s, lambda tenant, now, rng: rng.randrange(2) if now < 4.0 else 2)
        run(floods, 3, store, policy="vtc", stalls=[Stall(1, 5.0)])
        assert store.compared > 500
