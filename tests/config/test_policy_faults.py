"""A setting that the policy does not have, or not so, is a fault at its place."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from gateway.config.load import load_config
from gateway.config.sections.policy_choice import PolicyConfig, PolicyName, policy_settings
from policies.orders.policy_entries import POLICIES
from policies.settings import Setting
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


def test_no_default_of_a_setting_is_a_fault() -> None:
    for name in POLICIES:
        defaults = {setting: one.default for setting, one in policy_settings(name).items()}
        assert PolicyConfig.model_validate({"name": name, **defaults}).settings() == defaults
