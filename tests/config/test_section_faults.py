"""A setting that the policy does not have, and TLS that cannot work, are faults at their place before the start."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import get_args

import pytest

from gateway.config.load import load_config
from gateway.config.sections.policy_choice import PolicyConfig, PolicyName, policy_settings
from policies.admission.named import named_policy
from policies.orders.policy_entries import POLICIES
from policies.settings import Setting
from tests.certificates import Authority
from tests.config.faults import GOOD, faults


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("vtc", []),
        ("{name: vtc, output_weight: 4}", []),
        ("{quantum: 500, name: rr}", []),
        ("vtx", [f":3:9: policy: should be {' or '.join(get_args(PolicyName))} (did you mean 'vtc'?)"]),
        ("[vtc]", [":3:9: policy: should be a section of fields, not a list"]),
        ("{name: vtc, quantum: 500}", [":3:30: policy.quantum: is not a setting of vtc, but of dlpm, d2lpm, rr"]),
        ("{quantum: 500}", [":3:19: policy.quantum: is not a setting of fairserve, but of dlpm, d2lpm, rr"]),
        ("{name: dlpm, backend_quantum: 5}", [":3:39: policy.backend_quantum: is not a setting of dlpm, but of d2lpm"]),
        (
            "{alpha: 2, name: fcfs, cost: linear}",
            [
                ":3:17: policy.alpha: is not a setting of fcfs, but of fairserve, wsc",
                ":3:38: policy.cost: is not a setting of fcfs, but of fairserve, wsc, vtc, rr",
            ],
        ),
        (
            # That it is not well written either is no second fault of it, but there may be others.
            "{name: vtc, backend_quantum: many, output_weight: 0}",
            [
                ":3:38: policy.backend_quantum: is not a setting of vtc, but of d2lpm",
                ":3:59: policy.output_weight: should be greater than 0",
            ],
        ),
        # Of a policy that there is not, nothing is known.
        (
            "{name: vtx, quantum: 500}",
            [f":3:16: policy.name: should be {' or '.join(get_args(PolicyName))} (did you mean 'vtc'?)"],
        ),
        (
            "{name: vtc, output_wieght: 4}",
            [":3:21: policy.output_wieght: unknown field (did you mean 'output_weight'?)"],
        ),
        ("{name: rr, cost: linaer}", [":3:26: policy.cost: should be linear or profiled (did you mean 'linear'?)"]),
        ("{name: rr, cost: }", [":3:25: policy.cost: should be linear or profiled"]),
        ("{output_weight: }", [":3:24: policy.output_weight: should be a number, not nothing"]),
        ("{name: rr, predict_output: 1}", [":3:36: policy.predict_output: should be true or false, not a number"]),
        ("{name: rr, quantum: 0.5}", [":3:29: policy.quantum: should be greater than or equal to 1"]),
    ],
)
def test_a_setting_that_the_policy_does_not_have_is_a_fault_at_its_place(
    tmp_path: Path, policy: str, expected: list[str]
) -> None:
    text = f"{GOOD}policy: {policy}\n"
    if expected:
        assert faults(tmp_path, text) == expected
    else:
        (tmp_path / "good.yaml").write_text(text)
        load_config(tmp_path / "good.yaml")


def test_settings_of_the_same_name_are_of_one_kind_with_the_same_bounds() -> None:
    """The section has one field for all policies that have it."""
    of_policies: dict[str, dict[str, Setting]] = {}
    for policy in POLICIES:
        for name, setting in policy_settings(policy).items():
            of_policies.setdefault(name, {})[policy] = setting
    shared = {name for name, having in of_policies.items() if len(having) > 1}
    assert {"cost", "input_weight", "output_weight", "predict_output", "quantum", "alpha"} <= shared
    differing = {
        name: having
        for name, having in of_policies.items()
        if len({(one.kind, one.least, one.above, one.most, one.choices) for one in having.values()}) > 1
    }
    assert not differing


def test_each_policy_can_be_named_and_its_settings_written_in_the_file() -> None:
    assert sorted(get_args(PolicyName)) == sorted(POLICIES)
    for name in POLICIES:
        assert PolicyConfig(name=name).settings() == {}, "what is not set is the policy's own default"
        defaults = {setting: one.default for setting, one in policy_settings(name).items()}
        written = PolicyConfig.model_validate({"name": name, **defaults}).settings()
        assert written == defaults
        assert named_policy(name, **written).order is not None


BACKEND = "open_access: true\npools: [{{name: p, backends: [{{url: '{url}', tls: {{{tls}}}}}]}}]\n"
TLS_FAULTS = [
    ("https://h", "ca_file: /nowhere/ca.pem", "the authorities in /nowhere/ca.pem cannot be read: No such file"),
    ("https://h", "ca_file: '{here}/junk.pem'", "junk.pem cannot be read: it is no PEM file of that kind"),
    ("https://h", "cert_file: '{here}/junk.pem'", "junk.pem cannot be used: it is no PEM file of that kind"),
    ("https://h", "cert_file: '{here}/one.pem', key_file: '{here}/two.key'", "key values mismatch"),
    ("https://h", "cert_file: '{here}/one.pem', key_file: '{here}/locked.key'", "readable without a password"),
    ("https://h", "key_file: '{here}/one.key'", "has a key_file and no cert_file"),
    ("https://h", "verify: false, ca_file: '{here}/ca.pem'", "is without effect where verify is false"),
    ("http://h", "ca_file: '{here}/ca.pem'", "is for an https url"),
    ("sim:", "verify: false", "is for an https url"),
]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("certificates")
    authority = Authority(here)
    for name in ("one", "two"):
        authority.sign(name)
    locked = ["openssl", "ec", "-in", "one.key", "-aes256", "-passout", "pass:x", "-out", "locked.key"]
    subprocess.run(locked, cwd=here, check=True, capture_output=True)
    (here / "junk.pem").write_text("junk")
    return here


@pytest.mark.parametrize(("url", "tls", "said"), TLS_FAULTS)
def test_tls_that_cannot_work_is_said_before_the_start(
    tmp_path: Path, certificates: Path, url: str, tls: str, said: str
) -> None:
    [found] = faults(tmp_path, BACKEND.format(url=url, tls=tls.format(here=certificates)))
    assert "pools[0].backends[0].tls" in found
    assert said in found


LISTENER_TLS = "open_access: true\npools: [{{name: p, backends: [{{url: 'sim:'}}]}}]\ntls: {{{tls}}}\n"
LISTENER_FAULTS = {
    "cert_file: /nowhere/tls.crt": "tls: the certificate /nowhere/tls.crt cannot be read: No such file",
    "cert_file: '{here}/one.pem', key_file: /nowhere/tls.key": "tls: the key /nowhere/tls.key cannot be read: No such",
    "cert_file: '{here}', key_file: '{here}/one.key'": "cannot be read: Is a directory",
    "cert_file: '{here}/one.pem', key_file: '{here}/two.key'": "they do not belong together (key values mismatch)",
    "cert_file: '{here}/one.pem', key_file: '{here}/locked.key'": "readable without a password",
    "cert_file: '{here}/junk.pem'": "junk.pem cannot be used: it is no PEM file of that kind",
    "cert_file: '{here}/one.pem', key_file: '{here}/one.key', client_ca_file: /nowhere": "the authorities in /nowhere",
    "key_file: '{here}/one.key'": "tls.cert_file: is missing",
}


@pytest.mark.parametrize("tls", LISTENER_FAULTS)
def test_a_certificate_that_cannot_be_shown_is_said_before_the_start(
    tmp_path: Path, certificates: Path, tls: str
) -> None:
    [found] = faults(tmp_path, LISTENER_TLS.format(tls=tls.format(here=certificates)))
    assert found.startswith(":3:")
    assert LISTENER_FAULTS[tls] in found


def test_tls_that_works_is_no_fault(tmp_path: Path, certificates: Path) -> None:
    tls = f"ca_file: {certificates}/ca.pem, cert_file: {certificates}/one.pem, key_file: {certificates}/one.key"
    (tmp_path / "c.yaml").write_text(BACKEND.format(url="https://h", tls=tls))
    assert load_config(tmp_path / "c.yaml").pools[0].backends[0].tls is not None
