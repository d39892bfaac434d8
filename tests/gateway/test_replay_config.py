"""`fairgate replay`: of the operator's own policy, weights, limits and engines, and of the gateway's own log."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from backends.simulated.engine_profiles import profile
from gateway.commands.main import main
from gateway.config.sections.keys import open_name
from simulation.replay import replay_under
from simulation.traces.reader import Trace
from tests.gateway.live import Starter, chat, simulated, until
from tests.kit.access_logs import logged, write
from tests.waiting import WAIT_S

BASE = """
policy: {name: vtc}
pools:
  - name: main
    backends: [{url: "http://10.0.0.1:8000"}]
tenants: [{name: heavy}, {name: light, weight: 4}]
"""
ENTRY: dict[str, Any] = {
    "app": "default", "interaction": "", "tokens_cached": 0, "total_ms": 0, "tokens_out_max": 500,
}  # fmt: skip


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """One tenant asks for far more than an engine has within a second, the other now and then."""
    lines = [logged(ts=1000 + n / 100, tenant="heavy", tokens_in=300, tokens_out=100, **ENTRY) for n in range(100)]
    lines += [logged(ts=1000 + n / 10, tenant="light", tokens_in=60, tokens_out=20, **ENTRY) for n in range(20)]
    return write(tmp_path, *lines)


def replay(log: Path, config: str, *options: str, code: int = 0) -> tuple[str, dict[str, Any]]:
    """What it prints, and the numbers."""
    file, numbers = log.with_name("gateway.yaml"), log.with_name("numbers.json")
    file.write_text(config)
    numbers.unlink(missing_ok=True)
    done = CliRunner().invoke(
        main, ["replay", str(log), "-c", str(file), "--profile", "demo", "--json", str(numbers), *options]
    )
    assert done.exit_code == code, done.output
    return done.output, json.loads(numbers.read_text()) if numbers.exists() else {}


def runs(numbers: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(each["policy"], each["backends"]): each for each in numbers["policies"]}


def tenants(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in run["tenants"]}


def test_the_policy_weights_and_number_of_engines_are_those_of_the_file(log: Path) -> None:
    output, numbers = replay(log, BASE)
    assert list(runs(numbers)) == [("fcfs", 1), ("vtc", 1)]
    assert {name: each["weight"] for name, each in tenants(numbers["policies"][0]).items()} == {"heavy": 1, "light": 4}
    assert output.startswith("`light` gains most: under `fcfs`, one request in twenty waited ")
    assert "Note: Limits, weights and settings are those of gateway.yaml, pool main." in output
    assert "Not among the tenants" not in output
    fcfs = BASE.replace("{name: vtc}", "fcfs")
    two = fcfs.replace('8000"}', '8000"}, {url: "http://10.0.0.2:8000"}')
    assert list(runs(replay(log, two)[1])) == [("fcfs", 2), ("fairserve", 2)]
    assert list(runs(replay(log, two, "--policy", "rr")[1])) == [("rr", 2)]


def test_settings_of_the_policy_and_of_the_engine_are_those_of_the_file(log: Path) -> None:
    turns = BASE.replace("{name: vtc}", "{name: rr, quantum: 1.0e+9}")
    in_long, in_short = (runs(replay(log, text, "--policy", "rr")[1])["rr", 1] for text in (turns, BASE))
    assert tenants(in_long)["light"]["ttft_s"]["p95"] > tenants(in_short)["light"]["ttft_s"]["p95"]
    few = BASE.replace('8000"}', '8000", max_num_seqs: 2}')
    usual, few_at_once = (runs(replay(log, config)[1])["vtc", 1] for config in (BASE, few))
    assert few_at_once["tokens_per_s"] < usual["tokens_per_s"] / 2


def test_weights_decide_between_two_that_both_wait(tmp_path: Path) -> None:
    entry = ENTRY | {"tokens_in": 300, "tokens_out": 100}
    log = write(tmp_path, *(logged(ts=1000 + n / 100, tenant="ab"[n % 2], **entry) for n in range(200)))
    config = BASE.replace("heavy}, {name: light, weight: 4", "a}, {name: b, weight: %s")
    seen = (tenants(runs(replay(log, config % weight)[1])["vtc", 1]) for weight in (1, 4))
    p50 = [{name: each["ttft_s"]["p50"] for name, each in one.items()} for one in seen]
    assert p50[0]["a"] == pytest.approx(p50[0]["b"], rel=0.1)
    assert p50[1]["a"] > 1.5 * p50[1]["b"]


def test_limits_of_the_file_refuse_as_the_gateway_does(log: Path) -> None:
    assert runs(replay(log, BASE)[1])["vtc", 1]["refused"] == {}
    brief = runs(replay(log, BASE + "limits: {queue_wait_s_max: 1}\n")[1])["vtc", 1]
    assert brief["refused"]["queue_timeout"] > 20
    quota = BASE.replace("{name: heavy}", "{name: heavy, quota: {requests_per_minute: 30}}")
    output, numbers = replay(log, quota)
    for run in numbers["policies"]:
        assert (tenants(run)["heavy"]["completed"], tenants(run)["light"]["completed"]) == (30, 20)
    assert re.search(r"^vtc +\w+ +70$", output, re.MULTILINE)


def test_what_another_engine_would_bring(log: Path) -> None:
    output, numbers = replay(log, BASE, "--backends", "2", "--policy", "vtc")
    assert list(runs(numbers)) == [("vtc", 1), ("vtc", 2)]
    one, two = (tenants(each)["heavy"]["ttft_s"]["p95"] for each in numbers["policies"])
    assert two < one / 1.5
    assert output.startswith("`heavy` gains most: with 1 engine under `vtc`, one request in twenty waited ")
    assert list(runs(replay(log, BASE, "--backends", "2", "--backends", "4")[1])) == [
        ("fcfs", 2),
        ("vtc", 2),
        ("fcfs", 4),
        ("vtc", 4),
    ]


def test_tenants_that_the_file_does_not_know_are_named(log: Path) -> None:
    output, numbers = replay(log, BASE.replace("name: heavy", "name: havy"))
    assert "Note: Not among the tenants of gateway.yaml: heavy. They keep the weight that the trace gives." in output
    assert tenants(numbers["policies"][0])["heavy"]["weight"] == 2, "as the log says"
    everybody = BASE.partition("tenants")[0] + "open_access: true\n"
    assert "Not among the tenants" not in replay(log, everybody)[0]


def test_of_several_pools_one_is_named(log: Path) -> None:
    two = BASE.replace("pools:", "pools:\n  - name: other\n    models: [m]\n    backends: "
                       "[{url: \"http://10.0.0.3:8000\"}, {url: \"http://10.0.0.4:8000\"}]")  # fmt: skip
    output, _ = replay(log, two, code=2)
    assert "has the pools other, main: say by --pool which one served this traffic" in output
    output, _ = replay(log, two, "--pool", "third", code=2)
    assert "has the pools other, main: none is 'third'" in output
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines, *[line.replace('"model": "m"', '"model": "other"') for line in lines[:7]]]))
    output, numbers = replay(log, two, "--pool", "other")
    assert list(runs(numbers)) == [("fcfs", 2), ("vtc", 2)]
    assert numbers["trace"]["requests"] == 120
    assert "Note: 7 lines left out: requests for models that another pool serves." in output


def test_a_file_that_is_no_configuration_is_answered_with_its_faults(log: Path) -> None:
    output, numbers = replay(log, "policy: best\npools: 3\n", code=2)
    assert "gateway.yaml:1:9: policy" in output
    assert "gateway.yaml:2:8: pools: should be a list" in output
    assert numbers == {}


# --- the log of a gateway goes into a replay as it is ---


async def test_the_access_log_of_a_gateway_goes_into_a_replay_as_it_is(start: Starter) -> None:
    tenants = [{"name": "light", "weight": 3.0}, {"name": "heavy"}]
    async with simulated() as sim, start(sim.url, tenants=tenants) as live:
        keys = live.gateway.minted_keys
        body = {"max_tokens": 12, "ignore_eos": True, "user": "somebody"}
        asked = [("heavy", chat("x" * 400, stream=number % 2 == 0, **body)) for number in range(20)]
        asked.append(("light", chat("x" * 40, **body)))
        asked.append(("light", chat("x" * 40, n=0)))  # refused unseen
        await asyncio.gather(*(live.ask("/v1/chat/completions", what, key=keys[who]) for who, what in asked))
        lines = await live.lines(len(asked))
    trace = Trace(live.log)
    assert (trace.format, trace.requests, trace.skipped, trace.assumed) == ("fairgate", 21, 1, 0)
    assert trace.weights == {"light": 3.0, "heavy": 1.0}
    arrivals = list(trace.arrivals(16))
    assert [each.arrived_s for each in arrivals] == sorted(each.arrived_s for each in arrivals)
    assert arrivals[-1].arrived_s < WAIT_S
    assert {(each.output_tokens, each.output_tokens_max) for each in arrivals} == {(12, 12)}
    assert len({each.flow.user for each in arrivals}) == 1
    assert sorted(each.prompt_tokens for each in arrivals) == sorted(
        line["tokens_in"] for line in lines if line["outcome"] == "completed"
    )
    assert sum(each.streamed for each in arrivals) == 10
    seen = replay_under("vtc", trace, profile("tiny-cpu"))
    assert (seen.requests, seen.completed) == (21, 21)
    assert {(each.name, each.weight) for each in seen.tenants} == {("heavy", 1.0), ("light", 3.0)}


async def test_a_replay_of_ones_own_log_shows_the_difference_that_was_there(start: Starter) -> None:
    """Without any option: the engines are those that the log tells of, and one light request is not passed over."""
    demo = profile("demo")
    async with simulated(demo) as one, simulated(demo) as two, start(one.url, two.url, policy="vtc") as live:
        stories = [chat("Tell me a story.", max_tokens=60 + number % 60, ignore_eos=True) for number in range(200)]
        flood = [asyncio.ensure_future(live.ask("/v1/chat/completions", body, key="heavy")) for body in stories]
        await until(lambda: live.engine.queued >= 60)
        assert (await live.ask("/v1/chat/completions", chat("Hello", max_tokens=5), key="light")).status == 200
        assert live.engine.queued, "the flood still waits"
        await asyncio.gather(*flood)
        await live.lines(201)
    done = CliRunner().invoke(main, ["replay", str(live.log), "--policy", "fcfs,vtc"])
    assert done.exit_code == 0, done.output
    light = open_name(hashlib.sha256(b"light").digest())
    found = re.match(
        rf"`{light}` gains most: under `fcfs`, its one request waited (\S+) s for its first token, "
        r"under `vtc` (\S+) s. ",
        done.output,
    )
    assert found is not None, done.output
    assert float(found[1]) > 3 * float(found[2])
    assert "before 2 simulated engines like " in done.output
    assert "Note: The engine is chosen by the log: 201 answers took " in done.output
