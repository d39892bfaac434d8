"""Agents and single questions are of the lengths that they are said to be, and ask again for what was refused."""

from __future__ import annotations

from itertools import pairwise

import pytest

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import profile
from lab.agents import CONTEXT_TOKENS, RETRY_S, Agents, Crowd, Questions
from lab.lab_driver import simulate
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from simulation.run import Arrival, Record, SimulationResult


def serve(crowd: Crowd, until_s: float) -> SimulationResult:
    engine = AdmissionEngine(named_policy("fairserve"))
    engine.add_backend("one", max_num_seqs=256)
    models = {"one": EngineModel(profile("h100-llama3.1-8b"))}
    return simulate(crowd.arrivals(), engine=engine, backends=models, next_arrival=crowd.next_arrival, until_s=until_s)


def interaction(crowd: Crowd, call: Arrival) -> list[Arrival]:
    """All calls of the one that this call begins."""
    calls = [call]
    while not calls[-1].claim.ends:
        call = following(crowd, calls[-1], "completed")
        calls.append(call)
    return calls


def following(crowd: Crowd, arrival: Arrival, outcome: str) -> Arrival:
    found = crowd.next_arrival(Record(arrival, outcome=outcome), arrival.arrived_s + 1.0)
    assert found is not None
    return found


def test_contexts_are_as_long_as_the_number_of_agents_is_reckoned_with() -> None:
    crowd = Crowd([Agents("a", 1000)], seed=7, until_s=1e9)
    calls = [call for first in crowd.arrivals() for call in interaction(crowd, first)]
    contexts = [call.prompt_tokens + call.output_tokens for call in calls]
    assert sum(contexts) / len(contexts) == pytest.approx(CONTEXT_TOKENS, rel=0.05)


def test_each_call_names_its_interaction_only_the_last_ends_it_and_users_are_their_own() -> None:
    crowd = Crowd([Agents("a", 2)], seed=1, until_s=1e9)
    one, other = (interaction(crowd, first) for first in crowd.arrivals())
    assert [call.claim.ends for call in one] == [False] * (len(one) - 1) + [True]
    assert {call.claim.id for call in one}.isdisjoint({call.claim.id for call in other})
    assert {call.flow.user for call in one} != {call.flow.user for call in other}
    assert not set(one[-1].context) & set(other[-1].context)


def test_a_lone_agent_finds_prompt_and_answer_of_its_last_call_in_the_cache() -> None:
    run = serve(Crowd([Agents("a", 1)], seed=1, until_s=60.0), 60.0)
    records = [record for record in run.records.values() if record.outcome == "completed"]
    inside = [pair for pair in pairwise(records) if not pair[0].arrival.claim.ends]
    assert len(inside) > 5
    for before, after in inside:
        whole = before.arrival.prompt_tokens + before.arrival.output_tokens
        assert whole - 16 <= after.cached_tokens <= whole, "all but the block that is not full"
        assert before.arrival.prompt_tokens < after.cached_tokens


def test_nothing_happens_after_the_end() -> None:
    run = serve(Crowd([Agents("a", 3), Questions("b", clients=2, per_s=1.0)], seed=1, until_s=20.0), 10.0)
    assert 9.0 < run.ended_s <= 10.0
    assert all(record.arrival.arrived_s <= 10.0 for record in run.records.values())


@pytest.mark.parametrize("group", [Agents("a", 1), Questions("a", clients=1)])
def test_what_was_refused_is_asked_again_later(group: Agents | Questions) -> None:
    crowd = Crowd([group], seed=1, until_s=100.0)
    (first,) = crowd.arrivals()
    again = following(crowd, first, "queue_full")
    assert again.arrived_s == pytest.approx(first.arrived_s + 1.0 + RETRY_S)
    assert again.id != first.id
    assert crowd.retries == 1
    if isinstance(group, Agents):
        assert (again.claim, again.prefix, again.prompt_tokens) == (first.claim, first.prefix, first.prompt_tokens)
    assert crowd.next_arrival(Record(again, outcome="completed"), 101.0) is None
    assert crowd.retries == 1
