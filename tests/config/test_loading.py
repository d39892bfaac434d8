"""What is written is what is meant: values, variables, defaults, and the files that fairgate ships."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.load import ConfigError, config_for_backends, load_config
from gateway.config.model import Config, json_schema
from gateway.config.section import filled
from gateway.config.sections.apps import InteractionRules
from gateway.config.sections.keys import hash_key, new_key
from policies.capacity.overload import OverloadSettings
from policies.interactions import InteractionSettings
from policies.limits.quotas import Quota
from policies.limits.throttle import Ceilings, ThrottleSettings

ROOT = Path(__file__).parents[2]
SHIPPED = ["config.example.yaml", "deploy/config.compose.yaml"]
POOL = "pools: [{name: p, backends: [{url: 'sim:'}]}]\n"


def load(tmp_path: Path, text: str) -> Config:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    return load_config(file)


def test_text_never_turns_into_something_else(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """\
open_access: true
access_log: off
pools:
  - name: no
    models: [yes, on, 12:30:45, 010, 0x10, 1_000, .inf, 2026-01-01, True, Null, =, <<, "7"]
    start_s_max: 4
    backends: [{url: "sim:"}]
drain_s: 1.5e1
""",
    )
    (pool,) = config.pools
    assert (config.access_log, pool.name, config.drain_s, pool.start_s_max) == ("off", "no", 15.0, 4.0)
    assert " ".join(pool.models) == "yes on 12:30:45 010 0x10 1_000 .inf 2026-01-01 True Null = << 7"


def test_variables_are_replaced_inside_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FG_HOST", "gpu")
    monkeypatch.setenv("FG_KEY", "12345")
    monkeypatch.setenv("FG_EMPTY", "")
    monkeypatch.delenv("FG_UNSET", raising=False)
    config = load(
        tmp_path,
        """\
open_access: true
access_log: "$${x}${FG_HOST:-z}${FG_EMPTY}${FG_EMPTY:-a}${FG_UNSET:-b:-c}${FG_UNSET:-}"
pools: [{name: p, backends: [{url: "http://${FG_HOST}:8000", api_key: "${FG_KEY}"}]}]
""",
    )
    (backend,) = config.pools[0].backends
    assert config.access_log == "${x}gpuab:-c"
    assert (backend.url, backend.name) == ("http://gpu:8000", "gpu:8000")
    assert backend.api_key is not None
    assert backend.api_key.get_secret_value() == "12345"
    assert "12345" not in repr(config)
    assert "12345" not in config.model_dump_json()


def test_state_is_in_memory_or_in_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FG_PASSWORD", "hunter2")
    pool = "open_access: true\n" + POOL.replace("sim:", "http://gpu")
    assert load(tmp_path, pool).state.redis_url is None
    assert load(tmp_path, pool + "state: memory\n").state.redis_url is None
    short = load(tmp_path, pool + "state: redis://:${FG_PASSWORD}@redis:6379/2\n")
    assert (short.state.redis_url, short.state.limits_without_redis) == ("redis://:hunter2@redis:6379/2", "share")
    assert "hunter2" not in repr(short) + short.model_dump_json()
    long = load(tmp_path, pool + "state: {url: 'unix:///run/redis.sock?db=1', limits_without_redis: refuse}\n")
    assert (long.state.redis_url, long.state.limits_without_redis) == ("unix:///run/redis.sock?db=1", "refuse")


def test_short_forms_and_defaults(tmp_path: Path) -> None:
    hashed = hash_key("fg-x")
    config = load(
        tmp_path,
        POOL
        + f"policy: fcfs\ntenants: [{{name: t, keys: [{hashed}, {{hash: {hash_key('y')}, apps: [chat, batch]}}]}}]",
    )
    (tenant,) = config.tenants
    assert config.policy.name == "fcfs"
    assert (tenant.weight, [key.apps for key in tenant.keys]) == (1.0, [("default",), ("chat", "batch")])
    assert tenant.keys[0].hash == hashed
    assert config.listen_addresses == [("127.0.0.1", 8080)]
    assert config.admin_address == ("127.0.0.1", 8190)
    assert config.pools[0].backends[0].simulated


def test_aliases_stand_for_what_they_name(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """\
open_access: true
pools:
  - {name: a, capacity: &c {waiting_target: 4}, backends: [{url: "sim:a"}]}
  - {name: b, capacity: *c, backends: [{url: "sim:b"}]}
