"""Several gateways find as much of their prompts cached as one does, since each knows what the others sent."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count

import pytest

from backends.simulated.engine_model import EngineModel
from lab.several_gateways import simulate_together
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.replicas.messages import PrefixReport
from policies.request import Flow
from simulation.run import Arrival, Record, SimulationResult
from tests.simulation.replicas import ENGINE as SLOW
from tests.simulation.replicas import TwinStore

BLOCK = 64
"""Tokens."""
ENGINE = replace(
    SLOW, name="caching", block_size=BLOCK, max_model_len=16_384, base_s=1e-2, per_prefill_token_s=4e-5
)  # fmt: skip
SYSTEM_BLOCKS = 4
TURNS = 8
RAMP_S = 3.0
ALIKE = dict.fromkeys("abcd", 1.0)


def _block(*content: object) -> int:
    """The hash of a block, the same in every process."""
    return int.from_bytes(blake2b(repr(content).encode(), digest_size=8).digest())


@dataclass
class Sessions:
    """Users of tenants that hold one conversation of some turns after the other, and think before the next turn."""

    weights: dict[str, float]
    users: int
    """Of each tenant."""
    until_s: float
    at: Callable[[str, float, random.Random], int]
    """At which gateway does a tenant's request arrive?"""
    think_s: float = 0.5
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    serial: Iterator[int] = field(default_factory=count)
    open: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Turn and conversation of each request."""

    def first(self) -> list[Arrival]:
        arrivals = [
            self.arrival(tenant, 0, next(self.serial), self.rng.random() * RAMP_S)
            for tenant in self.weights
            for _ in range(self.users)
        ]
        return sorted(arrivals, key=lambda arrival: arrival.arrived_s)

    def next(self, record: Record, now: float) -> Arrival | None:
        assert record.outcome == "completed"
        turn, conversation = self.open.pop(record.arrival.id)
        again_s = now + self.rng.random() * 2 * self.think_s
        if again_s > self.until_s:
            return None
        turn, conversation = (turn + 1, conversation) if turn + 1 < TURNS else (0, next(self.serial))
        return self.arrival(record.arrival.flow.tenant, turn, conversation, again_s)

    def arrival(self, tenant: str, turn: int, conversation: int, now: float) -> Arrival:
        """The system prompt of the tenant, then what is this conversation's own: two blocks more with each turn."""
        system = [_block(tenant, block) for block in range(SYSTEM_BLOCKS)]
        own = [_block(tenant, conversation, block) for block in range(3 + 2 * turn)]
        prompt, output = BLOCK * (len(system) + len(own)) + self.rng.randrange(1, BLOCK), self.rng.randint(20, 60)
        request_id = f"{tenant}-{next(self.serial)}"
        self.open[request_id] = (turn, conversation)
        return Arrival(
            request_id, Flow(tenant, "app", "user"), now, prompt, output, 200, self.weights[tenant],
            prefix=(*system, *own),
        )  # fmt: skip

    def where(self, arrival: Arrival, now: float) -> int:
        return self.at(arrival.flow.tenant, now, self.rng)


class Deaf(TwinStore):
    """Nobody hears what others sent."""

    def carries(self, news: PrefixReport, now: float) -> bool:
        return False


def make_engine(policy: str, engines: int) -> AdmissionEngine:
    engine = AdmissionEngine(named_policy(policy))
    for number in range(engines):
        engine.add_backend(f"engine-{number}", max_num_seqs=ENGINE.max_num_seqs)
    return engine


def run(
    sessions: Sessions,
    gateways: int,
    engines: int,
    store: TwinStore | None,
    policy: str = "fairserve",
    *,
    steps: bool = False,
) -> SimulationResult:
    made = [make_engine(policy, engines) for _ in range(gateways)]
    return simulate_together(
        sessions.first(),
        engines=made,
        backends={f"engine-{number}": EngineModel(ENGINE) for number in range(engines)},
        next_arrival=sessions.next,
        arrives_at=sessions.where,
        store=store,
        steps=steps,
    )


def round_robin(gateways: int) -> Callable[..., int]:
    turn = count()
    return lambda tenant, now, rng: next(turn) % gateways


def cached_share(found: SimulationResult) -> float:
    """Of all prompt tokens, those that an engine had cached."""
    records = found.records.values()
    return sum(record.cached_tokens for record in records) / sum(record.arrival.prompt_tokens for record in records)


@pytest.mark.parametrize("policy", ["vtc", "dlpm"])
def test_two_gateways_behind_round_robin_find_as_much_cached_as_one(policy: str) -> None:
    until_s = 20.0

    def cached(gateways: int, store: TwinStore | None) -> float:
        return cached_share(run(Sessions(ALIKE, 5, until_s, round_robin(gateways)), gateways, 3, store, policy))

    one = cached(1, None)
    assert cached(2, TwinStore()) >= one - 0.01
    assert cached(2, TwinStore(lost=0.05)) >= one - 0.02
    assert cached(2, Deaf()) < one - 0.02


def test_engines_that_say_their_steps_keep_as_much_in_their_caches() -> None:
    """A page of metrics between two steps has the counter by which a restart shows, as the steps do."""

    def cached(*, steps: bool) -> float:
        return cached_share(run(Sessions(ALIKE, 25, 10.0, round_robin(1)), 1, 3, None, steps=steps))

    assert cached(steps=True) >= cached(steps=False) - 0.02
