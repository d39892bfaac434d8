"""Several gateways find as much of their prompts cached as one does, since each knows what the others sent."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count

from backends.simulated.engine_model import EngineModel
from lab.several_gateways import simulate_together
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.replicas.messages import PrefixReport
from policies.request import Flow
from simulation.run import Arrival, Record
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
TENANTS = "abcd"


def _block(*content: object) -> int:
    """The hash of a block, the same in every process."""
    return int.from_bytes(blake2b(repr(content).encode(), digest_size=8).digest())


@dataclass
class Sessions:
    """Users of tenants that hold one conversation of some turns after the other, and think before the next turn."""

    users: int
    """Of each tenant."""
    until_s: float
    gateways: int = 1
    """Requests come to each in turn."""
    think_s: float = 0.5
    turn: Iterator[int] = field(default_factory=count)
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    serial: Iterator[int] = field(default_factory=count)
    open: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Turn and conversation of each request."""

    def first(self) -> list[Arrival]:
        arrivals = [
            self.arrival(tenant, 0, next(self.serial), self.rng.random() * RAMP_S)
            for tenant in TENANTS
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
            request_id, Flow(tenant, "app", "user"), now, prompt, output, 200, prefix=(*system, *own)
        )  # fmt: skip

    def where(self, arrival: Arrival, now: float) -> int:
        return next(self.turn) % self.gateways


class Deaf(TwinStore):
    """Nobody hears what others sent."""

    def carries(self, news: PrefixReport, now: float) -> bool:
        return False


def cached_share(sessions: Sessions, store: TwinStore | None = None, *, steps: bool = False) -> float:
    """Return the part of all prompt tokens that one of three engines had cached."""
    names = [f"engine-{number}" for number in range(3)]
    engines = [AdmissionEngine(named_policy("fairserve")) for _ in range(sessions.gateways)]
    for engine in engines:
        for name in names:
            engine.add_backend(name, max_num_seqs=ENGINE.max_num_seqs)
    found = simulate_together(
        sessions.first(),
        engines=engines,
        backends={name: EngineModel(ENGINE) for name in names},
        next_arrival=sessions.next,
        arrives_at=sessions.where,
        store=store,
        steps=steps,
    )
    records = found.records.values()
    return sum(record.cached_tokens for record in records) / sum(record.arrival.prompt_tokens for record in records)


def test_two_gateways_behind_round_robin_find_as_much_cached_as_one() -> None:
    one = cached_share(Sessions(5, 20.0))

    def cached_at_two(store: TwinStore) -> float:
        return cached_share(Sessions(5, 20.0, gateways=2), store)

    assert cached_at_two(TwinStore()) >= one - 0.01
    assert cached_at_two(TwinStore(lost=0.05)) >= one - 0.02
    assert cached_at_two(Deaf()) < one - 0.02


def test_engines_that_say_their_steps_keep_as_much_in_their_caches() -> None:
    """A page of metrics between two steps has the counter by which a restart shows, as the steps do."""
    assert cached_share(Sessions(25, 10.0), steps=True) >= cached_share(Sessions(25, 10.0)) - 0.02
