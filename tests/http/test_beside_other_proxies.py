"""Every case of the table runs against fairgate, nginx and HAProxy, each in front of the same engine.

Of fairgate more is asked: the engine sees exactly the requests whose answers the client has got, in their order, and
not a byte besides.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from bench.stack import nginx, process, wait_ready
from gateway.config.sections.keys import hash_key
from tests.gateway.capture import Peer, Seen, Upstream, answer
from tests.gateway.live import Starter
from tests.http.conformance import BODY, CASES, FOLLOWER, Outcome
from tests.http.http_raw import exchange, statuses_of
from tests.http.other_proxies import HAPROXY, NGINX, Difference
from tests.ports import free_port
from tests.waiting import WAIT_S

TENANTS = [{"name": "t", "keys": [hash_key("known")]}]
WAITS_MS = 1000
"""How long nginx and HAProxy wait for the rest of a request: a wait is seen as an end without an answer, or a 408."""
SERVED = re.compile(rb"(?i)^x-served: ([0-9]+)\r$", re.M)

NGINX_SERVER = """
    upstream engine {{ server {upstream}; keepalive 8; }}
    server {{
        listen 127.0.0.1:{port};
        client_max_body_size 32m;
        client_header_timeout {wait_ms}ms;
        client_body_timeout {wait_ms}ms;
        lingering_timeout {wait_ms}ms;
        location / {{
            proxy_pass http://engine;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
        }}
    }}
"""
HAPROXY_CONF = """
global
    tune.bufsize 65536
defaults
    mode http
    timeout connect 300s
    timeout server {wait_ms}ms
    timeout client {wait_ms}ms
    timeout http-request {wait_ms}ms
frontend clients
    bind 127.0.0.1:{port}
    default_backend engine
backend engine
    server engine {upstream}
"""


Through = Callable[[Upstream, Path], AbstractAsyncContextManager[int]]


class Engine:
    """Numbers its answers, so that each can be found again at the client."""

    def __init__(self) -> None:
        self.answers = 0

    async def __call__(self, seen: Seen, peer: Peer) -> None:
        self.answers += 1
        number = b"X-Served: %d" % self.answers
        whole = answer(b'{"usage":{"prompt_tokens":3,"completion_tokens":1}}', number)
        if seen.line.startswith(b"HEAD "):
            whole = whole[: whole.index(b"\r\n\r\n") + 4]
        await peer.send(whole)


@asynccontextmanager
async def through_fairgate(upstream: Upstream, folder: Path) -> AsyncIterator[int]:
    async with Starter(folder)(upstream.url, tenants=TENANTS) as live:
        yield live.gateway.port


@asynccontextmanager
async def through_nginx(upstream: Upstream, folder: Path) -> AsyncIterator[int]:
    port = free_port()
    http = NGINX_SERVER.format(upstream=upstream.url.removeprefix("http://"), port=port, wait_ms=WAITS_MS)
    async with nginx(http, port, "/health"):
        yield port


@asynccontextmanager
async def through_haproxy(upstream: Upstream, folder: Path) -> AsyncIterator[int]:
    port, conf, log = free_port(), folder / "haproxy.cfg", folder / "haproxy.log"
    conf.write_text(HAPROXY_CONF.format(upstream=upstream.url.removeprefix("http://"), port=port, wait_ms=WAITS_MS))
    binary = shutil.which("haproxy") or "/usr/sbin/haproxy"
    with process([binary, "-db", "-f", str(conf)], log) as child:
        await wait_ready(f"http://127.0.0.1:{port}", "/health", child, log, WAIT_S)
        yield port


async def outcome(upstream: Upstream, port: int, sent: bytes) -> tuple[Outcome, bytes]:
    """What becomes of a case with a good request right behind it, and all that the client got."""
    before = len(upstream.requests)
    answers = await exchange(port, sent + FOLLOWER)
    reached = tuple(seen.line for seen in upstream.requests[before:])
    return Outcome(tuple(statuses_of(answers)), reached), answers


async def test_fairgate_does_as_the_table_says_and_nothing_is_smuggled(tmp_path: Path) -> None:
    engine = Engine()
    async with Upstream(engine) as upstream, through_fairgate(upstream, tmp_path) as port:
        for name, case in CASES.items():
            served, before = engine.answers, len(upstream.requests)
            found, answers = await outcome(upstream, port, case.sent)
            assert found == case.outcome, name
            assert [int(number) for number in SERVED.findall(answers)] == [*range(served + 1, engine.answers + 1)], name
            for seen in upstream.requests[before:]:
                assert seen.unsalted == (BODY if seen.line.startswith(b"POST") else b""), name
        assert upstream.unread == []


@pytest.mark.parametrize(
    ("program", "through", "differences"),
    [("nginx", through_nginx, NGINX), ("haproxy", through_haproxy, HAPROXY)],
    ids=["nginx", "haproxy"],
)
async def test_another_proxy_does_the_same_but_for_what_is_listed(
    program: str, through: Through, differences: tuple[Difference, ...], tmp_path: Path
) -> None:
    if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None:
        pytest.skip(f"{program} is not installed, and could not be: `make servers` does it as root on Debian")
    expected = {name: {case.outcome} for name, case in CASES.items()}
    for difference in differences:
        for name in difference.cases:
            usual, other = CASES[name].outcome, difference.outcome(CASES[name])
            assert expected[name] == {usual} != {other}, f"{name} is listed twice, or is no difference"
            expected[name] = {usual, other} if difference.only_sometimes else {other}
    async with Upstream(Engine()) as upstream, through(upstream, tmp_path) as port:
        wrong: dict[str, object] = {**CASES}
        for _ in range(3):  # a machine that is slow for a moment looks like a wait
            found = {name: (await outcome(upstream, port, CASES[name].sent))[0] for name in wrong}
            wrong = {name: one for name, one in found.items() if one not in expected[name]}
    assert wrong == {}
