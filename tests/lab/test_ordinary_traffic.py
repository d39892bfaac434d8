"""Is anybody worse off by working sets where there are no agents? Each load is served with them and without."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from random import Random

import pytest

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import EngineProfile
from bench.expected_waits import LARGE
from bench.regimes import MEDIUM
from bench.report import quantile
from lab.lab_driver import simulate
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.queue.bounds import QueueLimits
from policies.request import NO_CLAIM, Claim, Flow
from simulation.run import Arrival, Record

BLOCK = 16
WARM = 0.2
"""Part of the time at the beginning that is not counted."""
DOCUMENTS_ENGINE = replace(MEDIUM, num_gpu_blocks=2001, per_prefill_token_s=1e-4)


@dataclass(frozen=True)
class Traffic:
    """Clients of four tenants in closed loops."""

    kind: str
    clients: int
    own_tokens: int
    answer_tokens: int
    shared_tokens: int = 0
    documents: int = 1
    """Of `shared_tokens` each; every prompt begins with one of them."""
    engine: EngineProfile = LARGE
    engines: int = 1
    pause_s: float = 0.0

    def claim(self, id: str, blocks: tuple[int, ...]) -> Claim:
        match self.kind:
            case "completions":
                return Claim(extends=blocks or (1,))
            case "talks":
                return Claim(id.split("/")[0], explicit=True)
            case "chat":
                return Claim(id, begins=True)
        return NO_CLAIM


def measured(
    traffic: Traffic, until_s: float, *, working_set: bool = True, prefill_parts: bool = False
) -> tuple[float, float]:
    """Answers a second, and the 95th percentile of the first token."""
    random, serial = Random(1), count(1)
    policy = named_policy("fairserve", working_set=working_set, prefill_parts=prefill_parts)
    engine = AdmissionEngine(policy, limits=QueueLimits(queue_wait_s_max=1e5))
    models = {f"engine-{number}": EngineModel(traffic.engine) for number in range(traffic.engines)}
    for name in models:
        engine.add_backend(name, max_num_seqs=traffic.engine.max_num_seqs)

    def ask(client: int, now: float) -> Arrival:
        number, tokens = next(serial), random.randint(traffic.own_tokens // 2, traffic.own_tokens * 3 // 2)
        document = (random.randrange(traffic.documents) + 1) << 20
        blocks = tuple(document + block for block in range(traffic.shared_tokens // BLOCK))
        blocks += tuple((number << 28) + block for block in range(tokens // BLOCK))
        answer = random.randint(traffic.answer_tokens // 2, traffic.answer_tokens * 3 // 2)
        id = f"{client}/{number}"
        return Arrival(
            id, Flow(f"tenant-{client % 4}", traffic.kind), now, traffic.shared_tokens + tokens, answer,
            prefix=blocks, claim=traffic.claim(id, blocks),
        )  # fmt: skip

    def ask_again(record: Record, now: float) -> Arrival | None:
        pause_s = random.expovariate(1 / traffic.pause_s) if traffic.pause_s else 1e-3
        return ask(int(record.arrival.id.split("/")[0]), now + pause_s) if now < until_s else None

    first = [ask(client, client * max(1e-3, traffic.pause_s / traffic.clients)) for client in range(traffic.clients)]
    run = simulate(first, engine=engine, backends=models, next_arrival=ask_again, until_s=until_s)
    ended = [
        record
        for record in run.records.values()
        if record.outcome == "completed" and record.arrival.arrived_s > WARM * until_s
    ]
    first_s = [record.ttft_s for record in ended if record.ttft_s is not None]
    return len(ended) / (until_s * (1 - WARM)), quantile(first_s, 0.95)


def costs_nothing(traffic: Traffic, until_s: float, rule: str = "working_set") -> None:
    rate, first_s = measured(traffic, until_s, **{rule: True})
    rate_without, first_s_without = measured(traffic, until_s, **{rule: False})
    assert rate >= 0.97 * rate_without
    assert first_s <= 1.05 * first_s_without


@pytest.mark.parametrize(
    "traffic",
    [
        pytest.param(Traffic("completions", 100, 2000, 50), id="raw completions"),
        pytest.param(Traffic("chat", 100, 300, 50, 4000), id="a system prompt that all share"),
    ],
)
def test_a_short_rush_of_single_questions_is_answered_as_if_there_were_no_working_set(traffic: Traffic) -> None:
    costs_nothing(traffic, 12.0)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["working_set", "prefill_parts"])
@pytest.mark.parametrize(
    "traffic",
    [
        Traffic("completions", 100, 300, 150),
        Traffic("completions", 100, 2000, 50),
        Traffic("chat", 100, 300, 150, 4000),
        Traffic("no claim", 100, 300, 150, 4000),
        Traffic("documents", 48, 100, 50, 3000, 24, DOCUMENTS_ENGINE),
        Traffic("embeddings", 200, 500, 1),
    ],
    ids=lambda traffic: f"{traffic.kind}, {traffic.own_tokens} + {traffic.shared_tokens}",
)
def test_ordinary_traffic_is_served_as_if_there_were_no_such_rule(traffic: Traffic, rule: str) -> None:
    costs_nothing(traffic, 40.0, rule)


@pytest.mark.slow
def test_documents_at_several_engines_are_served_as_if_there_were_no_working_set() -> None:
    costs_nothing(Traffic("documents", 160, 100, 50, 3000, 80, DOCUMENTS_ENGINE, engines=4), 20.0)


@pytest.mark.slow
def test_talks_of_people_who_read_before_they_go_on_hold_nothing() -> None:
    """All come within half a minute, which is not counted: until the first contexts were not asked for again, an app
    whose first calls return is taken to return.
    """
    costs_nothing(Traffic("talks", 400, 1500, 100, pause_s=30.0), 150.0)
