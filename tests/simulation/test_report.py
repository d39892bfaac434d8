"""`fairgate replay` as an operator types it: the sentence on top, tables, JSON, words for faults, logs of others."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from backends.simulated.engine_profiles import profile
from gateway.commands.main import main
from lab import public_traces
from simulation.measured import measured
from simulation.replay import OTHERS, ReplayResult, TenantResult, replay_under
from simulation.report import ReplayReport, as_json, as_text
from simulation.statistics import jain, percentile, quantiles
from simulation.traces.reader import Trace
from simulation.verdict import named, runs_to_compare, verdict
from tests.commands import FAIRGATE
from tests.kit.access_logs import write
from tests.postgres_server import PostgresServer, program
from tests.simulation.example_log import EXAMPLE
from tests.waiting import WAIT_S

OPTIONS = ("--limit", "215", "--policy", "fcfs,vtc")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["replay", *map(str, arguments)])


@pytest.fixture(scope="module")
def replayed() -> ReplayReport:
    trace = Trace(EXAMPLE, limit=215)
    engine = measured(trace.entries())
    assert engine is not None
    runs = [replay_under(policy, trace, engine.profile) for policy in ("fcfs", "vtc")]
    return ReplayReport(trace, engine.profile, runs, [engine.why])


def test_an_access_log_goes_in_as_it_is_and_tables_and_json_come_out(tmp_path: Path, replayed: ReplayReport) -> None:
    done = run(EXAMPLE, *OPTIONS, "--json", tmp_path / "numbers.json")
    assert (done.exit_code, done.stderr) == (0, ""), "no progress bar where nobody looks"
    assert done.stdout == as_text(replayed)
    assert (tmp_path / "numbers.json").read_text() == as_json(replayed)
    text = gzip.decompress(EXAMPLE.read_bytes())
    piped = subprocess.run([FAIRGATE, "replay", "-", *OPTIONS], input=text, capture_output=True, timeout=WAIT_S)
    assert (piped.returncode, piped.stderr) == (0, b"")
    assert piped.stdout.decode() == done.stdout.replace("access.log.gz", "stdin")


def test_the_picture_has_a_panel_for_each_policy_and_a_line_for_each_tenant(tmp_path: Path) -> None:
    done = run(EXAMPLE, *OPTIONS, "--picture", tmp_path / "replay.svg")
    assert (done.exit_code, done.stderr) == (0, "")
    drawn = (tmp_path / "replay.svg").read_text()
    for name in ("fcfs", "vtc", "agents", "batch", "people", "Gap between tenants"):
        assert f"<!-- {name} -->" in drawn
    done = run(EXAMPLE, "--limit", "9", "--policy", "fcfs", "--picture", tmp_path / "replay.doc")
    assert done.exit_code == 2
    assert "replay.doc cannot be written" in done.stderr


def test_the_tables_have_what_was_seen_below_what_came_of_it(replayed: ReplayReport) -> None:
    text = as_text(replayed)
    assert text.startswith(
        f"{verdict(replayed.results)}\n\n"
        "access.log.gz: 215 requests of 3 tenants in 20.6 s (fairgate format), before 1 simulated engine like "
    )
    for each in replayed.results:
        assert each.ttft_s is not None
        assert re.search(rf"^{each.policy} +215 +215 +0 .* {each.gap_max:,.0f} ", text, re.MULTILINE)
        assert len(re.findall(rf"^(?:batch|people|agents) +1 +{each.policy} ", text, re.MULTILINE)) == 3


def test_json_has_every_number(replayed: ReplayReport) -> None:
    document = json.loads(as_json(replayed))
    assert document["verdict"]["text"] == verdict(replayed.results)
    assert document["engines"] == {"backends": [1], "profile": "h100-llama3.1-8b"}
    assert document["trace"]["requests"] == 215
    assert [each["policy"] for each in document["policies"]] == ["fcfs", "vtc"]
    for found, results in zip(document["policies"], replayed.results, strict=True):
        assert found["ttft_s"] == results.ttft_s
        assert set(found["ttft_s"]) == {"p50", "p95", "p99"}
        assert {each["name"] for each in found["tenants"]} == set(found["service"]) == {"batch", "people", "agents"}
        assert [tuple(point) for point in found["gap"]] == list(results.gap)


def test_who_gains_most_is_in_the_table_among_many_tenants(tmp_path: Path) -> None:
    """Twelve tenants flood two slots, and one that asks for little comes among them."""
    rows = [f"{n / 100},t{n % 12},200,40" for n in range(240)] + ["2.41,rare,20,2", "2.42,rare,20,2"]
    engine = replace(profile("demo"), max_num_seqs=2)
    trace = Trace(write(tmp_path, "t_s,tenant,input_tokens,output_tokens", *rows))
    many = ReplayReport(trace, engine, [replay_under(policy, trace, engine) for policy in ("fcfs", "vtc")])
    document = json.loads(as_json(many))
    assert document["verdict"]["gains_most"] == "rare"
    assert len(document["policies"][0]["tenants"]) == 13
    text = as_text(many)
    assert text.startswith("`rare` gains most: under `fcfs`, one request in two waited ")
    assert len(re.findall(r"^rare +1 +vtc +2 ", text, re.MULTILINE)) == 1
    assert "Note: 4 more tenants not shown: --json has all" in text


def test_runs_before_several_numbers_of_engines_are_told_apart(replayed: ReplayReport) -> None:
    more = replace(replayed, results=[*replayed.results, replace(replayed.results[1], backends=2)])
    text = as_text(more)
    assert "before 1 and 2 simulated engines like h100-llama3.1-8b" in text
    assert re.findall(r"^(\w+, \d engines?) ", text, re.MULTILINE) == [
        "fcfs, 1 engine", "vtc, 1 engine", "vtc, 2 engines",
    ]  # fmt: skip
    assert len(re.findall(r"^batch +1 +vtc, 2 engines ", text, re.MULTILINE)) == 1
    assert json.loads(as_json(more))["verdict"]["compared"] == [
        {"policy": "vtc", "backends": 1}, {"policy": "vtc", "backends": 2},
    ]  # fmt: skip


def seen_by(policy: str, **fields: object) -> ReplayResult:
    ttft_s = {"p50": 0.1234, "p95": 5.678, "p99": 90.12}
    tenant = TenantResult("a", 2.0, 10, 7, 1234.0, ttft_s)
    base = ReplayResult(
        policy, 2, 10, 7, {"queue_full": 3}, ttft_s, 100.0, 50.0, None, 0.0, 1, 2, 9.0, [tenant], {"a": []}, []
    )
    return replace(base, **fields)  # type: ignore[arg-type]


def test_what_the_operator_should_know_is_said(tmp_path: Path) -> None:
    lines = ("Timestamp,Request tokens,Response tokens", "0,10,5", "1,10,0", "2,0,5")
    trace = Trace(write(tmp_path, *lines), row=public_traces.BurstGpt)
    engine = profile("demo")
    text = as_text(ReplayReport(trace, engine, [seen_by("vtc", refused={"context_length_exceeded": 1})]))
    assert "1 line skipped" in text
    assert "left out" not in text
    assert "1 request had no answer in the trace" in text
    assert "1 request refused as longer than the context of demo (4,096 tokens)" in text
    assert "The trace has one tenant" in text
    assert "before 2 simulated engines like demo" in text
    assert re.search(r"0.123 +5.68 +90.1 +100 ", text)
    two = Trace(write(tmp_path, "t_s,tenant,input_tokens,output_tokens", "0,a,10,5", "1,b,10,5"))
    assert "No two tenants waited at the same time" in as_text(ReplayReport(two, engine, [seen_by("vtc", queued=1)]))
    assert "Note" not in as_text(ReplayReport(two, engine, [seen_by("vtc", gap_max=1.0, queued=1)]))


@pytest.mark.parametrize("write_it", [as_text, as_json])
def test_a_load_that_never_fills_the_engines_is_said_first(
    tmp_path: Path, write_it: Callable[[ReplayReport], str]
) -> None:
    trace = Trace(write(tmp_path, "t_s,tenant,input_tokens,output_tokens", "0,a,10,5", "1,b,10,5"))
    runs = [replay_under(policy, trace, profile("demo")) for policy in ("fcfs", "vtc")]
    said = "No request had to wait: this load never fills the engines"
    text = write_it(ReplayReport(trace, profile("demo"), runs))
    assert said in text
    assert text.startswith(f"Warning: {said}") == (write_it is as_text)
    assert said not in write_it(ReplayReport(trace, profile("demo"), [runs[0], replace(runs[1], queued=1)]))


def test_percentiles_are_values_that_were_seen_and_equal_shares_of_nothing_are_fair() -> None:
    assert quantiles([], 50) is None
    assert [percentile([4.0, 1.0, 3.0, 2.0], share) for share in (0.0, 0.9)] == [1.0, 4.0]
    assert (jain([0.0, 0.0]), jain([0.0, 0.0, 5.0, 0.0])) == (1.0, 0.25)
    assert quantiles([3.0, 1.0, 2.0], 50, 95, 99) == {"p50": 2.0, "p95": 3.0, "p99": 3.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((EXAMPLE, "--policy", "fcfs,best"), "no policy is named 'best'; there are: "),
        ((EXAMPLE, "--policy", ""), "no policy is named ''; there are: "),
        ((EXAMPLE, "--profile", "gpu"), "no engine profile is named 'gpu'; there are: "),
        ((EXAMPLE, "--speed", "0"), "must be a number above 0"),
        ((EXAMPLE, "--speed", "nan"), "must be a number above 0"),
        ((EXAMPLE, "--backends", "0"), "0 is not in the range 1<=x<=1024"),
        ((EXAMPLE, "--limit", "0"), "0 is not in the range"),
        ((EXAMPLE, "--backends", "many"), "'many' is not a valid integer range"),
        ((EXAMPLE, "--pool", "main"), "--pool NAME needs -c FILE"),
        ((EXAMPLE, "-c", "/nowhere/gateway.yaml"), "/nowhere/gateway.yaml: cannot be read: No such file"),
        ((EXAMPLE, "--json", "/nowhere/x.json"), "No such file or directory: '/nowhere/x.json'"),
        (("/nowhere/access.log",), "'/nowhere/access.log' does not exist"),
        ((Path(json.__file__),), "__init__.py:21: column 'tenant': missing here (format fairgate needs tenant, "),
    ],
)
def test_bad_input_is_named_and_ends_with_2(arguments: tuple[str | Path, ...], message: str) -> None:
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in " ".join(done.stderr.split())


def test_the_documentation_shows_what_the_command_prints() -> None:
    page = (EXAMPLE.parents[1] / "replay.md").read_text()
    [(arguments, output)] = re.findall(
        r"```sh\nfairgate replay (docs/examples/[^\n]*)\n```\n\n```\n(.*?)```\n", page, re.DOTALL
    )
    assert run(*arguments.split()).stdout == output, "run: python -m docs.generate.replayed"


# --- the sentence on top says what the numbers say, and of those whom it concerns ---


def of_tenant(name: str, p95_s: float | None, *, requests: int = 100, completed: int | None = None) -> TenantResult:
    ttft_s = None if p95_s is None else {"p50": p95_s / 2, "p95": p95_s, "p99": p95_s}
    return TenantResult(name, 1.0, requests, requests if completed is None else completed, 1.0, ttft_s)


def seen_of(policy: str, *tenants: TenantResult, backends: int = 1) -> ReplayResult:
    return ReplayResult(policy, backends, 1, 1, {}, None, 1.0, 1.0, None, 0.0, 0, 0, 1.0, tenants, {}, [])


def test_it_names_who_gains_most_and_who_pays() -> None:
    unfair = seen_of("fcfs", of_tenant("heavy", 14.0), of_tenant("light", 12.0), of_tenant("lighter", 11.0))
    fair = seen_of("fairserve", of_tenant("heavy", 14.5), of_tenant("light", 0.3), of_tenant("lighter", 3.0))
    assert verdict([unfair, seen_of("vtc"), fair]) == (
        "`light` gains most: under `fcfs`, one request in twenty waited 12.0 s or longer for its first token, under "
        "`fairserve` 0.300 s. Nobody pays."
    )
    assert named([unfair, fair]) == ("light", "")
    unfair = seen_of("fcfs", of_tenant("heavy", 14.0), of_tenant("light", 12.0), of_tenant("flood", 2.0))
    fair = seen_of("vtc", of_tenant("heavy", 15.0), of_tenant("light", 0.3), of_tenant("flood", 9.0))
    assert verdict([unfair, fair]).endswith(
        "`flood` pays most: under `fcfs`, one request in twenty waited 2.00 s or longer for its first token, under "
        "`vtc` 9.00 s."
    )
    assert (named([unfair, fair]), named([fair, unfair])) == (("light", "flood"), ("flood", "light"))
    worse = seen_of("vtc", of_tenant("heavy", 14.0), of_tenant("light", 12.0), of_tenant("flood", 3.0))
    assert verdict([unfair, worse]) == (
        "Nobody gains. `flood` pays most: under `fcfs`, one request in twenty waited 2.00 s or longer for its first "
        "token, under `vtc` 3.00 s."
    )


def test_refusals_are_no_short_waits() -> None:
    one = seen_of("fcfs", of_tenant("heavy", 9.0), of_tenant("light", 5.0))
    other = seen_of("vtc", of_tenant("heavy", 0.5, completed=10), of_tenant("light", 2.0))
    paid = "`heavy` pays most: under `fcfs`, one request in twenty waited 9.00 s or longer for its first token, under "
    assert verdict([one, other]).endswith(paid + "`vtc` 0.500 s (90 of 100 refused).")
    never = seen_of("vtc", of_tenant("heavy", None, completed=0), of_tenant("light", 5.0))
    assert "under `vtc` for ever (100 of 100 refused)" in verdict([one, never])
    assert "waited for ever for its first token (100 of 100 refused), under `fcfs` 9.00 s." in verdict([never, one])
    same = seen_of("vtc", of_tenant("heavy", 9.0, completed=90), of_tenant("light", 5.0))
    assert "9.00 s (10 of 100 refused)" in verdict([one, same])


def test_waits_that_are_alike_are_said_to_be() -> None:
    one, other = (
        seen_of(policy, of_tenant("a", 0.05), of_tenant("b", wait_s))
        for policy, wait_s in (("fcfs", 0.14), ("vtc", 0.1))
    )
    assert verdict([one, other]) == (
        "Under `fcfs`, everybody waited about as long as under `vtc`: `b` waited longest for its first tokens, one "
        "request in twenty 0.140 s or more."
    )
    assert verdict([one]) == (
        "Under `fcfs`, `b` waited longest for its first tokens, one request in twenty 0.140 s or more."
    )


def test_tenants_of_few_requests_are_named_by_their_median_and_sums_of_many_are_not() -> None:
    heavy, others = of_tenant("heavy", 9.0), of_tenant(OTHERS, 99.0)
    for name, requests, shown, waited in (
        ("rare", 3, "rare", "one request in two waited 4.50 s or longer for its first token, under `vtc` 0.100 s."),
        ("rare", 1, "rare", "its one request waited 4.50 s for its first token, under `vtc` 0.100 s."),
        ("n" * 900, 3, "n" * 31 + "…", "one request in two waited 4.50 s or longer"),
    ):
        before = seen_of("fcfs", heavy, of_tenant(name, 9.0, requests=requests), of_tenant("light", 2.0), others)
        after = seen_of(
            "vtc", heavy, of_tenant(name, 0.2, requests=requests), of_tenant("light", 1.0), of_tenant(OTHERS, 1.0)
        )
        assert verdict([before, after]).startswith(f"`{shown}` gains most: under `fcfs`, {waited}")


def test_engines_are_compared_under_the_last_policy() -> None:
    runs = [seen_of(policy, of_tenant("a", 8.0 / engines / (1 + (policy == "vtc"))), backends=engines)
            for engines in (2, 3, 4) for policy in ("fcfs", "vtc")]  # fmt: skip
    one, other = runs_to_compare(runs)
    assert (one.policy, one.backends, other.policy, other.backends) == ("vtc", 2, "vtc", 4)
    assert verdict(runs) == (
        "`a` gains most: with 2 engines under `vtc`, one request in twenty waited 2.00 s or longer for its first "
        "token, with 4 engines 1.00 s. Nobody pays."
    )


PAGE = (Path(__file__).parents[2] / "docs/replay.md").read_text()
TABLE = """\
CREATE TABLE "LiteLLM_SpendLogs" (request_id text PRIMARY KEY, api_key text NOT NULL DEFAULT '',
  prompt_tokens int NOT NULL DEFAULT 0, completion_tokens int NOT NULL DEFAULT 0, "startTime" timestamp NOT NULL,
  "user" text DEFAULT '', team_id text);
