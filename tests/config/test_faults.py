"""Every fault of a file is reported at once, at its place, in words that help and hold no secret."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import get_args

import pytest

from gateway.config import load
from gateway.config.load import FAULTS_FOUND_MAX, FILE_BYTES_MAX, ConfigError, Fault, config_for_backends, load_config
from gateway.config.sections.policy_choice import PolicyName
from tests.config.faults import GOOD, faults

HASH = "sha256:" + "0" * 64
MODELS = """\
open_access: true
pools:
  - {name: a, models: [a1], backends: [{url: 'http://a'}]}
  - {name: b, models: [b1], backends: [{url: 'http://b'}]}
"""


ALL_AT_ONCE = f"""\
listen: 8080
admin: 127.0.0.1
open_access: yes
policy: vtx
limts: {{}}
pools:
  - name: a pool
    models: [m, m2]
    backends:
      - url: http://gpu:8000/v1
      - url: http://gpu2:8000
        api_key: ${{FAIRGATE_TEST_UNSET}}
        max_num_seqs: 010
      - url: http://GPU2:8000/
  - name: empty
    models: [m]
    backends: []
  - models: [no, 12:30:45, 010, 1.5, true]
    backends:
      - url: sim:x
        url: sim:y
        engine: vlm
tenants:
  - name: t
    wieght: 2
    weight: ${{FAIRGATE_TEST_SECRET}}
    keys:
      - sk-plain-secret-key
      - {HASH}
      - hash: SHA256:00
      - {{hash: "{HASH}", apps: []}}
  - name: t
    weight: 0
  - name: !x u
