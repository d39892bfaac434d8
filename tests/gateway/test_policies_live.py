"""Every policy of the registry can be named in the YAML and serves; what one refuses, its client can understand."""

from __future__ import annotations

from typing import get_args

import pytest

from gateway.config.sections.policy_choice import PolicyConfig, PolicyName, policy_settings
from policies.admission.named import named_policy
from policies.orders.policy_entries import POLICIES
from tests.gateway.live import Starter, chat, simulated, until

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


async def test_rpm_refuses_what_is_beyond_the_limit_and_says_when_to_come_back(start: Starter) -> None:
    policy = {"name": "rpm", "requests_per_minute": 3}
    async with simulated() as engine, start(engine.url, policy=policy) as live:
        for _ in range(3):
            assert (await live.ask(PATH, chat(max_tokens=2), key="eager")).status == 200
        refused = await live.ask(PATH, chat(max_tokens=2), key="eager")
        assert (refused.status, refused.error["code"]) == (429, "rate_limited")
        assert "3 requests a minute" in refused.error["message"]
        assert 0 < int(refused.headers["retry-after"]) <= 70
        assert refused.headers["x-ratelimit-limit-requests"] == "3"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await live.ask(PATH, chat(max_tokens=2), key="other")).status == 200, "each tenant has its own limit"
        lines = await live.lines(5)
        assert [line["reason"] for line in lines].count("rate_limited") == 1
        await until(live.holds_nothing)
