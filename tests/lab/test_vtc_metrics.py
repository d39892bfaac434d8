"""The measures of VTC: by hand on small runs, and to the printed digits on the authors' own records."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.vtc.fairness import (
    Served,
    backlogged_gap,
    discrepancy,
)
from lab.vtc.paper_tables import RECORDED, recorded_row
from lab.vtc.recorded import measures, read_runs
from policies.request import Flow
from simulation.run import Arrival, Record

RUNS = Path(__file__).parents[3] / "shared" / "traces" / "vtc_artifact_runs.csv.gz"


def one(client: str, begin_s: float, end_s: float, tokens: int = 100) -> Served:
    return Served(client, tokens, tokens, begin_s, begin_s, end_s)


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