drain_s:
access_log: false
limits: {{body_bytes_max: 99999999}}
memory_max: 469762048
"""

EXPIRES = ":3:119: tenants[0].keys[0].expires: should be a day such as 2027-01-31, or a time with its zone: 20"
NOT_A_HASH = (
    "is not the hash of a key (sha256: and 64 hex digits). Keys are never stored as they are: "
    "run `fairgate keys hash` and write here what it prints"
)


def test_every_fault_of_a_file_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRGATE_TEST_SECRET", "hunter2")
    monkeypatch.delenv("FAIRGATE_TEST_UNSET", raising=False)
    found = faults(tmp_path, ALL_AT_ONCE)
    assert found == [
        ":1:9: listen: should be host:port, such as 127.0.0.1:8080, 0.0.0.0:8080 or [::1]:8080",
        ":2:8: admin: should be host:port, such as 127.0.0.1:8080, 0.0.0.0:8080 or [::1]:8080",
        ":3:14: open_access: should be true or false, not text",
        f":4:9: policy: should be {' or '.join(get_args(PolicyName))} (did you mean 'vtc'?)",
        ":5:1: limts: unknown field (did you mean 'limits'?)",
        ":7:11: pools[0].name: should be 1 to 128 characters, without spaces or control characters",
        ":10:14: pools[0].backends[0].url: should end before /v1: the path of each request is appended to it",
        ":12:18: pools[0].backends[1].api_key: the environment variable FAIRGATE_TEST_UNSET is not set",
        ":13:23: pools[0].backends[1].max_num_seqs: should be a whole number, not text; "
        "write plain decimal digits, without quotes, leading zeros, underscores or colons",
        ":17:15: pools[1].backends: is empty; give at least one",
        ":18:5: pools[2].name: is missing",
        ":18:33: pools[2].models[3]: should be text, not a fraction; put it in quotes",
        ":18:38: pools[2].models[4]: should be text, not true or false; put it in quotes",
        ":21:9: pools[2].backends[0].url: given twice, first on line 20",
        ":22:17: pools[2].backends[0].engine: should be auto or vllm or sglang or llama.cpp or tgi or tensorrt-llm"
        " or ollama or lmdeploy or max or openai (did you mean 'vllm'?)",
        ":25:5: tenants[0].wieght: unknown field (did you mean 'weight'?)",
        ":26:13: tenants[0].weight: should be a number, not text; "
        "a variable always gives text, so write the number here",
        f":28:9: tenants[0].keys[0]: {NOT_A_HASH}",
        f":30:15: tenants[0].keys[2].hash: {NOT_A_HASH}",
        ":31:97: tenants[0].keys[3].apps: is empty; give at least one",
        ":33:13: tenants[1].weight: should be greater than 0",
        ":34:11: tenants[2].name: YAML tags (!) are not supported",
        ":35:9: drain_s: should be a number, not nothing",
        ":36:13: access_log: should be text, not true or false; put it in quotes",
    ]


CONTRADICTORY = f"""\
pools:
- {{name: one, models: [m], backends: [{{url: 'http://gpu:1'}}, {{url: 'http://gpu:1/'}}]}}
- {{name: two, models: [m], backends: [{{url: 'http://gpu:2'}}]}}
tenants:
- {{name: t, keys: ['{HASH}', {{hash: '{HASH.upper().replace("SHA", "sha")}'}}]}}
- {{name: t}}
memory_max: 469762048
limits: {{body_bytes_max: 100000000}}
listen: 127.0.0.1:8190
"""


def test_contradictions_of_valid_values_are_reported_at_once(tmp_path: Path) -> None:
    assert faults(tmp_path, CONTRADICTORY) == [
        ":1:1: admin: takes the port of listen (127.0.0.1:8190); give it another one",
        ":2:68: pools[0].backends[1].url: the same url as pools[0].backends[0].url",
        ":3:24: pools[1].models[0]: the same model as pools[0].models[0]: a model belongs to one pool",
        ":5:102: tenants[0].keys[1].hash: the same key as tenants[0].keys[0].hash",
        ":6:10: tenants[1].name: the same name as tenants[0].name",
        ":8:26: limits.body_bytes_max: is more than memory_max (469762048) has room for: 35578184",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", ": is empty; see config.example.yaml for a start"),
        (b"# only a comment\n", ": is empty; see config.example.yaml for a start"),
        (b"- a\n", ":1:1: should be fields, such as `pools:`"),
        (b"\nplain text", ":2:1: should be fields, such as `pools:`"),
        (b"pools: [\n", ":2:1: not YAML: expected the node content, but found '<stream end>'"),
        (b"a: b: c\n", ":1:5: not YAML: mapping values are not allowed here"),
        (b"a: 1\n---\nb: 1\n", ":2:1: not YAML: but found another document"),
        (b"a: 1\nb: \xc3\xa9\xff\n", ":2:5: not UTF-8"),
        (b"a: 1\nb: \x07\n", ":2:4: character U+0007 is not allowed"),
        (b"a: *hunter2\n", ":1:4: not YAML: found undefined alias (not shown)"),
        (b"a: " + b"[" * 5000, ": nested too deeply"),
        (b"a: " + b"[" * 40 + b"]" * 40, ":1:24: is nested more than 20 deep"),
        (b"a: &a [*a]\n", ":1:4: is nested more than 20 deep"),
        (b"#" * (FILE_BYTES_MAX + 1), f": is larger than {FILE_BYTES_MAX} bytes"),
        (
            "open_access: true\npools:\n- {name: a, start_s_max: 600, backends: [{url: 'http://gpu:1'}]}\n",
            ":3:26: pools[0].start_s_max: needs `models`: while no engine runs, nothing else says what is served",
        ),
    ],
)
def test_a_file_that_is_no_configuration_says_why(tmp_path: Path, text: bytes, expected: str) -> None:
    assert faults(tmp_path, text) == [expected]


@pytest.mark.slow
def test_an_alias_bomb_is_refused_before_it_expands(tmp_path: Path) -> None:
    names = "abcdefghi"
    bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{name}: &{name} [{', '.join(['*' + before] * 10)}]\n" for before, name in itertools.pairwise(names)
    )
    (found,) = faults(tmp_path, bomb)
    assert "holds more than 500000 values, aliases expanded" in found


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    unreadable: list[tuple[Path | str, str]] = [
        (tmp_path / "none.yaml", "cannot be read: No such file or directory"),
        (tmp_path, "cannot be read: Is a directory"),
        ("a\0b", "is not the name of a file"),
    ]
    for path, message in unreadable:
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert caught.value.faults == [Fault(str(path), 0, 0, "", message)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pools: [{name: p, backends: [{url: 'sim:'}]}]\n", ":1:1: tenants: is empty: nobody could call"),
        (GOOD + "admin: localhost:70000\n", ":3:8: admin: should be host:port"),
        (GOOD + "drain_s: .inf\n", ":3:10: drain_s: should be a number, not text"),
        (GOOD + "drain_s: 1e999\n", ":3:10: drain_s: should be a finite number"),
        (GOOD + "tenants: [{name: t, keys: [{}]}]\n", ":3:28: tenants[0].keys[0].hash: is missing"),
        (GOOD + f"tenants: [{{name: t, keys: [{{hash: '{HASH}', expires: 2027-02-29}}]}}]\n", EXPIRES),
        (GOOD + f"tenants: [{{name: t, keys: [{{hash: '{HASH}', expires: 2027-01-31T12:00}}]}}]\n", EXPIRES),
        (GOOD + f"tenants: [{{name: t, keys: [{{hash: '{HASH}', expires: 9999-12-31}}]}}]\n", EXPIRES),
        (GOOD + f"tenants: [{{name: t, keys: [{{hash: '{HASH}', models: []}}]}}]\n",
         ":3:118: tenants[0].keys[0].models: is empty; give at least one"),
        (GOOD + "? [a]\n: b\n", ":3:3: the name of a field should be text"),
        (GOOD + "access_log: '${1X}'\n", ":3:13: access_log: write a variable as ${NAME}"),
        (
            GOOD + "memory_max: 201326592\nlimits: {json_bytes_max: 20000000}\n",
            ":4:26: limits.json_bytes_max: is more than memory_max (201326592) has room for: 2767192",
        ),
        (
            GOOD + "listen: []\n",
            ":3:9: listen: should be host:port, such as 127.0.0.1:8080, 0.0.0.0:8080 or [::1]:8080",
        ),
        (GOOD + "listen: ['127.0.0.1:1', '127.0.0.1:1']\n", ":3:9: listen: holds the same name twice"),
        (
            GOOD + "listen: ['127.0.0.2:1', '0.0.0.0:7']\nadmin: '127.0.0.1:7'\n",
            ":4:8: admin: takes the port of listen (0.0.0.0:7); give it another one",
        ),
        (
            GOOD + "memory_max: 469762048\nlimits: {connections_max: 3000}\n",
            ":4:27: limits.connections_max: is more than memory_max (469762048) has room for: 2831",
        ),
        (GOOD + "memory_max: 1000000\n", ":3:13: memory_max: should be"),
        (GOOD.replace("sim:", "ftp://h"), ":2:36: pools[0].backends[0].url: should be http://host:port"),
        (GOOD.replace("sim:", "http://h:99999"), ":2:36: pools[0].backends[0].url: should be http://host:port"),
        (GOOD.replace("sim:", "http://h/a/../b"), ":2:36: pools[0].backends[0].url: should have no path, or one such"),
        (GOOD.replace("sim:", "http://h//a"), ":2:36: pools[0].backends[0].url: should have no path, or one such"),
        (GOOD.replace("'sim:'", "'http://h/a'}, {url: 'http://h/a/'"), ":2:57: pools[0].backends[1].url: the same"),
        (GOOD.replace("'sim:'", "'http://h/a'}, {url: 'https://h/a'"), ":2:57: pools[0].backends[1].url: the same ba"),
        (GOOD + "listen: localhost:8190\n", ":1:1: admin: takes the port of listen (localhost:8190)"),
        (GOOD.replace("'sim:'", "'http://h', api_key: 'a b'"), ":2:57: pools[0].backends[0].api_key: is empty"),
        (GOOD + "aliases: {a b: m}\n", ":3:16: aliases.(a name not shown): should be 1 to 128 characters"),
        (GOOD + "aliases: {a: b, b: m}\n", ":3:14: aliases.a: stands for another alias; give the model itself"),
        (MODELS + "aliases: {a: c}\n", ":5:14: aliases.a: stands for a model that no pool serves; these do: a1, b1"),
        (MODELS + "aliases: {a1: b1}\n", ":5:15: aliases.a1: is the name of a model that a pool serves"),
        (MODELS.replace("b1]", "b1], fallback: b1"), ":4:39: pools[1].fallback: should be a model that another"),
        (MODELS.replace("b1]", "b1], fallback: c"), ":4:39: pools[1].fallback: should be a model that another"),
        (GOOD + "limits: {waiting_comment_s: 0}\n", ":3:29: limits.waiting_comment_s: should be greater than 0"),
        (GOOD + "usage: 'mysql://u:p@h/x'\n", ":3:8: usage: should be the path of a file for SQLite, or postgresql://"),
        (GOOD + "usage: 'postgresql://u:p#q@h:5x/d'\n", ":3:8: usage: should be the path of a file"),
        (GOOD + "usage: {url: u.db, keep_days: 1}\n", ":3:31: usage.keep_days: should be"),
        (GOOD + "usage: {url: u.db, prices: {m: {input: -1, output: 1}}}\n", ":3:40: usage.prices.m.input: should be"),
        (GOOD + "usage: {url: u.db, prices: {m: {input: 1}}}\n", ":3:32: usage.prices.m.output: "),
        (GOOD + "usage: {url: u.db, path: u.db}\n", ":3:20: usage.path: "),
        (GOOD + "log_level: warn\n", ":3:12: log_level: should be debug or info or warning or error"),
        (GOOD + "workers: 0\n", ":3:10: workers: should be greater than or equal to 1"),
        (GOOD + "workers: all\n", ":3:10: workers: should be a whole number without quotes, or auto"),
        (GOOD + "workers: 2\n", ":3:10: workers: several cannot share"),
        (GOOD + "overload: {enter: 0.5}\n", ":3:11: overload.leave: 0.85 is more than enter (0.5)"),
        (
            GOOD + "throttle: {user: {tokens: 10}, app_user: {tokens: 11}}\n",
            ":3:42: throttle.app_user: 11 tokens are more than the 10 that a user may have",
        ),
        (
            GOOD + "throttle: {app_user: {starts: 9}, app: {starts: 8}}\n",
            ":3:40: throttle.app: 8 starts are fewer than the 9 that one user may have in it",
        ),
        (GOOD + "policy: {name: fairserve, alpha: -1}\n", ":3:34: policy.alpha: should be greater than 0"),
        *[
            (GOOD.replace("'sim:'", f"{url}, each_address: true"),
             f":2:{52 + len(url)}: pools[0].backends[0].each_address: is for a url with a name")
            for url in ("'http://10.0.0.1:8'", "'http://[fd00::1]:8'", "'http://127.1:8'", "'sim:x'")
        ],
        (GOOD.replace("'sim:'", "'http://h:1', name: g, each_address: true}, {url: 'http://h:2', name: g@h"),
         ":2:106: pools[0].backends[1].name: is the name of an engine of g (each_address)"),
        (GOOD + "jwt: [{issuer: 'https://i.example/', audience: f, group_claim: o}]\n",
         ":3:64: jwt[0].group_claim: there are no `groups` that a token could name"),
        (GOOD + "tracing: {endpoint: 'collector:4318'}\n", ":3:21: tracing.endpoint: should be the http(s) url of a "),
        (GOOD + "tracing: {endpoint: 'http://me:secret@collector'}\n",
         ":3:21: tracing.endpoint: should hold no user, password, query or fragment; credentials go into OTEL"),
        (GOOD + "tracing: {sample_ratio: 1.5}\n", ":3:25: tracing.sample_ratio: should be less than or equal to 1"),
        (GOOD + "admin_token: two words\n", ":3:14: admin_token: is empty, or holds spaces, line ends or characters "),
    ],
)  # fmt: skip
def test_each_fault_has_its_place(tmp_path: Path, text: str, expected: str) -> None:
    (found,) = faults(tmp_path, text)
    assert found.startswith(expected)


def test_no_message_repeats_a_key_or_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRGATE_TEST_SECRET", "hunter2 with space")
    monkeypatch.setenv("FAIRGATE_TEST_URL", "http://me:hunter2@gpu:1")
    text = """\
