"""Towards an engine that speaks TLS the gateway knows whom it speaks to, shows who it is, and says what is wrong."""

from __future__ import annotations

import ssl
import warnings
from typing import Any

import pytest

from tests.certificates import Authority
from tests.gateway.capture import DONE, STREAM_END, STREAM_HEAD, Upstream, answer, chunk, replies, token
from tests.gateway.live import Live, Starter, chat

OK = answer(b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}')
CHAT = "/v1/chat/completions"


def pools(upstream: Upstream, **tls: Any) -> list[dict[str, Any]]:
    backend = {"url": upstream.url, **({"tls": tls} if tls else {})}
    return [{"name": "pool", "backends": [backend]}]


def health(live: Live) -> str:
    [backend] = live.gateway.pools[0].backends.values()
    return "" if backend.health.healthy else backend.health.reason


async def test_requests_probes_and_models_go_over_tls(start: Starter, authority: Authority) -> None:
    stream = STREAM_HEAD + chunk(token("a") + DONE) + STREAM_END
    async with Upstream(replies(stream), ssl=authority.server()) as upstream:
        assert upstream.url.startswith("https://")
        async with start(pools=pools(upstream, ca_file=authority.ca)) as live:
            assert health(live) == ""
            assert [card["id"] for card in (await live.get("/v1/models")).json["data"]] == ["simulated"]
            got = await live.ask(CHAT, chat(stream=True))
            assert (got.status, got.body) == (200, token("a") + DONE)


@pytest.mark.parametrize("mutual", ["wanted", "not wanted"])
async def test_a_client_certificate_is_shown(start: Starter, authority: Authority, mutual: str) -> None:
    certificate, key = authority.sign("gateway")
    context = authority.server(asks_clients=mutual == "wanted")
    async with Upstream(replies(OK), ssl=context) as upstream:
        tls = {"ca_file": authority.ca, "cert_file": certificate, "key_file": key}
        async with start(pools=pools(upstream, **tls)) as live:
            assert health(live) == ""
            assert (await live.ask(CHAT, chat())).status == 200


async def test_without_the_certificate_that_is_wanted_nothing_passes(start: Starter, authority: Authority) -> None:
    async with Upstream(replies(OK), ssl=authority.server(asks_clients=True)) as upstream:
        async with start(pools=pools(upstream, ca_file=authority.ca)) as live:
            assert health(live)
            assert (await live.ask(CHAT, chat())).status == 503
            assert not upstream.requests


DISTRUSTED: dict[str, tuple[dict[str, str], str]] = {
    "no authority named": ({}, "ca_file"),
    "another authority": ({"ca_file": "stranger"}, "ca_file"),
    "another host": ({"ca_file": "authority", "host": "DNS:other.example"}, "IP address mismatch"),
}


@pytest.mark.parametrize("name", DISTRUSTED)
async def test_whom_it_does_not_know_it_does_not_ask(
    start: Starter, authority: Authority, stranger: Authority, name: str
) -> None:
    made, why = DISTRUSTED[name]
    context = authority.server("shown", **({"host": made["host"]} if "host" in made else {}))
    tls = {"ca_file": {"stranger": stranger, "authority": authority}[made["ca_file"]].ca} if "ca_file" in made else {}
    async with Upstream(replies(OK), ssl=context) as upstream:
        async with start(pools=pools(upstream, **tls)) as live:
            assert "is not trusted" in health(live)
            assert why in health(live)
            assert (await live.ask(CHAT, chat())).status == 503
            assert not upstream.requests


async def test_a_certificate_may_be_taken_on_trust_if_the_config_says_so(start: Starter, authority: Authority) -> None:
    async with Upstream(replies(OK), ssl=authority.server("shown", host="DNS:other.example")) as upstream:
        async with start(pools=pools(upstream, verify=False)) as live:
            assert (await live.ask(CHAT, chat())).status == 200


async def test_old_versions_of_tls_are_not_spoken(start: Starter, authority: Authority) -> None:
    context = authority.server("old")
    with warnings.catch_warnings(action="ignore"):
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    async with Upstream(replies(OK), ssl=context) as upstream:
        async with start(pools=pools(upstream, ca_file=authority.ca)) as live:
            assert health(live)
            assert (await live.ask(CHAT, chat())).status == 503


@pytest.mark.parametrize("speaks", ["TLS only", "no TLS"])
async def test_where_only_one_side_speaks_tls_it_is_said(start: Starter, authority: Authority, speaks: str) -> None:
    async with Upstream(replies(OK), ssl=authority.server() if speaks == "TLS only" else None) as upstream:
        scheme = {"TLS only": "http", "no TLS": "https"}[speaks]
        url = f"{scheme}://{upstream.url.partition('://')[2]}"
        async with start(pools=[{"name": "pool", "backends": [{"url": url}]}]) as live:
            assert health(live)
            assert (await live.ask(CHAT, chat())).status == 503


async def test_the_metrics_are_read_over_tls(start: Starter, authority: Authority) -> None:
    async with Upstream(replies(OK), ssl=authority.server()) as upstream:
        async with start(pools=pools(upstream, ca_file=authority.ca)):
            await upstream.asked_for_metrics.wait()
