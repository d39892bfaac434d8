"""The papers' experiments as regression tests, and the command and charts that show them."""

from __future__ import annotations

import json
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.simulated.engine_profiles import profile
from lab.all_experiments import EXPERIMENTS
from lab.command import reproduce
from lab.experiment import Findings, Inputs, Verdict
from lab.vtc import figures, paper_tables
from lab.vtc.fairness import backlogged_gap
from lab.vtc.gateway_window import production
from lab.vtc.in_engine import A10G_LLAMA2_7B, serve_in_engine
from lab.vtc.paper_tables import RECORDED, recorded_row
from lab.vtc.recorded import measures, read_runs
from lab.vtc.runs import arena
from lab.vtc.windows import in_flight, serve_with_rule, starts_now, waiting
from policies.orders.fcfs import Fcfs
from policies.orders.vtc import Vtc
from policies.request import Flow
from simulation.run import Arrival, Record

pytestmark = pytest.mark.interpreted_only("baselines extend what is compiled")

TRACES = Path(__file__).parents[3] / "shared" / "traces"
needs_arena = pytest.mark.skipif(
    not (TRACES / "vtc_arena27_10min.csv.gz").exists(), reason="needs the trace of 27 clients of the VTC artifact"
)
RUNS = TRACES / "vtc_artifact_runs.csv.gz"
needs_runs = pytest.mark.skipif(not RUNS.exists(), reason=f"needs the recorded runs of the VTC artifact: {RUNS.name}")
HEADER = "run,scheduler,suite,client,input_tokens,output_tokens,t_s,ttft_s,e2e_s"


def command(*args: str) -> Result:
    return CliRunner().invoke(reproduce, args)


def missed(outcome: Findings) -> list[str]:
    return [row.measure for row in outcome.rows if row.verdict is Verdict.MISSED]


# --- the experiments ---


@pytest.mark.parametrize("name", ["fig3", "fig4", "fig5", "fig6", "fig7", "fig8", "fig9", "fig10", "weighted"])
def test_figures_hold(name: str, tmp_path: Path) -> None:
    outcome = EXPERIMENTS[name].run(Inputs(tmp_path))
    assert missed(outcome) == []
    assert any(row.verdict is Verdict.MET for row in outcome.rows)


def test_knowing_lengths_narrows_the_gap_of_eight_clients(tmp_path: Path) -> None:
    assert missed(paper_tables.table6(Inputs(tmp_path), 1)) == []


@needs_arena
def test_rate_limits_admit_as_many_as_in_the_artifact() -> None:
    assert missed(paper_tables.rate_limits(Inputs(TRACES))) == []


@needs_arena
def test_table_2_holds() -> None:
    # Two step times are too few to tell the three forms of VTC apart: that row needs the whole sweep.
    assert set(missed(paper_tables.table2(Inputs(TRACES), 2, 2))) <= {paper_tables.NEIGHBOURS}


def test_a_policy_without_its_idea_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "vtc", figures.fcfs)
    assert missed(figures.fig3(Inputs(tmp_path)))
    assert missed(figures.fig9(Inputs(tmp_path)))


# --- the command ---


@needs_arena
def test_the_command_prints_published_ours_and_verdict(tmp_path: Path) -> None:
    result_json, docs = tmp_path / "r.json", tmp_path / "docs"
    result = command("rpm", "fig9", "--traces", str(TRACES), "--json", str(result_json), "--docs", str(docs))
    assert result.exit_code == 0, result.output
    assert "RPM(5), admitted         581     581  581       met" in result.output
    rows = json.loads(result_json.read_text())["rpm"]["rows"]
    row = {"measure": "RPM(10), admitted", "published": 900, "ours": 900, "required": "900", "verdict": "met"}
    assert row in rows
    page = (docs / "reproduction.md").read_text()
    assert '"RPM(30), admitted",1324,' in (docs / "reproduction" / "rpm.csv").read_text()
    for line in page.splitlines():
        if line.startswith("!["):
            ElementTree.parse(docs / line.partition("](")[2].rstrip(")"))
    assert "figures/fig9-ttft.svg" in page


# --- measures of recorded runs ---


def test_measures_of_a_small_table(tmp_path: Path) -> None:
    """a receives 5 tokens of input and 5 of output every second, b asks for as much and gets it after ten minutes."""
    lines = [f"7,X,made,a,5,5,{i},0,1" for i in range(700)]
    lines += [f"7,X,made,b,5,5,{i},{1000 - i},1001" for i in range(700)]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([HEADER, *lines, "8,Y,made,a,10,20,0,1,2", "8,Y,made,a,10,20,0,-1,-1", ""]))
    (tmp_path / "runs.meta.json").write_text('[{"run": 8, "total_time_s": 10.0, "suite": "made"}]')
    out = tmp_path / "out.json"
    result = command("metrics", str(path), "--json", str(out))
    assert result.exit_code == 0, result.output
    seven, eight = json.loads(out.read_text())
    assert (seven["run"], seven["max_diff"], seven["avg_diff"]) == (7, pytest.approx(15.0), pytest.approx(15.0))
    assert seven["diff_var"] == pytest.approx(0.0)
    assert seven["throughput"] == pytest.approx(1400 * 10 / 1700), "without metadata, until the last answer"
    assert (eight["throughput"], eight["admitted"], eight["requests"]) == (3.0, 1, 2)
    assert "avg_diff" in result.output
    assert "15.00" in result.output


