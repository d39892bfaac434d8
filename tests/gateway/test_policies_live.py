"""Every policy of the registry can be named in the YAML and serves; what one refuses, its client can understand."""

from __future__ import annotations

from typing import get_args

import pytest

from gateway.config.sections.policy_choice import PolicyConfig, PolicyName, policy_settings
from policies.admission.named import named_policy
from policies.orders.policy_entries import POLICIES

PATH = "/v1/chat/completions"


def test_every_policy_has_a_name_in_the_file() -> None:
    assert sorted(get_args(PolicyName)) == sorted(POLICIES)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_policy_of_which_nothing_is_set_has_its_own_defaults(name: str) -> None:
    assert PolicyConfig(name=name).settings() == {}


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_setting_of_a_policy_can_be_written_in_the_file_and_reaches_it(name: str) -> None:
    known = policy_settings(name)
    assert known.keys() <= PolicyConfig.model_fields.keys()
    written = {setting: one.default for setting, one in known.items()}
    config = PolicyConfig(name=name, **written)
    assert config.settings() == written
    assert named_policy(name, **config.settings()).order is not None
