"""Agents, single questions and programs with shared prefixes are of the lengths that they are said to be."""

from __future__ import annotations

from collections import Counter

import pytest

from backends.simulated.engine_model import EngineModel
from lab.agents import CONTEXT_TOKENS, Agents, Crowd
from lab.dlpm.baselines import preble, round_robin_lpm, vtc_round_robin
from lab.dlpm.experiments import A10G
from lab.dlpm.programs import Programs, judge, long_context_qa, tree_of_thoughts
from lab.lab_driver import simulate
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.queue.bounds import QueueLimits
from simulation.run import Arrival, Record


def interaction(crowd: Crowd, call: Arrival) -> list[Arrival]:
    """All calls of the one that this call begins."""
    calls = [call]
    while not calls[-1].claim.ends:
        following = crowd.next_arrival(Record(calls[-1], outcome="completed"), calls[-1].arrived_s + 1.0)
        assert following is not None
        calls.append(following)
    return calls


def test_contexts_are_as_long_as_the_number_of_agents_is_reckoned_with() -> None:
    crowd = Crowd([Agents("a", 1000)], seed=7, until_s=1e9)
    calls = [call for first in crowd.arrivals() for call in interaction(crowd, first)]
    contexts = [call.prompt_tokens + call.output_tokens for call in calls]
    assert sum(contexts) / len(contexts) == pytest.approx(CONTEXT_TOKENS, rel=0.05)


# --- traffic with shared prefixes is the paper's in number and length ---


@pytest.mark.parametrize(
    ("programs", "number"),
    [
        (tree_of_thoughts(2, 1, 1.0, misbehaviour="more", output_tokens=4), {"0": 340, "1": 30}),
        (judge(2, 3, 1.0, misbehaviour="more", output_tokens=4), {"0": 3 * 18, "1": 3 * 4}),
    ],
    ids=["trees of thoughts", "judges"],
)
def test_programs_have_the_published_numbers_of_calls(programs: Programs, number: dict[str, int]) -> None:
    engine = AdmissionEngine(named_policy("dlpm"), limits=QueueLimits(queue_wait_s_max=1e6))
    engine.add_backend("one", max_num_seqs=256)
    models = {"one": EngineModel(A10G)}
    found = simulate(programs.arrivals(), engine=engine, backends=models, next_arrival=programs.next_arrival)
    assert Counter(record.arrival.flow.tenant for record in found.records.values()) == number


def test_documents_are_of_the_published_length_and_longer_where_one_misbehaves() -> None:
    arrivals = list(long_context_qa(3, 40, 1.0, misbehaviour="longer", documents=20).arrivals())
    mean = {
        client: sum(a.prompt_tokens for a in arrivals if a.flow.tenant == client) / 40 for client in ("0", "1", "2")
    }
    assert 0.85 * 21_449 < (mean["1"] + mean["2"]) / 2 < 1.15 * 21_449
    assert 1.6 < mean["0"] / ((mean["1"] + mean["2"]) / 2) < 2.4
    assert [arrival.arrived_s for arrival in arrivals] == sorted(arrival.arrived_s for arrival in arrivals)


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
