"""A new policy is one file with its settings beside it and one entry: all else follows from the two."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from policies.admission.decisions import Dispatch
from policies.admission.named import named_policy
from policies.orders.policy_entries import POLICIES
from policies.request import ServiceTokens
from tests.policies.making import make_request, pool_of
from tests.policies.orders.shortest import ENTRY

ROOT = Path(__file__).parents[3]
FILE = "open_access: true\npools: [{name: p, backends: [{url: 'sim:'}]}]\npolicy: {name: shortest, patience: %s}\n"
LOADS = """
import json, sys
from policies.orders.policy_entries import POLICIES
from tests.policies.orders.shortest import ENTRY
POLICIES["shortest"] = ENTRY
from gateway.config.load import ConfigError, load_config
from gateway.config.model import json_schema
print(json.dumps(json_schema()))
for file in sys.argv[1:]:
    try:
        print(json.dumps(load_config(file).policy.settings()))
    except ConfigError as error:
        print(json.dumps(str(error)))
"""


def test_the_yaml_has_its_section_the_schema_says_what_may_be_set_and_faults_have_their_place(tmp_path: Path) -> None:
    files = []
    for number, patience in enumerate(("3", "-1", "3, quantum: 5")):
        files.append(tmp_path / f"{number}.yaml")
        files[-1].write_text(FILE % patience)
    done = subprocess.run([sys.executable, "-c", LOADS, *files], cwd=ROOT, capture_output=True, text=True, check=True)
    schema, settings, *faults = map(json.loads, done.stdout.splitlines())
    for said in ('"patience"', "So many requests may overtake one.", "shortest prompt first"):
        assert said in schema
    assert settings == {"patience": 3}
    assert ": policy.patience: " in faults[0]
    assert ": policy.quantum: " in faults[1]


@pytest.mark.interpreted_only("a policy in a test extends a compiled class; one in its own file is compiled with it")
def test_the_admission_engine_serves_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "shortest", ENTRY)
    engine = pool_of("one", policy=named_policy("shortest", patience=1), slots=1)
    while not engine.queued:
        engine.arrived(make_request("a", prompt=100, id=f"first-{engine.dispatched}"), 0.0)
    for prompt in (50, 20, 30):
        engine.arrived(make_request("a", prompt=prompt, id=f"p{prompt}"), 0.1)
    served = []
    while engine.dispatched:
        running = next(iter(engine.requests.leases))
        decisions = engine.finished(running, ServiceTokens(10, 5), 0.3)
        served += [one.id for one in decisions if isinstance(one, Dispatch)]
    assert served[0] == "p20", "the shortest first"
    assert served[1].startswith("first-"), "the oldest, once one has overtaken it"
    assert served[2:] == ["p30", "p50"]


def test_every_policy_has_its_page() -> None:
    assert {page.stem for page in (ROOT / "docs" / "policies").glob("*.md")} - {"README"} == set(POLICIES)
