"""A key may be for some models and for a time: what its holder sees of the rest."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.config.sections.keys import hash_key
from tests.gateway.capture import Upstream, replies
from tests.gateway.live import Answer, Live, Starter, chat
from tests.kit.usage import CHAT, OK

MESSAGES = "/v1/messages"


def with_keys(**terms: dict[str, Any]) -> list[dict[str, Any]]:
    """One tenant, with a key for each of these names."""
    return [{"name": "t", "keys": [{"hash": hash_key(name), **more} for name, more in terms.items()]}]


async def test_a_key_that_has_expired_says_so(start: Starter) -> None:
    tenants = with_keys(old={"expires": "2001-01-31T12:00:00+02:00"}, good={"expires": "9000-01-31"})
    async with Upstream(replies(OK)) as upstream, start(upstream.url, tenants=tenants) as live:
        got = await live.ask(CHAT, chat(), key="old")
        found = (got.status, got.error["code"], got.error["type"])
        assert found == (401, "expired_api_key", "authentication_error")
        assert "expired at 2001-01-31 10:00:00 UTC" in got.error["message"]
        got = await live.ask(MESSAGES, chat(), key="old")
        assert (got.status, got.error["type"]) == (401, "authentication_error")
        assert [(await live.ask(CHAT, chat(), key="old")).status for _ in range(30)] == [401] * 30, "no guess"
        assert [(await live.ask(CHAT, chat(), key="good")).status for _ in range(2)] == [200, 200]
        assert len(upstream.requests) == 2


async def models_of(live: Live, key: str) -> list[str]:
    return [card["id"] for card in (await live.get("/v1/models", key=key)).json["data"]]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/embeddings", "/tokenize", "/v1/messages/count_tokens"])
async def test_other_models_do_not_exist_for_a_key(start: Starter, path: str) -> None:
    tenants = with_keys(any={}, some={"models": ["b", "later"]})
    async with Upstream(replies(OK)) as upstream:
        pools = [{"name": "pool", "models": ["a", "b", "c"], "backends": [{"url": upstream.url}]}]
        async with start(pools=pools, tenants=tenants) as live:

            async def ask(model: str | None, key: str = "some") -> Answer:
                body = {**chat(max_tokens=2), "input": "x", "prompt": "x", "model": model}
                return await live.ask(path, {name: value for name, value in body.items() if value}, key=key)

            assert await models_of(live, "any") == ["a", "b", "c"]
            assert await models_of(live, "some") == ["b"]
            for model in ("a", "c", "nonsense"):
                got = await ask(model)
                said = f"the model '{model}' does not exist, or this key may not ask for it; it may ask for: b, later"
                assert (got.status, said in got.error["message"]) == (404, True)
            missing = await ask(None)
            assert (missing.status, "'model' is missing" in missing.error["message"]) == (400, True)
            assert [(await ask("b")).status, (await ask("a", "any")).status] == [200, 200]
            assert [seen.json["model"] for seen in upstream.requests] == ["b", "a"]


async def test_a_key_for_one_model_names_it_even_where_there_is_one_pool(start: Starter) -> None:
    tenants = with_keys(any={}, some={"models": ["other"]})
    body = {"prompt": "x"}
    async with Upstream(replies(OK)) as upstream, start(upstream.url, tenants=tenants) as live:
        for path in ("/v1/completions", "/tokenize"):
            assert (await live.ask(path, body, key="some")).status == 400
            assert (await live.ask(path, body, key="any")).status == 200
        assert len(upstream.requests) == 2