INSERT INTO "LiteLLM_SpendLogs" SELECT n::text, 'key', 100, 20, now() AT TIME ZONE 'UTC' - n * interval '1 s', '',
  CASE WHEN n % 3 = 0 THEN 'search' ELSE 'chat' END FROM generate_series(1, 9) AS n;
"""
"""The columns of LiteLLM's schema that matter here, by its types."""


def shown(beginning: str) -> str:
    """The command of the page that begins so."""
    [found] = re.findall(rf"^```sh\n({re.escape(beginning)}.*?)^```$", PAGE, re.M | re.S)
    return str(found)


def shell(command: str, where: Path, **variables: str) -> str:
    path = f"{Path(FAIRGATE).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=where,
        env={**os.environ, "PATH": path, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def span(number: int, name: str, **counts: int) -> dict[str, object]:
    attributes = [{"key": f"gen_ai.usage.{key}", "value": {"intValue": str(value)}} for key, value in counts.items()]
    attributes.append({"key": "gen_ai.request.id", "value": {"stringValue": f"cmpl-{number}"}})
    return {
        "name": name,
        "startTimeUnixNano": str(1_790_000_000_000_000_000 - number * 10**9),
        "attributes": attributes,
    }


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_spans_of_vllm_are_replayed(tmp_path: Path) -> None:
    spans = [span(n, "llm_request", prompt_tokens=100, completion_tokens=20) for n in range(4)] + [span(9, "other")]
    lines = [{"resourceSpans": [{"scopeSpans": [{"spans": spans[at : at + 2]}]}]} for at in (0, 2, 4)]
    (tmp_path / "traces.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = shell(shown("(echo t_s"), tmp_path)
    assert "4 requests of 1 tenant in 3.0 s (csv format)" in out


async def test_the_database_of_litellm_is_replayed(tmp_path: Path) -> None:
    async with PostgresServer() as server:
        await asyncio.to_thread(
            shell, f"{program('psql')} \"$DATABASE_URL\" <<'END'\n{TABLE}END", tmp_path, DATABASE_URL=server.url
        )
        out = await asyncio.to_thread(shell, shown("psql"), tmp_path, DATABASE_URL=server.url)
    assert "9 requests of 2 tenants in 8.0 s (csv format)" in out
