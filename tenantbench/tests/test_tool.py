"""The tool is neutral, says what its numbers are worth, and speaks HTTP."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from tenantbench import machine
from tenantbench.__main__ import arguments, run_options
from tenantbench.engine_model import Engine, Profile, Sequence
from tenantbench.engine_server import MODEL, EngineServer
from tenantbench.events import CHARACTERS_PER_TOKEN, read_events
from tenantbench.gateway import FOLDER, KEYS, Gateway, GatewayError, described, process, read, variables_of, version_of
from tenantbench.llama import Tap
from tenantbench.load import Driver, HttpTransport
from tenantbench.machine import CLIENT_CORES, GATEWAY_CORES
from tenantbench.metrics import METRICS, Run, measure, reasons_void
from tenantbench.report import losses, rows_of, text_of
from tenantbench.run import DRAIN_S, drain
from tenantbench.workloads import LENGTHS, Ask, Session, Workload

ROOT = Path(__file__).parents[1]
QUICK = Profile(slots=4, step_s=0.001)
BAD = Ask(QUICK.context_tokens_max, 8, is_bad=True)


def test_it_imports_the_standard_library_and_what_its_project_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *(n for names in project["optional-dependencies"].values() for n in names)]
    allowed = {name.split(">")[0] for name in named} | {"tenantbench", "pytest"} | set(sys.stdlib_module_names)
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {module.split(".")[0] for module in modules} <= allowed, path


@pytest.mark.parametrize("name", described())
def test_each_knob_of_a_gateway_has_a_source(name: str, tmp_path: Path) -> None:
    gateway = read(name)
    for knob in gateway.description.get("knobs", []):
        assert set(knob) == {"name", "why", "source"}
        assert knob["source"].startswith("https://") or name.startswith("fairgate")
    assert set(variables_of(gateway, "http://127.0.0.1:1", tmp_path, 1)) > {"engine", "model"}
    assert set(gateway.keys) == set(KEYS)


def test_a_version_is_the_pinned_one_or_what_the_gateway_says(tmp_path: Path) -> None:
    gateway = Gateway("mine", tmp_path, {"title": "Mine 1.0"}, {})
    assert version_of(gateway) == "Mine 1.0"
    asking = {"title": "Mine", "version": [Path(sys.executable).name, "-c", "print('mine 2.0')"]}
    assert version_of(replace(gateway, description=asking)) == "Mine: mine 2.0"
    with pytest.raises(GatewayError, match="no-such-gateway is not installed"):
        version_of(replace(gateway, description={"title": "Mine", "version": ["no-such-gateway"]}))
    for name, known in described().items():
        pinned = known.description.get("install", {}).get("pypi", [])
        assert all(package.partition("==")[2] in known.description["title"] for package in pinned), name


def test_every_gateway_of_the_folder_is_listed_once() -> None:
    assert {name.split("-")[0] for name in described()} == {path.stem.split("-")[0] for path in FOLDER.glob("*.toml")}


async def over_http(work: Workload, is_tapped: bool) -> tuple[Driver, list[dict[str, Any]], float]:
    async with TestServer(EngineServer(QUICK).app()) as engine:
        url = str(engine.make_url("")).rstrip("/")
        async with TestServer(Tap(QUICK, url).app()) as tap:
            url = str(tap.make_url("")).rstrip("/") if is_tapped else url
            transport = HttpTransport([url], KEYS, MODEL)
            driver = Driver(work, transport, CHARACTERS_PER_TOKEN)
            origin_s = await driver.run()
            await transport.close()
            async with aiohttp.ClientSession() as http:
                _, rows = await drain(url, http)
    return driver, rows, origin_s


@pytest.mark.parametrize("is_tapped", [False, True])
def test_over_http_each_token_is_received_and_logged(is_tapped: bool) -> None:
    good = Session("t1", "s", 0.0, 0.5, (Ask(64, 8),) * 9999)
    work = Workload("W8", "", 0.5, (good, Session("t2", "bad", 0.0, 0.5, (BAD,) * 9, pause_s=0.1)))
    driver, rows, origin_s = asyncio.run(over_http(work, is_tapped))
    run = Run(work, driver.records, read_events(rows, origin_s), QUICK)
    outcomes = [record.outcome for record in run.records]
    assert outcomes.count("done") > 1
    assert outcomes.count("bad") > 1
    found = measure(run)
    assert (found["j_errors"], found["j_lost"], found["j_doubled"]) == (0, 0, 0)
    made = sum(event.output for event in run.events if event.kind == "serve")
    assert made >= 8 * outcomes.count("done")


def test_kv_that_grows_preempts_the_last_admitted_and_its_tokens_are_waste() -> None:
    engine = Engine(Profile(slots=2, kv_tokens=64))
    first, last = Sequence("1", "t1", 20, 30), Sequence("2", "t2", 20, 30)
    engine.add(first, 0.0)
    engine.add(last, 0.0)
    now = 0.0
    ended: list[Sequence] = []
    while len(ended) < 2:
        step = engine.step(now)
        now += step.duration_s
        ended += step.ended
        assert engine.kv_used <= 64
    assert [event.request for event in engine.events if event.kind == "preempt"] == ["2"]
    served = [event for event in engine.events if event.kind == "serve"]
    assert sum(event.output for event in served) == 60
    assert sum(event.prompt for event in served) == 40
    assert sum(event.wasted for event in served) == 20 + (64 - 40) // 2
    assert engine.kv_used == 0


def test_a_lagging_client_and_a_loaded_machine_make_numbers_void() -> None:
    assert reasons_void([0.0] * 50 + [0.15] * 2, busy_others=0.1)[0].startswith("the client lagged")
    assert reasons_void([0.0] * 150 + [0.15], busy_others=0.1) == []
    assert "loaded" in reasons_void([0.0], busy_others=0.3)[0]


def test_gateways_have_cores_of_their_own(tmp_path: Path) -> None:
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    before = os.sched_getaffinity(0)
    for cores in (CLIENT_CORES, GATEWAY_CORES):
        with process([sys.executable, "-c", code], tmp_path / "log", cores=cores) as child:
            child.wait()
        assert (tmp_path / "log").read_text().splitlines()[-1] == str(sorted(cores))
    assert os.sched_getaffinity(0) == before
    assert len(machine.CORES) == 1 or not CLIENT_CORES & GATEWAY_CORES


def test_a_run_of_one_gateway_takes_twenty_minutes_at_most() -> None:
    seconds = arguments().parse_args(["run"]).seconds
    assert max(LENGTHS.values()) * seconds <= 120
    assert sum(LENGTHS.values()) * seconds + len(LENGTHS) * 2 * DRAIN_S <= 20 * 60
    assert sum(LENGTHS.values()) / len(LENGTHS) == pytest.approx(1.0)
    table = (ROOT / "README.md").read_text()
    for name, length in LENGTHS.items():
        assert re.search(rf"^\| {name} \| .* \| {length:g} \|", table, re.MULTILINE), name


def result(**jain: list[float]) -> dict[str, Any]:
    cells = []
    for name, values in jain.items():
        for i, value in enumerate(values):
            metrics = {"b_jain": value, "d_tokens_per_s": 100 * value}
            cells.append({"gateway": name, "workload": "W2", "round": i + 1, "void": [], "metrics": metrics})
    return {"comparability": {"seed": 0}, "gateways": {"direct": "The engine alone"}, "left_out": {}, "cells": cells}


def test_losing_rows_come_first_and_a_spread_hides_none_but_its_own() -> None:
    rows = rows_of([result(direct=[0.9, 0.9], mine=[0.5, 0.6], theirs=[0.8, 0.8])])
    lost = losses(rows, "mine")
    assert [row.metric.key for row, _, _ in lost] == ["b_jain", "d_tokens_per_s", "d_of_engine"]
    assert {(best, *own) for _, best, own in lost} == {("direct", "mine")}
    assert losses(rows_of([result(mine=[0.5, 0.9], theirs=[0.8, 0.8])]), "mine") == []
    text = text_of([result(direct=[0.9], mine=[0.5])], "mine")
    first, _, others = text.partition("## Rows that mine loses")[2].partition("## Other rows")
    assert "- direct: The engine alone" in text
    assert "One round." in text
    assert "| (b) Jain, mean | W2 | **0.9** | *0.5* |" in first
    assert "Jain, mean | W2" not in others
    assert "Medians of 2 rounds" in text_of([result(mine=[0.5, 0.9])])


def test_a_metric_that_is_equal_everywhere_takes_no_row() -> None:
    text = text_of([result(direct=[0.9], mine=[0.9])])
    assert "- (b) Jain, mean: 0.9 (W2)" in text
    assert "| (b) Jain, mean" not in text


def test_void_numbers_stand_in_brackets_and_count_only_where_there_are_no_others() -> None:
    one = result(mine=[0.5, 0.9])
    one["cells"][0]["void"] = ["the machine was loaded"]
    assert str(rows_of([one])[0].values["mine"]) == "0.9"
    one["cells"][1]["void"] = ["the machine was loaded"]
    assert str(rows_of([one])[0].values["mine"]).startswith("[0.7")


def test_results_that_are_not_comparable_share_no_column() -> None:
    other = result(mine=[0.5]) | {"comparability": {"seed": 1}}
    assert set(rows_of([result(mine=[0.9]), other])[0].values) == {"mine", "mine (run 2)"}


def test_a_gateway_by_its_url_needs_four_keys_and_the_engine_behind_it() -> None:
    ours = ["run", "--url", "http://a", "--url", "http://b"]
    options = run_options(arguments().parse_args([*ours, "--engine-url", "http://e", "--keys", "k1,k2,k3,k4"]))
    assert (options.gateways, options.keys["t4"]) == (["gateway"], "k4")
    for wrong in (ours, [*ours, "--engine-url", "http://e", "--keys", "k1"], ["run", "--workloads", "W11"]):
        with pytest.raises(GatewayError, match=r"engine-url|4 keys|no workload W11"):
            run_options(arguments().parse_args(wrong))


def test_cpu_time_and_memory_of_a_process_tree() -> None:
    code = "import time; x = bytearray(50_000_000)\nwhile time.process_time() < 0.3: pass\nprint(); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        cpu_s, rss_bytes = machine.usage_of({child.pid})
        assert cpu_s == pytest.approx(0.3, abs=0.05)
        assert 50e6 < rss_bytes < 80e6
        assert machine.usage_of({os.getpid()})[1] > rss_bytes
        child.communicate(b"\n")


def test_formulas_are_printed_for_all_metrics_a_to_k() -> None:
    text = text_of([result(mine=[Random(0).random()])])
    assert {metric.title[1] for metric in METRICS} == set("abcdefghijk")
    assert all(metric.formula in text for metric in METRICS)


@pytest.mark.slow
def test_a_run_that_is_terminated_ends_its_engines(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tenantbench", "run", "--gateways", "direct", "--workloads", "W10"]
    env = os.environ | {"PYTHONPATH": str(ROOT.parent)}
    with subprocess.Popen(
        [*command, "--seconds", "99", "--even-if-loaded", "--out", str(tmp_path)], stderr=subprocess.PIPE, env=env
    ) as tool:
        assert tool.stderr is not None
        while b"direct is ready" not in tool.stderr.readline():
            assert tool.poll() is None
        tool.terminate()
        assert b"ended before its time" in tool.stderr.read()
    assert tool.returncode == 130
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            assert not os.readlink(folder / "cwd").startswith(str(tmp_path))