pools:
  - name: ${FAIRGATE_TEST_SECRET}
    backends:
      - {url: "${FAIRGATE_TEST_URL}", api_key: "${FAIRGATE_TEST_SECRET}", engine: "${FAIRGATE_TEST_SECRET}"}
      - {url: "http://me:hunter2@gpu:2", max_num_seqs: "${FAIRGATE_TEST_SECRET}"}
tenants:
  - name: t
    keys: [fg-hunter2, {fg-hunter2-0123456789012345678901234567890123456789: x}]
usage: mysql://u:hunter2@h/x
"""
    found = faults(tmp_path, text)
    assert len(found) == 10
    assert "hunter2" not in "".join(found)


def test_the_command_line_has_the_same_faults() -> None:
    with pytest.raises(ConfigError) as caught:
        config_for_backends(["http://gpu:8000/v1", "gpu"], port=8190)
    assert [fault.path for fault in caught.value.faults] == [
        "pools[0].backends[0].url",
        "pools[0].backends[1].url",
    ]
    with pytest.raises(ConfigError, match=r"command line: admin: takes the port of listen \(127.0.0.1:8190\)"):
        config_for_backends(["http://gpu:8000"], port=8190)
    with pytest.raises(ConfigError, match=r"pools\[0\].backends: is empty; give at least one"):
        config_for_backends([])


THROTTLING = f"""\
{GOOD}overload: {{enter: 0.5, leave: 0.8}}
throttle:
  user: {{starts: -1, tokens: 1.5}}
  app_user: {{starts: 10, requests: 5}}
  app: {{requests: many}}