# --- the gateway ---


@needs_arena
def test_the_gateway_is_nearly_as_fair_as_a_scheduler_in_the_engine() -> None:
    """The whole curve is `python -m lab gateway-window`; here, that the production engine has its place on it."""
    from backends.simulated.engine_profiles import profile

    point = production(arena(Inputs(TRACES)), profile("a10g-llama2-7b"))
    assert point.gap < 1.1 * 252, "arrival order has 440"
    assert point.tokens_per_s > 0.98 * 764


# --- to the printed digits on the records of the authors ---


def test_the_exact_gap_counts_only_while_both_wait() -> None:
    def record(client: str, arrived_s: float, dispatched_s: float, tokens: list[float]) -> Record:
        return Record(Arrival(client, Flow(client), arrived_s, 10, len(tokens)), dispatched_s, tokens)

    alone = [record("a", 0.0, 1.0, [2.0, 3.0]), record("b", 5.0, 6.0, [7.0])]
    assert backlogged_gap(alone) == 0.0
    # From 0 to 4 both have one waiting; a's other request brings it 10 for the prompt and 2 for each token until then.
    both = [record("a", 0.0, 1.0, [2.0, 3.0, 5.0]), record("a", 0.0, 4.0, [6.0]), record("b", 0.0, 9.0, [10.0])]
    assert backlogged_gap(both) == 24.0


@needs_runs
@pytest.mark.parametrize(("name", "run", "cost", "printed"), RECORDED, ids=[cell[0] for cell in RECORDED])
def test_recorded_runs_give_the_printed_cells(
    name: str, run: int, cost: str, printed: tuple[float, float, float]
) -> None:
    [recorded] = [each for each in read_runs(RUNS) if each.run == str(run)]
    assert recorded_row(name, measures(recorded), cost, printed).verdict == "met"


@needs_runs
def test_recorded_throughput_is_that_of_the_tables() -> None:
    rates = {run.run: measures(run).throughput for run in read_runs(RUNS)}
    printed = {"31": 777, "9": 779, "12": 781, "34": 340, "37": 694, "28": 876, "6": 893, "11": 895}
    assert {run: round(rates[run]) for run in printed} == printed


# --- the engine loop of the papers, and simple windows before a vLLM ---


LOOP = A10G_LLAMA2_7B


def arrival(number: int, prompt: int, output: int, *, at_s: float = 0.0, client: str = "a") -> Arrival:
    return Arrival(f"{number:03}", Flow(client), at_s, prompt, output)


def held_tokens(records: list[Record], time: float) -> int:
    """KV tokens at this time: prompts of those that run, and what they have said."""
    return sum(
        record.arrival.prompt_tokens + sum(token <= time for token in record.token_s)
        for record in records
        if record.token_s[0] <= time < record.token_s[-1]
    )


def test_memory_is_never_exceeded_and_nothing_is_preempted() -> None:
    arrivals = [arrival(i, 40 + 97 * i % 500, 20 + 61 * i % 400, client="abc"[i % 3]) for i in range(60)]
    run = serve_in_engine(arrivals, Fcfs())
    records = list(run.records.values())
    assert {record.outcome for record in records} == {"completed"}
    times = sorted({record.token_s[0] for record in records})
    held = [held_tokens(records, time) for time in times]
    assert max(held) <= LOOP.kv_tokens - 32
    assert max(held) > 0.7 * LOOP.kv_tokens, "there was something to exceed"


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 600), st.integers(1, 300), st.floats(0, 20)), max_size=40)
)
def test_every_request_gets_all_its_tokens_in_order(requests: list[tuple[str, int, int, float]]) -> None:
    requests.sort(key=lambda one: one[3])
    arrivals = [arrival(i, p, q, at_s=t, client=c) for i, (c, p, q, t) in enumerate(requests)]
    run = serve_in_engine(arrivals, Vtc())
    for record in run.records.values():
        assert record.dispatched_s is not None
        assert len(record.token_s) == record.arrival.output_tokens
        assert record.arrival.arrived_s <= record.dispatched_s < record.token_s[0]
        assert all(earlier < later for earlier, later in pairwise(record.token_s))


# --- a gateway with a simple rule before a vLLM ---

TINY = profile("tiny-cpu")


def burst(requests: int) -> list[Arrival]:
    return [arrival(i, 200, 100, client="ab"[i % 2]) for i in range(requests)]


def in_flight_max(records: list[Record]) -> int:
    starts = sorted(record.dispatched_s or 0.0 for record in records)
    ends = sorted(record.finished_s or 0.0 for record in records)
    return max(bisect_right(starts, start) - bisect_right(ends, start) for start in starts)


def test_a_rule_holds_back_what_is_beyond_it() -> None:
    ruled = serve_with_rule(burst(60), Vtc(), TINY, in_flight(7))
    assert {record.outcome for record in ruled.records.values()} == {"completed"}
    assert in_flight_max(list(ruled.records.values())) == 7
    at_once = serve_with_rule(burst(60), Vtc(), TINY, starts_now)
    assert at_once.waiting_max <= sum(record.preemptions for record in at_once.records.values())
    assert in_flight_max(list(at_once.records.values())) > 7
    short = [arrival(i, 20, 30) for i in range(100)]
    assert serve_with_rule(short, Vtc(), TINY, waiting(3)).waiting_max <= 4
    assert serve_with_rule(short, Vtc(), TINY, in_flight(1000)).waiting_max > 50
