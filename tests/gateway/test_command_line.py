"""What an operator types: real processes, their addresses, files, signals and exit codes."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.config.sections.keys import hash_key
from gateway.process.gateway import Gateway
from tests.commands import run, running
from tests.gateway.capture import DONE, OK, Upstream, replies, token
from tests.gateway.live import WAIT_S, Live, Starter, chat, events, until
from tests.kit.held import Held, one_at_a_time
from tests.kit.served import Streams, config_file, is_refused, serving, status_of_one
from tests.ports import free_port

EXAMPLE = Path(__file__).parents[2] / "config.example.yaml"


# --- serve ---


async def test_serve_in_front_of_a_backend_needs_no_file() -> None:
    alice, other = "alice-has-this-key-0123456789", "another-has-this-key-987654321"
    async with Upstream(replies(OK)) as upstream:
        async with running("serve", "--backend", upstream.url, "--port", "0", "--admin-port", "0") as command:
            url = (await command.says(r"serving on (http://127\.0\.0\.1:\d+)"))[1]
            await command.says("open access: any key is accepted, each distinct key is its own tenant of equal weight")
            assert [await status_of_one(url, key) for key in (alice, other)] == [200, 200]
            command.signal(signal.SIGTERM)
            assert await command.ended() == 0
        assert [seen.line for seen in upstream.requests] == [b"POST /v1/chat/completions HTTP/1.1"] * 2
    tenants = [json.loads(line)["tenant"] for line in command.out.splitlines()]
    for key, tenant in zip((alice, other), tenants, strict=True):
        code, hashed, said = await run("keys", "hash", given=key.encode() + b"\n")
        assert (code, hashed) == (0, hash_key(key) + "\n")
        assert re.fullmatch("key-[0-9a-f]{12}", tenant)
        assert f"where any key is taken, it appears as {tenant}\n" in said


async def test_serve_prints_lines_that_work_as_printed(tmp_path: Path) -> None:
    async with serving(tmp_path, "sim:demo") as gate:
        [curl] = re.findall(r"^ +(curl .*)$", gate.command.said, re.MULTILINE)
        python = (await gate.command.says(r"(?m)^ +\S*python -c (\".*\")$"))[1]
        stream, said = await asyncio.gather(_shell(f"{curl} -sS"), _shell(f"{sys.executable} -c {python}"))
        assert stream.endswith("data: [DONE]\n\n")
        assert said.strip()


async def _shell(line: str) -> str:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_shell(line, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(WAIT_S):
        out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return out.decode()


@pytest.mark.parametrize("command", [("check",), ("serve", "-c")], ids=["check", "serve"])
async def test_a_bad_config_lists_every_fault_and_exits_with_2(tmp_path: Path, command: tuple[str, ...]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("listne: 127.0.0.1:0\npolicy: vtx\npools: []\ntenants:\n  - name: a\n    weight: -1\n")
    code, out, said = await run(*command, str(path))
    assert (code, out) == (2, "")
    lines = said.splitlines()
    assert [line.removeprefix(str(path)).split(":")[1] for line in lines] == ["1", "2", "3", "6"]
    assert "did you mean 'listen'" in lines[0]
    assert "did you mean 'vtc'" in lines[1]


async def test_check_says_what_a_good_config_holds() -> None:
    good, missing = await asyncio.gather(run("check", str(EXAMPLE)), run("check", str(EXAMPLE) + ".missing"))
    assert (good[0], good[2]) == (0, "")
    assert "3 tenants" in good[1]
    assert missing[0] == 2


@pytest.mark.parametrize(
    ("option", "whose", "field", "workers"),
    [
        ("--port", "the listener for clients", "listen", "2"),
        ("--admin-port", "the admin listener", "admin", "1"),
    ],
)
async def test_serve_on_a_taken_port_says_which_it_is(
    tmp_path: Path, option: str, whose: str, field: str, workers: str
) -> None:
    async with Upstream(replies(OK)) as upstream:
        taken = upstream.url.removeprefix("http://")
        options = (option, taken.partition(":")[2], "--workers", workers)
        code, _, said = await run("serve", "-c", config_file(tmp_path, upstream.url), *options)
    assert code == 1
    assert "Traceback" not in said
    assert f"fairgate: {whose} wants {taken}: another process listens there" in said
    assert f"Give another port with {option}, or `{field}` in the file" in said


@pytest.mark.parametrize(
    ("listen", "answering", "silent"),
    [
        pytest.param("[::]:{0}", ["127.0.0.1:{0}", "[::1]:{0}"], [], id="all of both families"),
        pytest.param("[::1]:{0}", ["[::1]:{0}"], ["127.0.0.1:{0}"], id="one family"),
        pytest.param(
            ["127.0.0.1:{0}", "127.0.0.2:{1}"], ["127.0.0.1:{0}", "127.0.0.2:{1}"], ["127.0.0.1:{1}"], id="a list"
        ),
    ],
)
async def test_a_gateway_listens_where_the_config_says(
    start: Starter, listen: Any, answering: list[str], silent: list[str]
) -> None:
    ports = free_port(), free_port()
    listen = listen.format(*ports) if isinstance(listen, str) else [each.format(*ports) for each in listen]
    fields = {"listen": listen, "admin": "[::]:0", "admin_token": "a" * 32}
    async with Upstream(replies(OK)) as upstream, start(upstream.url, **fields) as live:
        assert live.gateway.port == ports[0]
        for address in answering:
            assert await status_of_one(f"http://{address.format(*ports)}") == 200
        for address in silent:
            assert is_refused(f"http://{address.format(*ports)}")
        for host in ("127.0.0.1", "[::1]"):
            async with live.http.get(f"http://{host}:{live.gateway.admin_port}/health") as response:
                assert response.status == 200
        assert all(line["client"] in ("127.0.0.1", "::1") for line in await live.lines(len(answering)))


@pytest.mark.slow
async def test_workers_listen_at_each_address_too(tmp_path: Path) -> None:
    port = free_port()
    async with Upstream(replies(OK)) as upstream:
        file = config_file(tmp_path, upstream.url, listen=["[::]:0", f"127.0.0.2:{port}"], workers=2)
        async with running("serve", "-c", file) as command:
            found = await command.says(r"serving on http://\[::1\]:(\d+) with 2 workers")
            await command.says(r"(?s)worker \d serves.*worker \d serves")
            for address in (f"127.0.0.1:{found[1]}", f"[::1]:{found[1]}", f"127.0.0.2:{port}"):
                assert await status_of_one(f"http://{address}") == 401


FILES_MAX = 200
FEW_FILES = ("sh", "-c", f'ulimit -n {FILES_MAX}; exec "$@"', "sh")


async def test_an_address_with_more_connections_than_files_shuts_nobody_out(tmp_path: Path) -> None:
    workers = 2
    async with Upstream(Streams()) as upstream:
        file = config_file(tmp_path, upstream.url, workers=workers)
        async with running("serve", "-c", file, by=FEW_FILES) as command:
            port = int((await command.says(r"serving on http://[^:]+:(\d+)"))[1])
            key = (await command.says(r"alice +(fg-\S+)"))[1]
            await command.says(r"limits.connections_max is \d+, and the limit of open files \(ulimit -n\) allows 68")
            taken = [await asyncio.open_connection("127.0.0.1", port) for _ in range(workers * (FILES_MAX + 30))]
            assert b"too_many_at_once" in await taken[-1][0].read()
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
            head = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode())
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            for _, each in (*taken, (reader, writer)):
                each.close()


PRINTS_SWITCH_INTERVAL = """
import atexit, runpy, sys
atexit.register(lambda: print("a thread has its turn for", sys.getswitchinterval(), flush=True))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


