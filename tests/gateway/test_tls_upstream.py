"""Towards an engine that speaks TLS the gateway knows whom it speaks to, shows who it is, and says what is wrong."""

from __future__ import annotations

import re
import ssl
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.certificates import Authority
from tests.gateway.capture import DONE, OK, STREAM, Upstream, replies, token
from tests.gateway.live import CHAT, Starter, chat


def pools(url: str, tls: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"name": "pool", "backends": [{"url": url, **({"tls": tls} if tls else {})}]}]


async def test_requests_probes_models_and_metrics_go_over_tls(start: Starter, authority: Authority) -> None:
    async with Upstream(replies(STREAM), ssl=authority.server()) as upstream:
        assert upstream.url.startswith("https://")
        async with start(pools=pools(upstream.url, {"ca_file": authority.ca})) as live:
            assert [card["id"] for card in (await live.get("/v1/models")).json["data"]] == ["simulated"]
            got = await live.ask(CHAT, chat(stream=True))
            assert (got.status, got.body) == (200, token("a") + DONE)
            await upstream.asked_for_metrics.wait()


Speaks = Callable[[Authority], ssl.SSLContext | None]
Says = Callable[[Authority, Authority], dict[str, Any]]


def old(authority: Authority) -> ssl.SSLContext:
    context = authority.server("old")
    with warnings.catch_warnings(action="ignore"):
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    return context


def asks(authority: Authority) -> ssl.SSLContext:
    return authority.server(asks_clients=True)


def of_another_host(authority: Authority) -> ssl.SSLContext:
    return authority.server("shown", host="DNS:other.example")


def known(authority: Authority, stranger: Authority) -> dict[str, Any]:
    return {"ca_file": authority.ca}


def shown(authority: Authority, stranger: Authority) -> dict[str, Any]:
    certificate, key = authority.sign("gateway")
    return {"ca_file": authority.ca, "cert_file": certificate, "key_file": key}


class Meeting(NamedTuple):
    """What an engine speaks, what the config says of it, and why it is not asked: "" where it is."""

    speaks: Speaks
    says: Says
    why_not: str = ""
    scheme: str = "https"


MEETINGS: dict[str, Meeting] = {
    "a certificate is shown where it is wanted": Meeting(asks, shown),
    "a certificate is shown where none is wanted": Meeting(Authority.server, shown),
    "none is shown where one is wanted": Meeting(asks, known, "probe: backend"),
    "no authority is named": Meeting(Authority.server, lambda authority, stranger: {}, "is not trusted.*ca_file"),
    "another authority": Meeting(
        Authority.server, lambda authority, stranger: {"ca_file": stranger.ca}, "is not trusted.*ca_file"
    ),
    "another host": Meeting(of_another_host, known, "is not trusted.*IP address mismatch"),
    "it is taken on trust": Meeting(of_another_host, lambda authority, stranger: {"verify": False}),
    "an old version": Meeting(old, known, "probe: backend"),
    "the engine speaks TLS only": Meeting(Authority.server, lambda authority, stranger: {}, "probe: backend", "http"),
    "the engine speaks no TLS": Meeting(lambda authority: None, lambda authority, stranger: {}, "probe: backend"),
}


@pytest.mark.parametrize("name", MEETINGS)
async def test_only_an_engine_that_is_known_and_speaks_alike_is_asked(
    start: Starter, authority: Authority, stranger: Authority, name: str
) -> None:
    speaks, says, why_not, scheme = MEETINGS[name]
    async with Upstream(replies(OK), ssl=speaks(authority)) as upstream:
        url = f"{scheme}://{upstream.url.partition('://')[2]}"
        async with start(pools=pools(url, says(authority, stranger))) as live:
            [backend] = live.gateway.pools[0].backends.values()
            assert backend.health.healthy == (why_not == "")
            assert re.search(why_not, backend.health.reason)
            assert (await live.ask(CHAT, chat())).status == (503 if why_not else 200)
            assert len(upstream.requests) == (0 if why_not else 1)
