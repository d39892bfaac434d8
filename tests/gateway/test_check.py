"""`fairgate check` says what would fail at the start, and `serve` fails with the same words."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from gateway.config.memory_bounds import MEMORY_MAX_LEAST, MemoryBounds
from gateway.config.sections.keys import hash_key
from tests.commands import run
from tests.gateway.capture import Peer, Seen, Upstream, answer
from tests.gateway.live import MODEL, Starter, chat, until
from tests.kit.served import config_file

URL = "http://127.0.0.1:1"


def with_tokenizer(directory: Path, tokenizer: str) -> str:
    return config_file(directory, URL, pools=[{"name": "p", "backends": [{"url": URL}], "tokenizer": tokenizer}])


async def checked(file: str) -> tuple[int, list[str]]:
    """The exit code, and what is said of the file, without its name."""
    code, out, said = await run("check", file)
    assert ("ok: " in out) == (code == 0)
    return code, [line.removeprefix(file) for line in said.splitlines()]


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        ("{tmp}/none.json", "there is no file {tmp}/none.json"),
        ("{tmp}/broken.json", "{tmp}/broken.json is no tokenizer.json that can be loaded: "),
        ("{tmp}/other.json", "{tmp}/other.json is no tokenizer.json that can be loaded: "),
        ("tiktoken:o300k_base", "tiktoken has no 'o300k_base'; it has "),
    ],
)
async def test_a_tokenizer_that_cannot_be_used(tmp_path: Path, tokenizer: str, said: str) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text("{}")
    file = with_tokenizer(tmp_path, tokenizer.format(tmp=tmp_path))
    code, [line] = await checked(file)
    assert code == 2
    assert re.match(r":1:\d+: pools\[0\].tokenizer: ", line)
    assert said.format(tmp=tmp_path) in line


async def test_a_start_fails_with_the_words_of_the_check(tmp_path: Path) -> None:
    code, _, said = await run("serve", "-c", with_tokenizer(tmp_path, "tiktoken:o300k_base"))
    assert (code, "tiktoken has no 'o300k_base'; it has " in said, "Traceback" in said) == (2, True, False)


async def test_an_encoding_that_is_not_cached_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as silent:  # a network that swallows whatever it is asked
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        silent.setblocking(False)
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
        code, [line] = await checked(with_tokenizer(tmp_path, "tiktoken:o200k_base"))
        assert code == 2
        assert "tiktoken cannot load 'o200k_base': it is not in the cache (TIKTOKEN_CACHE_DIR)" in line
        with pytest.raises(BlockingIOError):
            silent.accept()


async def test_a_tokenizer_that_can_be_used(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    file = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(file))
    assert await checked(with_tokenizer(tmp_path, str(file))) == (0, [])


@pytest.mark.parametrize(
    ("field", "path", "said"),
    [
        ("access_log", "{tmp}/none/access.log", "there is no directory {tmp}/none"),
        ("access_log", "{tmp}", "it is a directory"),
        ("access_log", "{tmp}/config.yaml/access.log", "Not a directory"),
        ("access_log", "/proc/access.log", "no file can be made in /proc ("),
        ("state_file", "/proc/learned/learned.json", "no file can be made in /proc ("),
        ("state_file", "{tmp}/config.yaml/learned.json", "Not a directory"),
        ("state_file", "{tmp}", "it is a directory"),
        ("usage", "{tmp}/config.yaml/usage.db", "Not a directory"),
    ],
)
async def test_a_file_that_cannot_be_written(tmp_path: Path, field: str, path: str, said: str) -> None:
    code, [line] = await checked(config_file(tmp_path, URL, **{field: path.format(tmp=tmp_path)}))
    assert code == 2
    assert re.match(rf":1:\d+: {field}: cannot be written: ", line)
    assert said.format(tmp=tmp_path) in line


async def test_to_check_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "old.log").write_text("a line\n")
    for log in ("new.log", "old.log"):
        fields = {"access_log": str(tmp_path / log), "state_file": str(tmp_path / "a" / "b" / "learned.json")}
        code, [line] = await checked(config_file(tmp_path, URL, **fields))
        assert (code, f"warning: state_file: there is no directory {tmp_path}/a/b: it is made" in line) == (0, True)
    assert sorted(os.listdir(tmp_path)) == ["config.yaml", "old.log"]
    assert (tmp_path / "old.log").read_text() == "a line\n"


async def test_an_admin_listener_that_is_open_to_others_is_a_warning(tmp_path: Path) -> None:
    for admin in ("0.0.0.0:8190", "[::]:0", "10.0.0.1:8190", "gateway.example.com:8190"):
        code, [line] = await checked(config_file(tmp_path, URL, admin=admin))
        assert code == 0
        assert re.match(r":1:\d+: warning: admin: is open to other machines.*Set admin_token", line)
    for admin in ("127.0.0.2:8190", "[::1]:8190", "localhost:0"):
        assert await checked(config_file(tmp_path, URL, admin=admin)) == (0, [])
    assert await checked(config_file(tmp_path, URL, admin="0.0.0.0:8190", admin_token="a" * 32)) == (0, [])


async def test_a_folder_that_is_made_and_a_key_that_has_expired_are_warnings(tmp_path: Path) -> None:
    keys = [{"hash": hash_key(each), "expires": day} for each, day in (("a", "9000-01-31"), ("b", "2001-01-31"))]
    file = config_file(tmp_path, URL, usage=str(tmp_path / "var" / "usage.db"), tenants=[{"name": "t", "keys": keys}])
    code, lines = await checked(file)
    assert code == 0
    said = "\n".join(lines)
    assert "warning: tenants[0].keys[1].expires: the key has expired (2001-01-31): remove it" in said
    assert f"warning: usage: there is no directory {tmp_path}/var: it is made at the start" in said
    assert len(lines) == 2
    (tmp_path / "var").mkdir()
    assert len((await checked(file))[1]) == 1


async def test_warnings_and_faults_stand_side_by_side(tmp_path: Path) -> None:
    code, lines = await checked(config_file(tmp_path, URL, admin="0.0.0.0:8190", access_log=str(tmp_path)))
    assert code == 2
    assert ["warning" in line for line in lines] == [False, True]


# --- a backend behind a path ---


async def test_a_backend_behind_a_path_is_asked_there_for_everything(start: Starter) -> None:
    asked: list[str] = []
    cards = b'{"object":"list","data":[{"id":"%b","object":"model","owned_by":"vllm"}]}' % MODEL.encode()

    async def script(seen: Seen, peer: Peer) -> None:
        path = seen.line.split()[1].decode()
        asked.append(path)
        known: dict[str, Any] = {"/engine-a/v1/models": cards}
        await peer.send(answer(known.get(path, b'{"usage":{"prompt_tokens":3,"completion_tokens":1}}')))

    async with Upstream(script) as upstream:
        async with start(upstream.url + "/engine-a/") as live:
            listed = (await live.get("/v1/models")).json["data"]
            assert [card["id"] for card in listed] == [MODEL]
            for path in ("/v1/chat/completions", "/tokenize"):
                assert (await live.ask(path, chat())).status == 200
            assert (await live.get("/version?a=/b")).status == 200
            await until(lambda: "/engine-a/metrics" in asked)
        assert [path for path in asked if not path.startswith("/engine-a/")] == []
        assert {"/engine-a/v1/models", "/engine-a/v1/chat/completions", "/engine-a/tokenize"} < set(asked)
        assert "/engine-a/version?a=/b" in asked
        lines = await live.lines(4)
        assert lines[1]["backend"] == upstream.url.removeprefix("http://") + "/engine-a"


@pytest.mark.parametrize(("quota", "warns"), [({"tokens_per_day": 9}, True), ({}, False)])
async def test_limits_that_need_more_memory_than_there_may_be_are_a_warning(
    tmp_path: Path, quota: dict[str, int], warns: bool
) -> None:
    most = MemoryBounds(MEMORY_MAX_LEAST, 1).size("quotas")
    tenants = [{"name": f"t{n}", "keys": [hash_key(str(n))]} for n in range(most)]
    for more in (0, 1):
        tenants += [{"name": "one-more", "keys": [hash_key("more")]}] * more
        fields = {"tenants": tenants, "quota": quota, "memory_max": MEMORY_MAX_LEAST}
        code, said = await checked(config_file(tmp_path, URL, **fields))
        assert (code, len(said)) == (0, more if warns else 0)
    if warns:
        assert f"memory_max: limits count {most + 1} tenants" in said[0]
        enough = int(re.findall(r"(\d+) has room", said[0])[0])
        code, said = await checked(config_file(tmp_path, URL, **fields | {"memory_max": enough}))
        assert (code, said) == (0, [])
        code, said = await checked(config_file(tmp_path, URL, **fields | {"memory_max": enough - (enough // 500)}))
        assert len(said) == 1, "it is the least"