async def test_no_stream_waits_while_a_thread_computes() -> None:
    options = ("--backend", "sim:demo", "--port", "0", "--admin-port", "0")
    async with running("serve", *options, by=(sys.executable, "-c", PRINTS_SWITCH_INTERVAL)) as gateway:
        await gateway.says("serving on")
        gateway.signal(signal.SIGTERM)
        found = await gateway.says(r"a thread has its turn for ([\d.]+)")
        assert float(found[1]) <= 0.0005


async def test_options_of_serve_go_before_the_file(tmp_path: Path) -> None:
    port, admin_port, log = free_port(), free_port(), tmp_path / "requests.log"
    given = ["--host", "127.0.0.2", "--port", str(port), "--admin-port", str(admin_port), "--access-log", str(log)]
    async with Upstream(replies(OK)) as upstream:
        file = config_file(tmp_path, upstream.url, listen="127.0.0.1:1", admin="127.0.0.1:2", access_log="stdout")
        async with running("serve", "-c", file, *given, "--log-level", "warning") as command:
            found = await command.says(r"serving on (http://\S+), admin on (http://[^ ]+:\d+)")
            assert (found[1], found[2]) == (f"http://127.0.0.2:{port}", f"http://127.0.0.1:{admin_port}")
            assert str(log) in (await command.says(r"one line for each request: (.*)"))[1]
            assert await status_of_one(found[1], (await command.says(r"alice +(fg-\S+)"))[1]) == 200
            command.signal(signal.SIGTERM)
            assert await command.ended() == 0
            assert command.out == b""
            assert json.loads(log.read_text())["tenant"] == "alice"
            assert "INFO" not in command.said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "--backend"),
        (("-c", "{config}", "--backend", "http://x:1"), "--backend"),
        (("-c", "{config}", "--port", "70000"), "'--port'"),
        (("-c", "{config}", "--host", "a b"), "'--host'"),
        (("-c", "{config}", "--host", "x:1"), "'--host'"),
        (("-c", "{config}", "--port", "1", "--admin-port", "1"), "admin: takes the port of listen"),
    ],
)
async def test_options_that_cannot_be_are_refused(tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    config = config_file(tmp_path, "http://127.0.0.1:1")
    code, out, said = await run("serve", *[option.format(config=config) for option in options])
    assert (code, out) == (2, "")
    assert says in said


async def test_healthcheck(tmp_path: Path) -> None:
    async with serving(tmp_path, f"http://127.0.0.1:{free_port()}") as gate:
        await gate.command.says("not ready: pool pool has no backend in service")
        code, _, said = await run("healthcheck", "--admin", gate.admin)
        assert (code, "no backend in service" in said) == (1, True)
    async with serving(tmp_path, "sim:demo") as gate:
        assert (await run("healthcheck", "--admin", gate.admin))[0] == 0
        file = config_file(tmp_path, "sim:demo", admin=gate.admin.removeprefix("http://"))
        assert (await run("healthcheck", "-c", file))[0] == 0
        assert (await run("healthcheck", "--admin", "nonsense"))[0] == 2
        gate.command.signal(signal.SIGINT)
        assert await gate.command.ended() == 0
    code, _, said = await run("healthcheck", "--admin", gate.admin)
    assert code == 1
    assert "Traceback" not in said


# --- signals ---


@pytest.mark.parametrize("workers", [1, 2])
async def test_sigterm_lets_a_stream_end_and_takes_no_more(tmp_path: Path, workers: int) -> None:
    engine = Streams()
    async with Upstream(engine) as upstream, serving(tmp_path, upstream.url, workers=workers) as gate:
        async with gate.ask() as response:  # leaves a connection that is kept open
            assert (await response.read(), response.status) == (OK.partition(b"\r\n\r\n")[2], 200)
        async with gate.ask(stream=True) as response:
            assert await response.content.readexactly(len(token("a"))) == token("a")
            gate.command.signal(signal.SIGTERM)
            await gate.command.says("draining")
            await until(lambda: is_refused(gate.url))
            with pytest.raises(aiohttp.ClientConnectionError):
                await gate.ask()
            async with gate.http.get(gate.admin + "/ready") as ready:
                assert ready.status == 503
                assert "shutting down" in str((await ready.json())["why_not"])  # a worker without requests has ended
            engine.go_on.set()
            assert await response.content.read() == token("b", "stop") + DONE
        assert await gate.command.ended() == 0
        log = [json.loads(line) for line in gate.command.out.splitlines()]
        assert [line["outcome"] for line in log] == ["completed"] * 2
        assert "Traceback" not in gate.command.said
        assert len(upstream.requests) == 2


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize("came_before", [b"", HEAD], ids=["nothing", "a part"])
async def test_a_request_on_a_connection_from_before_the_end_is_served(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, came_before: bytes
) -> None:
    """A connection that has sent nothing has some time for it; one that has begun, as long as others have."""
    monkeypatch.setattr("gateway.process.gateway.ARRIVAL_S", 0.0 if came_before else WAIT_S)
    body = json.dumps(chat()).encode()
    request = HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    async with Upstream(replies(OK)) as upstream, aiohttp.ClientSession() as http:
        live = Live(Gateway(start.config(upstream.url)), http, tmp_path)
        await live.gateway.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", live.gateway.port)
        writer.write(came_before)
        await until(lambda: [each.has_begun() for each in live.server.connections] == [bool(came_before)])
        stopping = asyncio.create_task(live.gateway.stop(WAIT_S))
        await until(lambda: is_refused(live.url))
        writer.write(request.removeprefix(came_before))
        answer = await reader.read()
        writer.close()
        await stopping
        assert answer.startswith(b"HTTP/1.1 200 OK"), answer
        assert b"connection: close" in answer


@pytest.mark.parametrize(
    ("drain_s", "workers", "second"),
    [(0.1, 1, None), (3600, 1, signal.SIGTERM), (3600, 2, signal.SIGINT)],
    ids=["deadline", "second signal", "second signal to workers"],
)
async def test_a_stream_that_is_not_waited_for_ends_with_a_visible_error(
    tmp_path: Path, drain_s: float, workers: int, second: signal.Signals | None
) -> None:
    fields = {"drain_s": drain_s, "workers": workers}
    async with Upstream(Streams()) as upstream, serving(tmp_path, upstream.url, **fields) as gate:
        async with gate.ask(stream=True) as response:
            await response.content.readexactly(len(token("a")))
            gate.command.signal(signal.SIGTERM)
            if second is not None:
                await gate.command.says("draining")
                await until(lambda: is_refused(gate.url))
                gate.command.signal(second)
            rest = await response.content.read()
        assert DONE not in rest
        assert events(rest)[-1]["error"]["code"] == "draining"
        assert await gate.command.ended() == 0
        [line] = [json.loads(line) for line in gate.command.out.splitlines()]
        assert (line["outcome"], line["reason"], line["tokens_out"]) == ("failed", "draining", 1)
        assert "Traceback" not in gate.command.said


async def test_what_waits_is_not_sent_when_the_time_to_drain_is_over(start: Starter) -> None:
    async with Upstream(Held()) as upstream, aiohttp.ClientSession() as http:
        config = start.config(pools=one_at_a_time(upstream.url))
        live = Live(Gateway(config), http, Path(config.access_log))
        await live.gateway.start()
        asked = [asyncio.create_task(live.ask("/v1/chat/completions", chat())) for _ in range(3)]
        await until(lambda: live.engine.dispatched == 1 and live.engine.queued == 2)
        await live.gateway.stop(0)
        assert [(await each).status for each in asked] == [503] * 3
        assert sorted(line["backend"] or "" for line in await live.lines(3)) == [
            "",
            "",
            config.pools[0].backends[0].name,
        ]


# --- the other commands ---


async def test_sim_is_a_vllm_look_alike() -> None:
    async with running("sim", "--port", "0", "--model", "m1", "--model", "m2") as command:
        url = (await command.says(r"(http://127\.0\.0\.1:\d+)"))[1]
        async with aiohttp.ClientSession() as http, http.get(url + "/v1/models") as response:
            assert [card["id"] for card in (await response.json())["data"]] == ["m1", "m2"]
        command.signal(signal.SIGINT)
        await command.ended()
    assert "Traceback" not in command.said
    code, _, said = await run("sim", "--port", "0", "--profile", "nonsense")
    assert code == 2
    assert "demo" in said


async def test_a_start_prints_no_key_where_keys_can_be_made(tmp_path: Path) -> None:
    config = config_file(
        tmp_path, "http://127.0.0.1:9", tenants=[{"name": "alice"}, {"name": "bob"}], usage=str(tmp_path / "u.db")
    )
    code, out, _ = await run("keys", "create", "--tenant", "alice", "-c", config)
    assert (code, "key:  fg-" in out) == (0, True)
    async with running("serve", "-c", config) as command:
        await command.says("without a key in the config: alice, bob\n.*fairgate keys create --tenant alice -c FILE")
        command.signal(signal.SIGTERM)
        assert await command.ended() == 0
        assert "fg-" not in command.said


async def test_keys_are_made_and_hashed_as_the_config_wants_them() -> None:
    code, out, _ = await run("keys", "create")
    found = re.fullmatch(r"key:  (fg-\S{43})\nhash: (sha256:[0-9a-f]{64})\n", out)
    assert code == 0
    assert found is not None
    assert hash_key(found[1]) == found[2]
    assert (await run("keys", "hash", given=b"\n"))[0] == 2


async def test_a_key_that_could_be_guessed_is_not_hashed() -> None:
    for key in ("0123456789abcdefghijklm", "abc" * 12):
        code, out, said = await run("keys", "hash", given=f"{key}\n".encode())
        assert (code, out, key in said) == (2, "", False)
        assert re.search("at least 24 characters, and 10 different ones .*`fairgate keys create` makes one", said)
    assert (await run("keys", "hash", given=b"0123456789abcdefghijklmn\n"))[0] == 0


async def test_it_says_urls_that_a_browser_takes_whatever_it_listens_on(tmp_path: Path) -> None:
    async with Upstream(OK) as upstream:
        file = config_file(tmp_path, upstream.url, listen="[::1]:0", admin="0.0.0.0:0", admin_token="a" * 32)
        async with running("serve", "-c", file) as command:
            found = await command.says(r"serving on http://\[::1\]:\d+, admin on (http://127\.0\.0\.1:\d+) ")
            async with aiohttp.ClientSession() as http, http.get(f"{found[1]}/health") as reply:
                assert reply.status == 200
