"""The reference says all that there is, and what it says is so."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.generate import reference
from docs.generate.config_fields import EXAMPLES, ConfigField, fields
from gateway.config.load import ConfigError, load_config
from gateway.config.sections.policy_choice import policy_settings
from gateway.http.errors import Reason
from gateway.telemetry.log_line import LogLine
from gateway.telemetry.metric_families import FAMILIES
from gateway.telemetry.record import Outcome
from policies.capacity.obstacle import Obstacle
from policies.orders.policy_entries import POLICIES
from policies.request import PlacementReason, RejectReason
from tests.gateway.live import Starter, chat

ROOT = Path(__file__).parents[2]
FIELDS = list(fields())


@pytest.mark.parametrize("name", reference.pages())
def test_the_page_is_what_the_code_says_now(name: str) -> None:
    written = (reference.REFERENCE / name).read_text(encoding="utf-8")
    assert written == reference.pages()[name], "run: python -m docs.generate.reference"


@pytest.mark.parametrize(
    ("words", "known"),
    [
        ("reasons", {reason.value for reason in Reason}),
        ("outcomes", {value for name, value in vars(Outcome).items() if name.isupper()}),
        ("obstacles", {obstacle.value for obstacle in Obstacle}),
        ("placed", {placed.value for placed in PlacementReason}),
        ("log", None),  # read from all sources, in the test
    ],
)
def test_the_runbook_has_every_word_and_no_other(words: str, known: set[str] | None) -> None:
    assert set(reference.RUNBOOK[words]) == (reference.log_messages() if known is None else known)
    for word, said in reference.RUNBOOK[words].items():
        assert set(said) == {"happened", "bad", "do"}, word
        assert all(text.endswith(".") for text in said.values()), word


def test_a_refusal_of_admission_is_a_reason() -> None:
    assert {Reason[refusal.name].value for refusal in RejectReason} <= set(reference.RUNBOOK["reasons"])


def test_every_log_field_is_described() -> None:
    described = {name: text for name, _, text in reference.log_fields()}
    assert list(described) == list(LogLine.__struct_fields__)
    assert [name for name, text in described.items() if not text] == []


def test_every_option_of_the_command_line_is_described() -> None:
    entries = re.findall(r"^- `-.*$", (reference.REFERENCE / "cli.md").read_text(), re.MULTILINE)
    assert len(entries) > 40
    assert [entry for entry in entries if not entry.partition(": ")[2].strip()] == []


async def test_every_metric_that_a_gateway_shows_is_in_the_reference(tmp_path: Path) -> None:
    async with Starter(tmp_path)("sim:a", usage=str(tmp_path / "usage.db")) as gateway:
        assert (await gateway.ask("/v1/chat/completions", chat())).status == 200
        page = (await gateway.get("/metrics", admin=True)).body.decode()
    shown = set(re.findall("^# TYPE (fairgate_[a-z_]+)", page, re.MULTILINE))
    assert len(shown) > 20
    assert shown <= FAMILIES.keys()


HEADER = re.compile(r"(x|access-control|retry|session|server)-[a-z-]+[a-z]|traceparent|tracestate|baggage|forwarded")


def test_every_header_field_that_the_gateway_knows_is_in_the_reference() -> None:
    known = {name for fields_of_one_way in reference.HEADERS.values() for name in fields_of_one_way}
    found = set()
    for folder in ("proxy", "keys", "request", "http", "telemetry"):
        for path in (ROOT / "gateway" / folder).rglob("*.py"):
            if path.name == "headers.py":
                continue  # what it names does not pass
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
                    text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
                    if HEADER.fullmatch(text):
                        found.add(text)
    assert found - known == set()


def test_every_field_of_the_configuration_has_what_an_operator_looks_for() -> None:
    assert len(FIELDS) > 130
    assert set(EXAMPLES) <= {one.path for one in FIELDS}
    assert [one.path for one in FIELDS if not one.meaning] == []
    assert [one.path for one in FIELDS if not one.example] == [], "docs/generate/examples.yaml"
    numbers = [one.path for one in FIELDS if re.search(r"from|above", one.bounds) and not one.unit]
    assert numbers == [], "UNITS in docs/generate/config_fields.py"


def test_the_example_of_each_field_can_be_loaded(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FAIRGATE_ADMIN_TOKEN", "VLLM_API_KEY", "REDIS_PASSWORD"):
        monkeypatch.setenv(name, "secret")
    file = tmp_path / "config.yaml"
    faults = []
    for one in FIELDS:
        if one.example:
            file.write_text(yaml.safe_dump(_around(one, files)))
            try:
                load_config(file)
            except ConfigError as error:
                faults.append(f"{one.path}: {error}")
    assert faults == []


def _around(one: ConfigField, files: dict[str, str]) -> dict[str, Any]:
    """The smallest configuration that has this example in it."""
    engine: dict[str, Any] = {"url": "https://gpu:8443" if ".tls." in one.path else "http://gpu:8000"}
    config: dict[str, Any] = {
        "pools": [
            {"name": "llama", "models": ["llama-3.1-8b"], "backends": [engine]},
            {"name": "small", "models": ["small-model"], "backends": [{"url": "http://gpu-2:8000"}]},
        ],
        "tenants": [{"name": "alice"}],
    }
    *sections, name = one.path.split(".")
    section: Any = config
    for place, step in enumerate(sections):
        if step == "*":
            section = section.setdefault("llama-3.1-8b", {})
        elif step.endswith("[]"):
            section = section.setdefault(step[:-2], [{}])[0]
        else:
            section = section.setdefault(step, {})
        for field, given in NEEDED.get(".".join(sections[: place + 1]), {}).items():
            section.setdefault(field, files.get(given, given) if isinstance(given, str) else given)
    value = yaml.safe_load(one.example)[name.rstrip("[]")]
    section[name.rstrip("[]")] = files.get(value, value) if isinstance(value, str) else value
    if name in ("group", "group_claim"):
        config.setdefault("groups", []).append({"name": value})
    if one.section == "policy" and name not in ("name", "placement"):
        section["name"] = next(policy for policy in POLICIES if name in policy_settings(policy))
    return config


NEEDED: dict[str, dict[str, Any]] = {
    "tls": {"cert_file": "/etc/fairgate/tls.crt", "key_file": "/etc/fairgate/tls.key"},
    "pools[].backends[].tls": {"cert_file": "/etc/fairgate/tls.crt", "key_file": "/etc/fairgate/tls.key"},
    "routes[]": {"path": "/v1/videos/*", "treatment": "pass"},
    "groups[]": {"name": "research", "guaranteed_share": 0.3},
    "tenants[]": {"guaranteed_share": 0.1},
    "tenants[].keys[]": {"hash": f"sha256:{'0' * 64}"},
    "tenants[].users[]": {"name": "eve@example.com"},
    "apps[]": {"name": "batch"},
    "jwt[]": {"issuer": "https://login.example.com/", "audience": "fairgate"},
    "usage": {"url": "/var/lib/fairgate/usage.db"},
    "usage.prices.*": {"input": 0.1, "output": 0.3},
    "state": {"url": "redis://redis:6379/0"},
}
"""What else a section must say for any example in it to hold."""
