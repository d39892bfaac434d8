"""The measures of VTC: by hand on small runs, and to the printed digits on the authors' own records."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.vtc.fairness import (
    Served,
    accumulated_gap,
    backlogged_gap,
    discrepancy,
    received,
    service_rate,
    tokens_per_s,
    ttft_mean_s,
)
from lab.vtc.paper_tables import RECORDED, recorded_row
from lab.vtc.recorded import measures, read_runs
from policies.request import Flow
from simulation.run import Arrival, Record

RUNS = Path(__file__).parents[3] / "shared" / "traces" / "vtc_artifact_runs.csv.gz"


def one(client: str, begin_s: float, end_s: float, tokens: int = 100) -> Served:
    return Served(client, tokens, tokens, begin_s, begin_s, end_s)


def test_service_is_spread_from_the_first_token_to_the_last() -> None:
    requests = [one("a", 0.0, 10.0), Served("b", 10, 10, 1.0, None, None), one("c", 4.0, 4.0)]
    assert received(requests, 0.0, 10.0) == {"a": 300.0, "b": 0.0, "c": 300.0}
    assert received(requests, 2.0, 4.0) == {"a": pytest.approx(60.0), "b": 0.0, "c": 0.0}
    assert service_rate(requests, 0.0, 20.0)["a"] == 15.0


def test_throughput_counts_what_was_not_rejected() -> None:
    assert tokens_per_s([one("a", 0.0, 1.0), Served("b", 10, 10, 1.0, None, None)], 4.0) == 50.0


def test_waiting_is_by_the_time_of_the_first_token() -> None:
    requests = [Served("a", 1, 1, 0.0, 2.0, 3.0), Served("a", 1, 1, 0.0, 8.0, 9.0), Served("b", 1, 1, 0.0, None, None)]
    assert ttft_mean_s(requests) == {"a": 5.0}
    assert ttft_mean_s(requests, 5.0, 10.0) == {"a": 8.0}


def test_equal_service_has_no_discrepancy_and_one_who_gets_nothing_lacks_all_he_asked_for() -> None:
    equal = [one(client, 5.0 * i, 5.0 * i + 5.0) for i in range(140) for client in "ab"]
    assert discrepancy(equal).max == pytest.approx(0.0)
    # a receives 300 every 5 s and asked for it; b asked for the same and gets it after the ten minutes.
    starved = [each for each in equal if each.client == "a"]
    starved += [Served("b", 100, 100, 5.0 * i, 1000.0, 1001.0) for i in range(140)]
    assert discrepancy(starved).avg == pytest.approx(60.0)
    # One who asks for little lacks no more than that.
    modest = [each for each in equal if each.client == "a"]
    modest += [Served("b", 10, 10, 5.0 * i + 0.25, 1000.0, 1001.0) for i in range(140)]
    assert discrepancy(modest).avg == pytest.approx(6.0)


def test_what_arrives_at_either_end_of_the_minute_is_asked_for() -> None:
    """Ticks are 28.5 s apart: whoever comes at 28.5 and 88.5 s asks for both in the minute between the two."""
    requests = [Served("rich", 10_000, 0, 0.0, 0.0, 600.0)]
    requests += [Served("poor", 300, 0, arrived_s, 900.0, 901.0) for arrived_s in (28.5, 88.5)]
    # What the poor one lacks: 2 * 300 over 60 s at the first tick; at 57 and 85.5 s only the second one is asked for.
    assert discrepancy(requests).max == pytest.approx(10.0)


def test_the_gap_accumulates() -> None:
    requests = [one("a", 0.0, 100.0), one("b", 0.0, 100.0, tokens=50)]
    assert accumulated_gap(requests, end_s=100.0, step_s=50.0) == [(50.0, 75.0), (100.0, 150.0)]


def test_the_exact_gap_counts_only_while_both_wait() -> None:
    def record(client: str, arrived_s: float, dispatched_s: float, tokens: list[float]) -> Record:
        return Record(Arrival(client, Flow(client), arrived_s, 10, len(tokens)), dispatched_s, tokens)

    alone = [record("a", 0.0, 1.0, [2.0, 3.0]), record("b", 5.0, 6.0, [7.0])]
    assert backlogged_gap(alone) == 0.0
    # From 0 to 4 both have one waiting; a's other request brings it 10 for the prompt and 2 for each token until then.
    both = [record("a", 0.0, 1.0, [2.0, 3.0, 5.0]), record("a", 0.0, 4.0, [6.0]), record("b", 0.0, 9.0, [10.0])]
    assert backlogged_gap(both) == 24.0


@pytest.mark.skipif(not RUNS.exists(), reason=f"needs the recorded runs of the VTC artifact: {RUNS.name}")
@pytest.mark.parametrize(("name", "run", "cost", "printed"), RECORDED, ids=[cell[0] for cell in RECORDED])
def test_recorded_runs_give_the_printed_cells(
    name: str, run: int, cost: str, printed: tuple[float, float, float]
) -> None:
    [recorded] = [each for each in read_runs(RUNS) if each.run == str(run)]
    assert recorded_row(name, measures(recorded), cost, printed).verdict == "met"


@pytest.mark.skipif(not RUNS.exists(), reason=f"needs the recorded runs of the VTC artifact: {RUNS.name}")
def test_recorded_throughput_is_that_of_the_tables() -> None:
    rates = {run.run: measures(run).throughput for run in read_runs(RUNS)}
    printed = {"31": 777, "9": 779, "12": 781, "34": 340, "37": 694, "28": 876, "6": 893, "11": 895}
    assert {run: round(rates[run]) for run in printed} == printed
