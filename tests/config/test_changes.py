"""What differs between two configurations, in words; what needs a restart; and that nothing secret is said."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.changes import changes, config_hash, needs_restart
from gateway.config.model import Config
from gateway.config.sections.keys import hash_key

BASE: dict[str, Any] = {
    "tenants": [{"name": "alice", "keys": [hash_key("a" * 30)]}, {"name": "bob", "weight": 2}],
    "pools": [{"name": "chat", "models": ["m"], "backends": [{"url": "http://one:1"}, {"url": "http://two:1"}]}],
}
POOL = BASE["pools"][0]
TRI = {"url": "http://tri:1"}
REDIS = {"state": "redis://localhost/0"}


def config(**fields: Any) -> Config:
    return Config.model_validate({**BASE, **fields})


def said(after: Config, before: Config | None = None) -> list[str]:
    return [str(one) for one in changes(before or config(), after)]


def refused(after: Config, before: Config) -> dict[str, str]:
    return needs_restart(before, changes(before, after), after)


def test_the_same_is_no_change_whatever_the_order_of_its_lists() -> None:
    turned = config(
        tenants=BASE["tenants"][::-1], pools=[{**BASE["pools"][0], "backends": BASE["pools"][0]["backends"][::-1]}]
    )
    assert said(turned) == []
    assert config_hash(turned) == config_hash(config())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"drain_s": 5}, ["drain_s: 30 -> 5"]),
        ({"tenants": [BASE["tenants"][0], {"name": "bob", "weight": 3}]}, ["tenants[bob].weight: 2 -> 3"]),
        ({"tenants": [BASE["tenants"][0]]}, ["tenants[bob]: removed"]),
        ({"tenants": [*BASE["tenants"], {"name": "bobby", "quota": {"concurrent": 1}}]}, ["tenants[bobby]: added"]),
        ({"quota": {"tokens_per_day": 7}}, ["quota.tokens_per_day: not set -> 7"]),
        ({"policy": "vtc"}, ["policy.name: fairserve -> vtc"]),
        ({"apps": [{"name": "x", "normal_service": [1, 2]}]}, ["apps[x]: added"]),
        ({"admin_token": "first-very-secret"}, ["admin_token: (a secret), changed"]),
        (
            {"pools": [{"name": "chat", "backends": [{**POOL["backends"][0], "max_num_seqs": 4}, TRI]}]},
            [
                "pools[chat].backends[one:1].max_num_seqs: not set -> 4",
                "pools[chat].backends[tri:1]: added",
                "pools[chat].backends[two:1]: removed",
                'pools[chat].models: ["m"] -> not set',
            ],
        ),
    ],
)  # fmt: skip
def test_what_differs_is_said_by_its_place(fields: dict[str, Any], words: list[str]) -> None:
    after = config(**fields)
    assert said(after) == words
    assert config_hash(after) != config_hash(config())


def test_a_secret_is_compared_and_never_said() -> None:
    one, other = config(admin_token="first-very-secret"), config(admin_token="other-very-secret")
    assert said(other, one) == ["admin_token: (a secret), changed"]
    assert config_hash(one) != config_hash(other)
    assert "very-secret" not in "".join(said(other, one)) + config_hash(other)


@pytest.mark.parametrize(
    ("field", "value"),
    [("listen", "127.0.0.1:1"), ("admin", "127.0.0.1:2"), ("workers", 2), ("state", "redis://x/0"),
     ("state_file", "f"), ("tracing", {})],
)  # fmt: skip
def test_what_is_set_at_the_start_needs_a_restart(field: str, value: Any) -> None:
    assert list(refused(config(**{field: value}), config())) in ([field], [f"{field}.url"])
    assert refused(config(drain_s=1, policy="vtc", access_log="off"), config()) == {}


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"policy": "vtc"}, "policy.name"),
        ({"throttle": {"window_s": 5}}, "throttle.window_s"),
        ({"apps": [{"name": "x", "normal_service": 5}]}, "apps[x]"),
        ({"pools": [*BASE["pools"], {"name": "b", "models": ["x"], "backends": [TRI]}]}, "pools[b]"),
    ],
)  # fmt: skip
def test_what_replicas_count_together_by_needs_a_restart_where_there_are_replicas(
    fields: dict[str, Any], path: str
) -> None:
    assert list(refused(config(**REDIS, **fields), config(**REDIS))) == [path]
    assert refused(config(**fields), config()) == {}


def test_what_replicas_may_differ_in_for_a_while_is_live() -> None:
    tenants = [{"name": "alice", "weight": 5}]
    backends = [*BASE["pools"][0]["backends"], {"url": "http://tri:1"}]
    pools = [{"name": "chat", "models": ["m"], "backends": backends}]
    assert refused(config(**REDIS, tenants=tenants, pools=pools), config(**REDIS)) == {}
    assert refused(config(**REDIS, apps=[{"name": "x"}]), config(**REDIS)) == {}
    assert refused(config(**REDIS, quota={"concurrent": 9}), config(**REDIS)) == {}
    groups = [{"name": "g", "quota": {"tokens_per_month": 5}}]
    assert refused(config(**REDIS, groups=groups), config(**REDIS)) == {}


@given(seed=st.integers(0, 10**6))
def test_any_two_differ_in_both_directions_alike(seed: int) -> None:
    chance = random.Random(seed)

    def any_config() -> Config:
        names = chance.sample("abcdef", chance.randrange(1, 5))
        tenants = [{"name": name, "weight": chance.randrange(1, 4)} for name in names]
        urls = chance.sample(["http://one:1", "http://two:1", "http://tri:1"], chance.randrange(1, 4))
        backends = [{"url": url, "max_num_seqs": chance.choice((None, 4))} for url in urls]
        return config(tenants=tenants, pools=[{"name": "chat", "backends": backends}])

    one, other = any_config(), any_config()
    there, back = changes(one, other), changes(other, one)
    assert [(each.path, each.before, each.after) for each in there] == [
        (each.path, each.after, each.before) for each in back
    ]
    assert (config_hash(one) == config_hash(other)) is (there == [])


def test_a_pool_may_come_to_one_engine_and_to_several_while_replicas_run() -> None:
    one, each = {"url": "http://one:1"}, {"url": "http://one:1", "each_address": True}
    pools = [config(**REDIS, pools=[{**POOL, "backends": backends}]) for backends in ([one], [each], POOL["backends"])]
    assert [refused(after, before) for after in pools for before in pools] == [{}] * 9
