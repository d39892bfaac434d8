"""Agents, single questions and programs with shared prefixes are of the lengths that they are said to be."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import profile
from lab.agents import CONTEXT_TOKENS, RETRY_S, Agents, Crowd, Questions
from lab.dlpm.baselines import preble, round_robin_lpm, vtc_round_robin
from lab.dlpm.experiments import A10G
from lab.dlpm.programs import BLOCK_TOKENS, Programs, judge, long_context_qa, tree_of_thoughts
from lab.lab_driver import simulate
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.queue.bounds import QueueLimits
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


# --- traffic with shared prefixes is the paper's in number and length ---


def make_engine(policy: object = None) -> AdmissionEngine:
    engine = AdmissionEngine(policy or named_policy("dlpm"), limits=QueueLimits(queue_wait_s_max=1e6))  # type: ignore[arg-type]
    engine.add_backend("one", max_num_seqs=256)
    return engine


def serve_programs(programs: Programs, engine: AdmissionEngine | None = None) -> SimulationResult:
    return simulate(
        programs.arrivals(),
        engine=engine or make_engine(),
        backends={"one": EngineModel(A10G)},
        next_arrival=programs.next_arrival,
    )


def calls(result: SimulationResult) -> Counter[str]:
    return Counter(record.arrival.flow.tenant for record in result.records.values())


def test_trees_have_the_published_numbers_of_calls() -> None:
    assert calls(serve_programs(tree_of_thoughts(2, 1, 1.0, misbehaviour="more", output_tokens=4))) == {
        "0": 340,
        "1": 30,
    }


def test_judges_ask_in_each_dimension_and_merge() -> None:
    assert calls(serve_programs(judge(2, 3, 1.0, misbehaviour="more", output_tokens=4))) == {"0": 3 * 18, "1": 3 * 4}


def test_children_wait_for_their_parent_and_begin_with_its_prompt() -> None:
    result = serve_programs(
        tree_of_thoughts(1, 1, 1.0, misbehaviour="none", height=2, output_tokens=64, question_tokens=640)
    )
    levels: dict[int, list] = {}
    for record in result.records.values():
        levels.setdefault(record.arrival.prompt_tokens, []).append(record)
    parents, children = levels[min(levels)], levels[max(levels)]
    assert (len(parents), len(children)) == (2, 4)
    whole = min(levels) // BLOCK_TOKENS
    for child in children:
        assert child.arrival.prefix[:whole] == parents[0].arrival.prefix[:whole]
        assert child.arrival.arrived_s in {parent.finished_s for parent in parents}
    assert len({child.arrival.prefix for child in children}) == 2, "those of one thought are about the same text"


def test_documents_are_of_the_published_length_and_longer_where_one_misbehaves() -> None:
    arrivals = list(long_context_qa(3, 40, 1.0, misbehaviour="longer", documents=20).arrivals())
    mean = {
        client: sum(a.prompt_tokens for a in arrivals if a.flow.tenant == client) / 40 for client in ("0", "1", "2")
    }
    assert 0.85 * 21_449 < (mean["1"] + mean["2"]) / 2 < 1.15 * 21_449
    assert 1.6 < mean["0"] / ((mean["1"] + mean["2"]) / 2) < 2.4
    assert [arrival.arrived_s for arrival in arrivals] == sorted(arrival.arrived_s for arrival in arrivals)


def test_who_sends_more_requests_sends_more_documents() -> None:
    arrivals = list(long_context_qa(2, 200, 1.0, misbehaviour="more", documents=5).arrivals())
    documents = {client: {a.prefix[0] for a in arrivals if a.flow.tenant == client} for client in ("0", "1")}
    assert (len(documents["0"]), len(documents["1"])) == (20, 5)


@pytest.mark.interpreted_only("baselines extend what is compiled")
def test_the_baselines_place_as_they_are_named() -> None:
    def backends(policy: object) -> dict[str, set[str]]:
        engine = AdmissionEngine(policy, limits=QueueLimits(queue_wait_s_max=1e6))  # type: ignore[arg-type]
        models = {name: EngineModel(A10G) for name in ("one", "two")}
        for name in models:
            engine.add_backend(name, max_num_seqs=256)
        programs = long_context_qa(2, 12, 0.2, misbehaviour="none", documents=1, document_tokens=4000)
        result = simulate(programs.arrivals(), engine=engine, backends=models, next_arrival=programs.next_arrival)
        used: dict[str, set[str]] = {}
        for _, decision in result.decisions:
            used.setdefault(decision.id.split("-")[0], set()).add(decision.backend)  # type: ignore[union-attr]
        return used

    assert backends(round_robin_lpm()) == {"0": {"one", "two"}, "1": {"one", "two"}}
    assert backends(vtc_round_robin()) == {"0": {"one", "two"}, "1": {"one", "two"}}
    assert all(len(names) == 1 for names in backends(preble()).values()), "each goes where its document is"
