"""FairServe as published: the workload has the statistics of the paper, and the comparison comes out as it must."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.experiment import Verdict
from lab.fairserve.interaction_clients import PlannedInteraction
from lab.fairserve.population import APPS, GRAPHS, TABLE_4, Population, case_study, is_abuser, workload
from lab.fairserve.sections import POLICIES, Seed, compare, rows
from lab.fairserve.study import Study
from lab.fairserve.table4 import SEEDS, case_studies

pytestmark = pytest.mark.interpreted_only("baselines extend what is compiled")

LARGE = Population(users=2000, benign_rate=100.0, abusive_rate=10.0)
"""Long enough for its means to be those of the table."""
SMALL = Population(users=150, duration_s=90.0, swing_s=60.0)
JUDGED = ("RPM(10)", "VTC", "FairServe")
"""The policies that tests here compare; the others are studied over a few seconds, for their rows."""
SHORT = Population(users=10, abusers=1, benign_rate=1.0, abusive_rate=0.2, duration_s=5.0, swing_s=4.0)


@pytest.fixture(scope="module")
def large() -> list[PlannedInteraction]:
    return workload(LARGE)


def test_there_are_as_many_apps_users_and_abusers_as_published() -> None:
    interactions = workload(Population())
    users = {one.flow.tenant for one in interactions if not is_abuser(one.flow)}
    abusers = {one.flow.tenant for one in interactions if is_abuser(one.flow)}
    assert len(users) > 1000
    assert len({one.flow.app for one in interactions}) == APPS
    assert 0 < len(abusers) <= 0.01 * len(users)


def test_graph_sizes_and_tokens_are_those_of_table_2(large: list[PlannedInteraction]) -> None:
    calls = sum(len(one.calls) for one in large if not is_abuser(one.flow))
    for graphs in GRAPHS[:2]:
        own = [one for one in large if graphs.calls_min <= len(one.calls) <= graphs.calls_max]
        own = [one for one in own if not is_abuser(one.flow)]
        share = sum(len(one.calls) for one in own) / calls
        prompt = sum(call.prompt_tokens for one in own for call in one.calls) / len(own)
        output = sum(call.output_tokens for one in own for call in one.calls) / len(own)
        assert share == pytest.approx(graphs.requests_share, rel=0.05)
        assert prompt == pytest.approx(graphs.prompt_tokens, rel=0.08)
        assert output == pytest.approx(graphs.output_tokens, rel=0.08)
    for graphs in GRAPHS[2:]:
        assert any(graphs.calls_min <= len(one.calls) <= graphs.calls_max for one in large)


@pytest.mark.parametrize(("app", "prompt", "output"), [("app14", 6370, 102), ("app7", 14854, 74), ("app12", 999, 32)])
def test_single_calls_of_three_apps_are_those_of_table_4(
    large: list[PlannedInteraction], app: str, prompt: int, output: int
) -> None:
    calls = [one.calls[0] for one in large if one.flow.app == app and len(one.calls) == 1]
    assert sum(call.prompt_tokens for call in calls) / len(calls) == pytest.approx(prompt, rel=0.05)
    assert sum(call.output_tokens for call in calls) / len(calls) == pytest.approx(output, rel=0.05)


def test_the_case_study_sends_the_requests_of_table_4() -> None:
    interactions = case_study(duration_s=900.0, users=10, seed=1)
    for number, (prompt, output, requests) in TABLE_4.items():
        calls = [call for one in interactions if one.flow.app == f"app{number}" for call in one.calls]
        assert len(calls) == requests
        assert sum(call.prompt_tokens for call in calls) / requests == pytest.approx(prompt, rel=0.1)
        assert sum(call.output_tokens for call in calls) / requests == pytest.approx(output, rel=0.15)
    assert any(len(one.calls) > 1 for one in interactions)


@pytest.fixture(scope="module")
def studies() -> dict[str, Study]:
    judged = compare(SMALL, JUDGED)
    others = compare(SHORT, POLICIES.keys() - judged.keys())
    return {name: (judged | others)[name] for name in POLICIES}


def test_fairserve_cuts_nothing_refuses_abusers_only_and_costs_no_throughput(studies: dict[str, Study]) -> None:
    fair, vtc = studies["FairServe"], studies["VTC"]
    abusers, refused = fair.refusals()
    assert (fair.cut(), fair.wasted_tokens(), fair.benign_users_refused()) == (0, 0, 0)
    assert fair.served() == 1.0
    assert refused == abusers > 20
    assert fair.calm_refusals == 0
    assert sum(fair.throughput()) >= 0.99 * sum(vtc.throughput())
    assert fair.mean_wait_s(inside=True) < vtc.mean_wait_s(inside=True)


def test_a_flat_limit_cuts_interactions_and_leaves_the_engine_idle(studies: dict[str, Study]) -> None:
    flat, fair = studies["RPM(10)"], studies["FairServe"]
    assert flat.cut() > 0
    assert flat.wasted_tokens() > 0
    assert sum(fair.throughput()) >= 1.03 * sum(flat.throughput())


def test_what_is_begun_is_finished_where_everybody_gives_up() -> None:
    """With one seed; `python -m lab` asks it of all."""
    found = case_studies(SEEDS[0], ("VTC", "FairServe"))
    # Few of 164 interactions wait longer inside than their users do: starts of an unknown kind need no room.
    assert found["VTC"].cut() > 3 * found["FairServe"].cut()
    assert found["VTC"].served() < 0.97 < 0.98 < found["FairServe"].served()


def test_the_rows_say_what_is_missed(studies: dict[str, Study]) -> None:
    found = rows(studies, [Seed.of(studies)] * 5)
    verdicts = {row.measure: row.verdict for row in found}
    assert len(verdicts) == len(found), "no measure stands twice"
    assert verdicts["interactions cut in the middle, FairServe, all seeds"] is Verdict.MET
    assert verdicts["refusals that are the abusers'"] is Verdict.MET
    wrong = replace(Seed.of(studies), cut=1, delayed_inside=1.0)
    verdicts = {row.measure: row.verdict for row in rows(studies, [wrong] * 5)}
    assert verdicts["interactions cut in the middle, FairServe, all seeds"] is Verdict.MISSED
    assert verdicts["users delayed inside interactions, VTC's over FairServe's, 5 seeds"] is Verdict.MISSED