""",
    )
    assert [pool.capacity.waiting_target for pool in config.pools] == [4, 4]


def test_backends_are_enough_for_a_configuration() -> None:
    config = config_for_backends(["http://gpu:8000/", "https://gpu2/base"], host="::1", port=8000)
    (pool,) = config.pools
    assert config.open_access
    assert config.listen_addresses == [("::1", 8000)]
    assert (pool.name, pool.models, config.tenants) == ("default", (), ())
    assert [(b.url, b.name) for b in pool.backends] == [
        ("http://gpu:8000", "gpu:8000"),
        ("https://gpu2/base", "gpu2/base"),
    ]


def test_a_key_is_new_each_time_and_known_by_its_hash() -> None:
    key = new_key()
    assert re.fullmatch(r"fg-[A-Za-z0-9_-]{43}", key)
    assert key != new_key()
    assert hash_key("abc") == "sha256:" + hashlib.sha256(b"abc").hexdigest()
    assert hash_key(b"\xff".decode("utf-8", "surrogateescape")) == "sha256:" + hashlib.sha256(b"\xff").hexdigest()


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("sim:a")
FIELDS = st.sampled_from(
    ["pools", "tenants", "name", "keys", "hash", "apps", "backends", "url", "models", "policy", "limits", "listen",
     "admin", "capacity", "body_bytes_max", "memory_max", "api_key", "weight", "other"]
)  # fmt: skip


@given(st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner), max_leaves=30))
def test_no_shape_makes_the_loader_fail_in_another_way(data: object) -> None:
    """`tests/fuzz` has any text."""
    with tempfile.NamedTemporaryFile("w") as file:
        json.dump(data, file)
        file.flush()
        with suppress(ConfigError):
            load_config(file.name)


def test_the_schema_for_editors_is_that_of_the_model() -> None:
    assert (ROOT / "config.schema.json").read_text() == json_schema(), "run: fairgate schema > config.schema.json"
    described = [
        (name, field)
        for model in (json.loads(json_schema()), *json.loads(json_schema())["$defs"].values())
        for name, field in model["properties"].items()
    ]
    assert [name for name, field in described if "description" not in field] == []


@pytest.mark.parametrize("file", SHIPPED)
def test_the_shipped_configurations_load(file: str) -> None:
    assert load_config(ROOT / file).tenants
    head = (ROOT / file).read_text().splitlines()[0]
    schema = (ROOT / file).parent / head.removeprefix("# yaml-language-server: $schema=")
    assert schema.samefile(ROOT / "config.schema.json")


def test_the_shipped_configurations_fit_the_schema_for_editors() -> None:
    check_schema("--schemafile", ROOT / "config.schema.json", *(ROOT / file for file in SHIPPED))


def test_the_example_is_what_make_run_shows() -> None:
    config = load_config(ROOT / "config.example.yaml")
    (pool,) = config.pools
    assert pool.models == ("llama-3.1-8b",)
    assert [backend.simulated for backend in pool.backends] == [True, True]
    assert [(tenant.name, tenant.weight, tenant.keys) for tenant in config.tenants] == [
        ("alice", 1.0, ()),
        ("bob", 1.0, ()),
        ("research", 3.0, ()),
    ]


def test_the_compose_file_is_valid_and_mounts_the_configuration_that_ships(monkeypatch: pytest.MonkeyPatch) -> None:
    compose = ROOT / "docker-compose.yml"
    check_schema("--builtin-schema", "vendor.compose-spec", compose)
    services = yaml.safe_load(compose.read_text())["services"]
    (mount,) = services["gateway"]["volumes"]
    assert services["replica"]["volumes"] == [mount]
    source, target, mode = mount.split(":")
    assert (ROOT / source).samefile(ROOT / "deploy/config.compose.yaml")
    assert (target, mode) == ("/etc/fairgate/config.yaml", "ro")
    reached = [name for name, service in services.items() if "ports" in service]
    assert reached == ["gateway", "balancer", "prometheus", "grafana"]
    assert load_config(ROOT / source).state.redis_url is None
    state = services["replica"]["environment"]["FAIRGATE_STATE"].replace("${REDIS_PASSWORD:-}", "secret")
    monkeypatch.setenv("FAIRGATE_STATE", state)
    assert load_config(ROOT / source).state.redis_url == "redis://:secret@redis:6379/0"
    (backend,) = load_config(ROOT / source).pools[0].backends
    for engine in ("vllm", "sim"):
        assert backend.url == f"http://{services[engine]['networks']['default']['aliases'][0]}:8000"


def check_schema(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "check_jsonschema", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_written_of_limits_is_what_the_policy_gets(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """\
open_access: true
pools: [{name: p, backends: [{url: 'sim:'}]}]
overload: {enter: 0.9, leave: 0.5, dwell_s: 0}
throttle: {window_s: 30, user: {starts: 5, tokens: auto}}
interactions: {calls_max: 7}
apps: [{name: chat, normal_service: 100}, {name: batch, normal_service: [5, 2.5], interactions: {content: false}}]
quota: {concurrent: 3}
""",
    )
    assert config.policy.name == "fairserve"
    assert filled(ThrottleSettings, config.throttle) == ThrottleSettings(30, user=Ceilings(starts=5))
    assert filled(OverloadSettings, config.overload) == OverloadSettings(0.9, 0.5, 0)
    assert filled(InteractionSettings, config.interactions) == InteractionSettings(calls_max=7)
    assert (config.apps[0].normal_service, config.apps[0].interactions) == ((100.0,), None)
    assert config.apps[1].normal_service == (5, 2.5)
    assert config.apps[1].interactions == InteractionRules(content=False)
    assert filled(Quota, config.quota) == Quota(concurrent=3)
