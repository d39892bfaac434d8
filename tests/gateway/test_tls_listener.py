"""Clients speak TLS: all that holds without it holds with it, and who cannot agree on it takes nothing from others."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import shutil
import signal
import socket
import ssl
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

import gateway.http.server
import gateway.http.tls.certificates
from tests.certificates import Authority
from tests.commands import running
from tests.gateway.capture import DONE, OK, Peer, Seen, Upstream, answer, replies, token
from tests.gateway.live import CHAT, WAIT_S, Live, Starter, chat, simulated, until
from tests.http.http_raw import exchange
from tests.kit.served import Streams, config_file


class Tls(NamedTuple):
    """The listener's section of the config, and who signed its certificate."""

    section: dict[str, str]
    authority: Authority


@pytest.fixture(scope="module")
def tls(authority: Authority) -> Tls:
    certificate, key = authority.sign("listener")
    return Tls({"cert_file": certificate, "key_file": key}, authority)


class Client:
    """One connection of a client that speaks TLS byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, live: Live, context: ssl.SSLContext, sock: socket.socket | None = None) -> AsyncIterator[Client]:
        where: dict[str, Any] = {"host": "127.0.0.1", "port": live.gateway.port} if sock is None else {"sock": sock}
        reader, writer = await asyncio.open_connection(**where, ssl=context, server_hostname="127.0.0.1")
        try:
            yield cls(reader, writer)
        finally:
            writer.transport.abort()

    def ask(self, body: bytes, *fields: bytes) -> None:
        lines = [b"POST /v1/chat/completions HTTP/1.1", b"Host: x", b"Authorization: Bearer k", *fields]
        lines += [b"Content-Type: application/json", b"Content-Length: %d" % len(body)]
        self.writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)

    async def rest(self) -> bytes:
        """What comes until the end, or until the connection breaks."""
        found = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(WAIT_S):
                while piece := await self.reader.read(65536):
                    found += piece
        return found

    @property
    def shown(self) -> str:
        """Which certificate it was shown."""
        found = self.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return hashlib.sha256(found).hexdigest()


def faults(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log has of our own mistakes: a client's are none."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def fingerprint(cert_file: str) -> str:
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(Path(cert_file).read_text())).hexdigest()


# --- what clients do ---


async def test_a_connection_is_kept_and_asked_ahead_and_large_bodies_go_both_ways(start: Starter, tls: Tls) -> None:
    text = "x" * 8_000_000
    large = answer(json.dumps({"choices": [], "said": text}).encode())

    async def engine(seen: Seen, peer: Peer) -> None:
        await peer.send(large if text.encode() in seen.body else OK)

    async with Upstream(engine) as upstream, start(upstream.url, tls=tls.section) as live:
        async with Client.of(live, tls.authority.client()) as client:
            for more, fields in (("a", ()), ("b", ()), (text, (b"Connection: close",))):
                client.ask(json.dumps(chat(more=more)).encode(), *fields)
            answers = (await client.rest()).split(b"HTTP/1.1 200 OK")
        assert [seen.json["more"] for seen in upstream.requests] == ["a", "b", text]
        assert len(answers) == 1 + 3
        assert json.loads(answers[-1].partition(b"\r\n\r\n")[2])["said"] == text


async def test_an_answer_that_breaks_off_does_not_look_whole(start: Starter, tls: Tls) -> None:
    """To HTTP/1.0 the end of the connection is the end of the answer: TLS must not say that all was well."""

    async def breaks(seen: Seen, peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{")
        peer.reset()

    async with Upstream(breaks) as upstream, start(upstream.url, tls=tls.section) as live:
        async with Client.of(live, tls.authority.client()) as client:
            body = json.dumps(chat()).encode()
            head = b"POST /v1/chat/completions HTTP/1.0\r\nAuthorization: Bearer k\r\n"
            client.writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            got = await client.rest()
        assert b" 200 " not in got[:20]


# --- who is let in ---


async def test_only_new_versions_and_http_1_are_agreed_on(
    start: Starter, tls: Tls, caplog: pytest.LogCaptureFixture
) -> None:
    async with simulated() as sim, start(sim.url, tls=tls.section) as live:
        both = tls.authority.client()
        both.set_alpn_protocols(["h2", "http/1.1"])
        async with Client.of(live, both) as client:
            assert client.writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
            assert client.writer.get_extra_info("cipher")[1] == "TLSv1.3"
        old = tls.authority.client()
        old.set_ciphers("DEFAULT:@SECLEVEL=0")
        with warnings.catch_warnings(action="ignore"):
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):  # it is told why
            async with Client.of(live, old):
                pass
        [line] = await live.lines(1)
        assert (line["outcome"], line["reason"], line["client"]) == ("refused", "malformed_http", "127.0.0.1")
        assert not faults(caplog)


async def test_a_certificate_may_be_asked_of_clients(start: Starter, stranger: Authority, tls: Tls) -> None:
    asking = {**tls.section, "client_ca_file": tls.authority.ca}
    async with Upstream(replies(OK)) as upstream, start(upstream.url, tls=asking) as live:
        for shown in (None, stranger.sign("client"), tls.authority.sign("client")):
            got = b""
            with contextlib.suppress(ssl.SSLError):  # TLS 1.3 says so with the first read
                async with Client.of(live, tls.authority.client(shown)) as client:
                    client.ask(json.dumps(chat()).encode(), b"Connection: close")
                    got = await client.rest()
            assert got.startswith(b"HTTP/1.1 200 OK" if upstream.requests else b"")
        assert got
        assert len(upstream.requests) == 1
        ends = [(line["outcome"], line["reason"]) for line in await live.lines(3)]
        assert ends == [("refused", "malformed_http")] * 2 + [("completed", "")]


async def test_who_does_not_agree_on_tls_is_closed_and_counted_and_who_only_knocks_is_not(
    start: Starter, tls: Tls, quick_sweep: None, caplog: pytest.LogCaptureFixture
) -> None:
    async with simulated() as sim, start(sim.url, tls=tls.section, limits={"client_head_s": 1}) as live:
        _, knocking = await asyncio.open_connection("127.0.0.1", live.gateway.port)
        await until(lambda: len(live.server.connections) == 1)
        knocking.close()
        await until(lambda: len(live.server.connections) == 0)
        plain = await exchange(live.gateway.port, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP" not in plain
        hello_without_end = b"\x16\x03\x01\x02\x00\x01"
        assert await exchange(live.gateway.port, hello_without_end) == b""
        lines = await live.lines(2)
        assert [line["reason"] for line in lines] == ["malformed_http", "client_too_slow"]
        assert {(line["outcome"], line["client"]) for line in lines} == {("refused", "127.0.0.1")}
        refused = {name: value for name, value in (await live.metrics()).items() if "malformed_http" in name}
        assert list(refused.values()) == [1.0]
        assert not faults(caplog)


async def test_half_a_handshake_is_a_connection_of_its_address(start: Starter, tls: Tls) -> None:
    async with simulated() as sim, start(sim.url, tls=tls.section, limits={"client_connections_max": 1}) as live:
        _, knocking = await asyncio.open_connection("127.0.0.1", live.gateway.port)
        await until(lambda: len(live.server.connections) == 1)
        with pytest.raises((ConnectionError, ssl.SSLError)):
            async with Client.of(live, tls.authority.client()):
                pass
        [line] = await live.lines(1)
        assert line["reason"] == "too_many_at_once"
        knocking.close()
        await until(lambda: len(live.server.connections) == 0)
        async with Client.of(live, tls.authority.client()):
            assert len(live.server.connections) == 1


# --- new certificates ---


class Files:
    """A pair of files that somebody rotates."""

    def __init__(self, directory: Path) -> None:
        self.cert, self.key = str(directory / "tls.crt"), str(directory / "tls.key")

    @property
    def section(self) -> dict[str, str]:
        return {"cert_file": self.cert, "key_file": self.key}

    def hold(self, pair: tuple[str, str]) -> None:
        for new, file in zip(pair, (self.cert, self.key), strict=True):
            shutil.copy(new, file + ".new")
            os.replace(file + ".new", file)


async def shown(live: Live, authority: Authority) -> str:
    async with Client.of(live, authority.client()) as client:
        return client.shown


async def test_a_new_certificate_is_shown_without_a_broken_stream(
    start: Starter, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway.http.tls.certificates, "LOOK_S", 0.01)
    first, second = authority.sign("first"), authority.sign("second")
    files, engine = Files(tmp_path), Streams()
    files.hold(first)
    async with Upstream(engine) as upstream:
        async with start(upstream.url, tls=files.section, trusting=authority.client()) as live:
            assert await shown(live, authority) == fingerprint(first[0])
            async with live.post(CHAT, chat(stream=True)) as response:
                assert await response.content.readexactly(len(token("a"))) == token("a")
                files.hold(second)
                async with asyncio.timeout(WAIT_S):
                    while await shown(live, authority) != fingerprint(second[0]):
                        pass
                engine.go_on.set()
                assert await response.content.read() == token("b", "stop") + DONE


async def test_a_pair_that_cannot_be_used_changes_nothing_and_is_named(
    start: Starter, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = authority.sign("first"), authority.sign("second")
    files = Files(tmp_path)
    files.hold(first)
    async with simulated() as sim, start(sim.url, tls=files.section) as live:
        files.hold((second[0], first[1]))
        assert not live.gateway.reload_certificates()
        os.remove(files.key)
        assert not live.gateway.reload_certificates()
        assert await shown(live, authority) == fingerprint(first[0])
        mismatch, missing = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert files.cert in mismatch
        assert "key values mismatch" in mismatch
        assert f"the key {files.key} cannot be read: No such file or directory" in missing
        files.hold(second)
        assert live.gateway.reload_certificates()
        assert await shown(live, authority) == fingerprint(second[0])


# --- what an operator sees ---


@pytest.mark.parametrize("workers", [1, 2])
async def test_the_command_serves_https_and_says_so(tmp_path: Path, tls: Tls, workers: int) -> None:
    async with Upstream(replies(OK)) as upstream:
        file = config_file(tmp_path, upstream.url, tls=tls.section, workers=workers)
        async with running("serve", "-c", file) as command:
            url = (await command.says(r"serving on (https://127\.0\.0\.1:\d+)"))[1]
            key = (await command.says(r"alice +(fg-\S+)"))[1]
            for _ in range(4):
                async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls.authority.client())) as http:
                    headers = {"authorization": f"Bearer {key}"}
                    async with http.post(url + CHAT, json=chat(), headers=headers) as response:
                        assert response.status == 200
            if workers == 1:
                await command.says(r"curl https://127\.0\.0\.1")
                await command.says(r"base_url='https://127\.0\.0\.1")
            command.signal(signal.SIGTERM)
            assert await command.ended() == 0
            assert "Traceback" not in command.said
