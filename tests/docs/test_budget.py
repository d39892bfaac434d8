"""No station of a request takes more than docs/budget.md states: calls, instructions, allocations, followed objects."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from bench.stations import MEASURES, PAGE, STATIONS, written

BUDGET = written(PAGE.read_text(encoding="utf-8"))
TOLERATED = {"calls": (1, 0.005), "instructions": (10, 0.005), "blocks": (4, 0.04), "objects": (0, 0.0)}
"""So many more, or such a part, are no regression: a number of one digit more takes an instruction more, and what the
allocator takes differs by what else the process has allocated."""
ARCHITECTURE = (PAGE.parents[1] / "ARCHITECTURE.md").read_text(encoding="utf-8")
PARTS = {"Claim", "CorrelationKeys", "Interaction", "Progress", "ServiceTokens", "_RecentAnswers"}
"""Of the `Request`: what the client claims, what the core notes of it, how its interaction was found, and a count of
tokens. With the first answer of its tenant at an engine: whether the latest ones broke."""
NOTED_IN = (3, 11)
"""Each version of Python has instructions of its own."""

Measured = dict[str, tuple[dict[str, list[int]], dict[str, list[int]]]]


@pytest.fixture(scope="module")
def measured() -> Measured:
    """Of each kind, by station and by function. In a process of its own, into which nothing else has been loaded."""
    said = subprocess.run(
        [sys.executable, "-m", "bench.stations", "--json"],
        cwd=PAGE.parents[1],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        check=True,
        capture_output=True,
    )
    found: Measured = json.loads(said.stdout)
    return found


pytestmark = [
    pytest.mark.skipif(sys.version_info[:2] != NOTED_IN, reason="the budget is that of another version of Python"),
    pytest.mark.interpreted_only("what is compiled has no instructions of Python"),
]


def test_no_station_exceeds_its_budget(measured: Measured) -> None:
    beyond = []
    for kind, (stations, _) in measured.items():
        assert stations.keys() == STATIONS.keys(), kind
        for station, cost in stations.items():
            for measure, budget, count in zip(MEASURES, BUDGET[kind][station], cost, strict=True):
                least, part = TOLERATED[measure]
                if count > budget + max(least, part * budget):
                    beyond.append(f"{kind}, {station}: {count} {measure}, {budget} budgeted")
    assert not beyond, "see docs/budget.md"


def test_six_objects_carry_a_request(measured: Measured) -> None:
    """Those that ARCHITECTURE.md names, and values that live no longer than the question which interaction it is of."""
    sentence = ARCHITECTURE.partition("Six objects carry a request")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", sentence))
    assert len(named) == 6
    _, functions = measured["1 kB"]
    begun = [name.split()[-1].split(":") for name in functions if name.endswith(".__init__")]
    made = {name.removesuffix(".__init__") for path, name in begun if path.startswith("gateway/")}
    made |= {name.removesuffix(".__init__") for path, name in begun if path == "policies/request.py"}
    bases = {"HttpRequest", "Relay"}
    assert made - PARTS == named - {"RequestContext"} | bases, "the context and the exchange begin as their bases"


def test_every_station_begins_where_it_is_said_to(measured: Measured) -> None:
    """A function that was renamed would leave its work to the station before."""
    seen = {name.split()[-1] for _, functions in measured.values() for name in functions}
    begins = {each for station in STATIONS.values() for each in station}
    assert {each for each in begins if not any(each in name for name in seen)} == set()