quota: {{tokens_per_minute: 10, tokens_per_day: 5}}
interactions: {{calls_max: 0, tokens_max: automatic, idle_s: 0}}
apps:
  - name: chat
    normal_service: []
  - name: chat
    normal_service: [1, -2]
    interactions: {{calls_max: 5}}
tenants: [{{name: t, quota: {{concurrent: 0}}}}]
state_file: ''
"""
CEILING = "should be a whole number from 1, or auto (no number: starts wait for the working set)"
IDLE = "should be a number above 0, up to 86400, or auto (longer after an answer that asks for a tool)"


def test_limits_that_are_no_limits_or_contradict_each_other(tmp_path: Path) -> None:
    assert faults(tmp_path, THROTTLING) == [
        ":3:31: overload.leave: 0.8 is more than enter (0.5): overload would end before it begins",
        f":5:18: throttle.user.starts: {CEILING}",
        f":5:30: throttle.user.tokens: {CEILING}",
        ":6:36: throttle.app_user.requests: 5 is less than starts (10), each of which is a request",
        f":7:19: throttle.app.requests: {CEILING}",
        ":8:48: quota.tokens_per_day: 5 is less than tokens_per_minute (10): never reached",
        ":9:27: interactions.calls_max: should be greater than or equal to 1",
        ":9:42: interactions.tokens_max: should be a whole number, not text; "
        "write plain decimal digits, without quotes, leading zeros, underscores or colons",
        f":9:61: interactions.idle_s: {IDLE}",
        ":12:21: apps[0].normal_service: is empty; give at least one",
        ":14:25: apps[1].normal_service[1]: should be greater than 0",
        ":15:20: apps[1].interactions.calls_max: unknown field",
        ":16:41: tenants[0].quota.concurrent: should be greater than or equal to 1",
        ":17:13: state_file: should have at least 1 character",
    ]


FORM = "should be memory, redis://HOST:PORT/DATABASE, rediss://... (TLS) or unix:///PATH"
ESCAPES = "; in a password, # is written %23, / is %2F and % is %25"


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("mem0ry", f":1:8: state: {FORM} (did you mean 'memory'?)"),
        ("reids://hunter2@h", f":1:8: state: {FORM} (did you mean 'redis'?)"),
        ("http://h:6379", f":1:8: state: {FORM}"),
        ("redis://:hunter2/x@h:6379/0", f":1:8: state: {FORM}{ESCAPES}"),
        ("redis://:hunter2#x@h", f":1:8: state: {FORM}{ESCAPES}"),
        ("redis://:hunter2@h:0", f":1:8: state: {FORM}{ESCAPES}"),
        ("redis://:hunter2@/0", f":1:8: state: {FORM}{ESCAPES}"),
        ("redis://h/zero", f":1:8: state: {FORM}{ESCAPES}"),
        ("unix://var/redis.sock", ":1:8: state: should name the file of the socket: unix:///PATH"),
        ("rediss://h?ssl_ca_cert=x", ":1:8: state: has an unknown option after the ? (did you mean 'ssl_ca_certs'?)"),
        ("redis://h?ssl_ca_certs=x", ":1:8: state: has the option ssl_ca_certs, which is for TLS: write rediss://"),
        ("redis://h?db=1", ":1:8: state: has the option db, a number with unix:// only"),
        ("{uri: 'redis://h'}", ":1:9: state.uri: unknown field (did you mean 'url'?)"),
        (
            "{url: 'redis://h', limits_without_redis: refse}",
            ":1:49: state.limits_without_redis: should be share or refuse (did you mean 'refuse'?)",
        ),
        ("redis://h:6379", ":1:8: state: several cannot share an engine inside a process (sim:)"),
    ],
)
def test_where_state_is_kept_has_its_faults_too(tmp_path: Path, state: str, expected: str) -> None:
    backend = "sim:" if "sim:" in expected else "http://h"
    text = f"state: {state}\n" + GOOD.replace("sim:", backend)
    (found,) = faults(tmp_path, text)
    assert found.startswith(expected)
    assert "hunter2" not in found


LISTENER = {
    "routes: [{path: v1/x, treatment: pass}]": "routes[0].path: should be a path",
    "routes: [{path: /v1/../x, treatment: pass}]": "routes[0].path: should be a path",
    "routes: [{path: /v1/x/, treatment: pass}]": "routes[0].path: should be a path",
    "routes: [{path: /v1/%78, treatment: pass}]": "routes[0].path: should be a path",
    "routes: [{path: /v1/a*, treatment: pass}]": "routes[0].path: should be a path",
    "routes: [{path: /v1/load_lora_adapter, treatment: pass}]": "routes[0].path: manages the engine",
    "routes: [{path: /Sleep, treatment: pass}]": "routes[0].path: manages the engine",
    "routes: [{path: /v1/chat/completions, treatment: pass}]": "routes[0].treatment: is for POST /v1/chat/completions",
    "routes: [{path: /v1/responses/*, methods: [GET], treatment: pass}]": "routes[0].treatment: is for GET",
    "routes: [{path: /x, methods: [TRACE], treatment: pass}]": "routes[0].methods[0]: should be GET or POST",
    "routes: [{path: /x, methods: [], treatment: pass}]": "routes[0].methods: is empty",
    "routes: [{path: /x}]": "routes[0].treatment: is missing",
    "routes: [{path: /x, treatment: pass}, {path: /x, treatment: pass}]": "routes[1].path: the same path as routes[0]",
    "trusted_proxies: [10.0.0.1/8]": "trusted_proxies[0]: should be an address or a network",
    "trusted_proxies: [proxy.example.com]": "trusted_proxies[0]: should be an address or a network",
    "cors_origins: [chat.example.com]": "cors_origins[0]: should be an origin",
    "cors_origins: ['https://chat.example.com/']": "cors_origins[0]: should be an origin",
    "cors_origins: ['*', '*']": "cors_origins: holds the same name twice",
}


@pytest.mark.parametrize("text", LISTENER)
def test_who_may_ask_what_is_checked(tmp_path: Path, text: str) -> None:
    [found] = faults(tmp_path, GOOD + text + "\n")
    assert found.partition(": ")[2].startswith(LISTENER[text]), found


def test_what_may_be_asked_beyond_what_is_known(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        GOOD + "routes: [{path: /v1/videos/*, methods: [GET, DELETE], treatment: pass}, {path: /v1/responses/*, "
        "methods: [PATCH], treatment: pass}]\ntrusted_proxies: [10.0.0.0/8, '::1']\n"
        "cors_origins: ['https://chat.example.com', 'http://localhost:3000']\n"
    )
    config = load_config(file)
    assert [route.methods for route in config.routes] == [("GET", "DELETE"), ("PATCH",)]
    assert config.trusted_proxies == ("10.0.0.0/8", "::1/128")


def test_a_variable_that_has_no_end_is_looked_for_once(tmp_path: Path) -> None:
    [fault] = faults(tmp_path, GOOD + "admin: '" + "${X:-" * 80_000 + "'\n")
    assert fault.endswith("write a variable as ${NAME} or ${NAME:-default}, and a plain ${ as $${")


def test_a_flood_of_faults_is_cut_and_no_more_is_kept_than_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count, rest in ((150, "50"), (2 * FAULTS_FOUND_MAX, "many")):
        found = faults(tmp_path, GOOD + "".join(f"x{i}: 1\n" for i in range(count)))
        assert (len(found), found[-1]) == (101, f": and {rest} more faults")
    monkeypatch.setattr(load, "NODES_MAX", 1000)
    assert faults(tmp_path, f"a: [{'a,' * 1000}]") == [": holds more than 1000 values"], "before they are looked at"
