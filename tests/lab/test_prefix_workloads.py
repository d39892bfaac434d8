"""The traffic with shared prefixes is the paper's in number and length, and what engines cache of it is counted."""

from __future__ import annotations

from collections import Counter

import pytest

from backends.simulated.engine_model import EngineModel
from lab.dlpm.baselines import preble, round_robin_lpm, vtc_round_robin
from lab.dlpm.experiments import A10G
from lab.dlpm.programs import BLOCK_TOKENS, Programs, judge, long_context_qa, tree_of_thoughts
from lab.lab_driver import simulate
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.queue.bounds import QueueLimits
from simulation.run import SimulationResult


def make_engine(policy: object = None) -> AdmissionEngine:
    engine = AdmissionEngine(policy or named_policy("dlpm"), limits=QueueLimits(queue_wait_s_max=1e6))  # type: ignore[arg-type]
    engine.add_backend("one", max_num_seqs=256)
    return engine


def serve(programs: Programs, engine: AdmissionEngine | None = None) -> SimulationResult:
    return simulate(
        programs.arrivals(),
        engine=engine or make_engine(),
        backends={"one": EngineModel(A10G)},
        next_arrival=programs.next_arrival,
    )


def calls(result: SimulationResult) -> Counter[str]:
    return Counter(record.arrival.flow.tenant for record in result.records.values())


def test_trees_have_the_published_numbers_of_calls() -> None:
    assert calls(serve(tree_of_thoughts(2, 1, 1.0, misbehaviour="more", output_tokens=4))) == {"0": 340, "1": 30}


def test_judges_ask_in_each_dimension_and_merge() -> None:
    assert calls(serve(judge(2, 3, 1.0, misbehaviour="more", output_tokens=4))) == {"0": 3 * 18, "1": 3 * 4}


def test_children_wait_for_their_parent_and_begin_with_its_prompt() -> None:
    result = serve(tree_of_thoughts(1, 1, 1.0, misbehaviour="none", height=2, output_tokens=64, question_tokens=640))
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
