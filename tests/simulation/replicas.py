"""Several gateways before one slow engine in virtual time: traffic, their store, and who received what."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import EngineProfile
from lab.service import service
from lab.several_gateways import Stall, simulate_together
from lab.simulation_result import LOST, SimulationResult
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.replicas.messages import PrefixReport, ReplicaReport, ReplicaView
from policies.request import Flow
from simulation.run import Arrival, Record
from tests.kit.typed_script_store import TypedScriptStore

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


class SimulatedStore:
    """The store of `simulate_together`: the production script, at the time of the simulation."""

    way_s = 0.0003

    def __init__(self, *, lost: float = 0.0, gone: Callable[[float], bool] = lambda now: False, seed: int = 0) -> None:
        """`lost`: so many of the requests get lost on the way, and of the answers; `gone`: does it not answer?"""
        self.script = TypedScriptStore()
        self._lost = lost
        self._gone = gone
        self._rng = random.Random(seed)
        self.granted: dict[int, int] = {}
        """Sequences of the last grant of each gateway."""

    def exchange(self, gateway: int, number: int, told: ReplicaReport, now: float) -> ReplicaView | None:
        if self._gone(now) or self._rng.random() < self._lost:
            return None
        heard = self.script.exchange(f"gateway-{gateway}", number, told, EPOCH_MS + int(now * 1000))
        self.granted[gateway] = heard.grants[0].sequences
        return None if self._rng.random() < self._lost else heard

    def carries(self, news: PrefixReport, now: float) -> bool:
        return not self._gone(now) and self._rng.random() >= self._lost

    def flush(self) -> None:
        """All is lost."""
        self.script = TypedScriptStore()


def backends(engines: int) -> list[str]:
    return [BACKEND, *(f"{BACKEND}-{number}" for number in range(1, engines))]


def make_engine(policy: str, engines: int = 1) -> AdmissionEngine:
    engine = AdmissionEngine(named_policy(policy))
    for backend in backends(engines):
        engine.add_backend(backend, max_num_seqs=SLOTS)
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
    floods: Floods | Rounds,
    gateways: int,
    store: SimulatedStore | None,
    *,
    policy: str = "vtc",
    stalls: Sequence[Stall] = (),
    engines: int = 1,
) -> tuple[SimulationResult, list[AdmissionEngine]]:
    made = [make_engine(policy, engines) for _ in range(gateways)]
    found = simulate_together(
        floods.first(),
        engines=made,
        backends={backend: EngineModel(ENGINE) for backend in backends(engines)},
        next_arrival=floods.next,
        arrives_at=floods.at,
        store=store,
        stalls=stalls,
    )
    for index, engine in enumerate(made):
        if not any(stall.gateway == index and stall.until_s == float("inf") for stall in stalls):
            assert (engine.queued, engine.dispatched) == (0, 0)
    return found, made


def off(found: SimulationResult, from_s: float, until_s: float) -> float:
    """How far is the ratio of what the two received from that of their weights?"""
    got = service(found.records.values(), from_s, until_s)
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


def refused(found: SimulationResult) -> set[str]:
    return {record.outcome for record in found.records.values()} - {"completed"}


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


LIGHT_DRAINS_LAST = {"heavy": 40, "light": 40}
