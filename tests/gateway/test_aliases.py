"""Models by other names or none, or for some keys: what the engine is asked, what clients read, who answers instead."""

from __future__ import annotations

import json
from itertools import product
from typing import Any
from urllib.parse import quote

import pytest
from yarl import URL

from gateway.config.sections.keys import hash_key
from gateway.proxy.model_name_filter import CANDIDATES_MAX, ModelNameFilter
from tests.gateway.capture import DONE, Peer, Seen, Upstream, answer, named, replies, streamed
from tests.gateway.live import CHAT, MODEL, Answer, Live, Starter, chat, events, simulated, until
from tests.gateway.playbook import ASKED
from tests.kit.usage import OK
from tests.ports import free_port

ALIAS = "gpt-4o"
ALIASES = {ALIAS: MODEL, "grüße/gpt": MODEL}
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


async def test_an_answer_has_the_name_that_was_asked(start: Starter) -> None:
    async def script(seen: Seen, peer: Peer) -> None:
        shown = {"model": seen.json["model"], "text": f'"model":"{MODEL}"', "usage": {"prompt_tokens": 1}}
        await peer.send(answer(json.dumps(shown).encode()))

    text = "Hello"
    bodies: dict[str, dict[str, Any]] = {
        CHAT: chat(text), RESPONSES: {"input": text}, MESSAGES: chat(text, max_tokens=2),
        "/v1/completions": {"prompt": text}, "/v1/embeddings": {"input": text},
    }  # fmt: skip
    async with Upstream(script) as upstream, start(upstream.url, aliases=ALIASES) as live:
        for (path, asked), size, alias in product(bodies.items(), (1, 400_000), ALIASES):
            body = asked | {"model": alias, "priority": 7, "stream_options": None, "padding": "x" * size}
            got = await live.ask(path, json.dumps(body).encode())
            assert (got.status, got.json["model"]) == (200, alias), path
            assert got.json["text"] == f'"model":"{MODEL}"', "what is generated stays as it is"
            kept = {name: value for name, value in body.items() if name != "priority"}
            assert upstream.requests.pop().json == kept | {"model": MODEL}, path
        assert {line["model"] for line in await live.lines(20)} == {MODEL}


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_each_chunk_of_a_stream_has_the_name_that_was_asked(start: Starter, path: str) -> None:
    body = {**ASKED[path], "model": ALIAS, "stream": True, "max_tokens": 5, "max_output_tokens": 5}
    async with simulated(time_scale=0) as sim, start(sim.url, aliases=ALIASES) as live:
        aliased, plain = await live.ask(path, body), await live.ask(path, body | {"model": MODEL})
        named_models = [model for event in events(aliased.body) if event != "[DONE]" for model in models_in(event)]
        assert set(named_models) == {ALIAS}
        assert len(named_models) == len([model for event in events(plain.body) for model in models_in(event)])
        assert [line["tokens_out"] for line in await live.lines(2)] == [5, 5]


def models_in(value: Any) -> list[str]:
    if not isinstance(value, dict):
        return []
    own = [value["model"]] if "model" in value else []
    return own + [model for inner in value.values() for model in models_in(inner)]


async def test_a_long_answer_and_a_long_event_have_it_too(start: Starter) -> None:
    long = "y" * 600_000
    kept = {"model": MODEL}
    shown = {"metadata": kept, "output": [long], "tools": [kept], "model": MODEL, "status": "completed"}
    event = named("response.completed", response=shown)

    async def script(seen: Seen, peer: Peer) -> None:
        if seen.json.get("stream"):
            await peer.send(streamed(event))
        else:
            whole = {"metadata": kept, "text": long, "model": MODEL, "usage": {"prompt_tokens": 1}}
            await peer.send(answer(json.dumps(whole).encode()))

    limits = {"response_buffer_bytes_max": 100_000}
    async with Upstream(script) as upstream, start(upstream.url, aliases=ALIASES, limits=limits) as live:
        whole = await live.ask(CHAT, chat() | {"model": ALIAS})
        assert (whole.json["model"], whole.json["metadata"], len(whole.json["text"])) == (ALIAS, kept, len(long))
        by_events = await live.ask(RESPONSES, {"model": ALIAS, "input": "x", "stream": True})
        assert events(by_events.body)[0]["response"] == shown | {"model": ALIAS}


async def test_a_request_beside_the_queue_is_asked_by_the_engine_s_name(start: Starter) -> None:
    async with Upstream(replies(answer(b"{}"))) as upstream, start(upstream.url, aliases=ALIASES) as live:
        assert (await live.ask("/tokenize", {"model": ALIAS, "prompt": "x"})).status == 200
        assert upstream.requests[0].json == {"model": MODEL, "prompt": "x"}


async def card_of(live: Live, name: str, key: str = "k") -> Answer:
    """What is said of one model, as a client asks for it that escapes nothing but what it must."""
    url, headers = URL(f"{live.url}/v1/models/{name}", encoded=True), {"authorization": f"Bearer {key}"}
    async with live.http.get(url, headers=headers) as response:
        return await Answer.of(response)


async def test_neither_aliases_nor_models_exist_for_keys_that_may_not_ask_for_them(start: Starter) -> None:
    keys = [
        {"hash": hash_key("by-model"), "models": [MODEL]},
        {"hash": hash_key("by-alias"), "models": [ALIAS]},
        {"hash": hash_key("neither"), "models": ["other"]},
    ]
    pools = [{"name": "pool", "models": [MODEL, "other"], "backends": [{"url": "sim:demo"}]}]
    async with start(pools=pools, aliases={ALIAS: MODEL}, tenants=[{"name": "t", "keys": keys}]) as live:
        for key, listed, statuses in (
            ("by-model", [MODEL, ALIAS], [200, 200]),
            ("by-alias", [ALIAS], [200, 404]),
            ("neither", ["other"], [404, 404]),
        ):
            assert [card["id"] for card in (await live.get("/v1/models", key=key)).json["data"]] == listed
            for model, status in zip((ALIAS, MODEL), statuses, strict=True):
                asked = await live.ask(CHAT, chat(max_tokens=1) | {"model": model}, key=key)
                card = await card_of(live, model, key)
                assert asked.status == card.status == status, (key, model)
        nowhere = await card_of(live, "d", "by-alias")
        there = await card_of(live, MODEL, "by-alias")
        assert there.error["message"] == nowhere.error["message"].replace("'d'", f"'{MODEL}'")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_pool_without_an_engine_is_stood_in_for(start: Starter, stream: bool) -> None:
    async with simulated(models=("small",), time_scale=0) as sim:
        down = [{"url": f"http://127.0.0.1:{free_port()}"}]
        pools = [
            {"name": "large", "models": ["big"], "fallback": "small", "backends": down},
            {"name": "small", "models": ["small"], "backends": [{"url": sim.url}]},
        ]
        async with start(pools=pools, aliases={ALIAS: "big"}) as live:
            await until(lambda: not live.gateway.pools[0].is_healthy())
            for model in ("big", ALIAS):
                got = await live.ask(CHAT, chat(max_tokens=2, stream=stream) | {"model": model})
                assert got.status == 200
                found = [got.json] if not stream else [event for event in events(got.body) if event != "[DONE]"]
                assert {each["model"] for each in found} == {model}
            assert [line["model"] for line in await live.lines(2)] == ["small", "small"]
            backends = live.gateway.pools[1].backends
            kept = dict(backends)
            backends.clear()  # nobody is left: the answer is that of the pool that was asked
            refused = await live.ask(CHAT, chat() | {"model": "big"})
            backends.update(kept)  # so that the pool closes what it has open
            assert (refused.status, refused.error["code"]) == (503, "no_backend")


TOLD = b'{"model":"org/m.1","task":"x"}'


@pytest.mark.parametrize(
    ("answered", "shown"),
    [
        (b'{"model":"org/m.1"}', b'{"model":"mine"}'),
        (b'{"model" : "org/m.1"}', b'{"model" : "mine"}'),
        (b'{"model":"what it calls itself \\" \\u00fc"}', b'{"model":"mine"}'),
        (b'{"choices":[{"a":[[]]}],"model":"m"}', b'{"choices":[{"a":[[]]}],"model":"mine"}'),
        (b'data: {"response":{"tools":[{}],"model":"m"}}\n\n', b'data: {"response":{"tools":[{}],"model":"mine"}}\n\n'),
        (b'data: {"message":{"model":"m"}}\r\n\r\n' * 2, b'data: {"message":{"model":"mine"}}\r\n\r\n' * 2),
        *[
            (same, same)
            for same in (
                b'{"a":"\\"model\\":\\"org/m.1\\""}',
                b'{"my_model":"org/m.1"}',
                b'{"model":null}',
                b'{"content":[{"input":%b}]}' % TOLD,
                b'{"metadata":%b}' % TOLD,
                b'{"response":{"id":1},"metadata":%b}' % TOLD,
                b'{"response":{"metadata":%b}}' % TOLD,
                b'{"message":[%b]}' % TOLD,
                b'{"text":"{","metadata":%b}' % TOLD,
                DONE,
            )
        ],
    ],
)
def test_only_the_answer_s_own_model_is_renamed(answered: bytes, shown: bytes) -> None:
    assert ModelNameFilter("mine").apply(answered) == shown
    renamed = ModelNameFilter("mine")
    for event in (b'data: {"model":"m"', DONE):
        renamed.apply(event)  # an event that is not whole spoils none that follows
    assert renamed.apply(answered) == shown


def test_an_answer_in_pieces_is_renamed_as_in_one() -> None:
    renamed = ModelNameFilter("mine")
    pieces = (b'{"message":{"a":"\\', b'"{","b":[{', b'"model":"kept"}],"model":"m"},"model":"m"', b"}")
    shown = [renamed.apply(piece, goes_on=True) for piece in pieces[:-1]] + [renamed.apply(pieces[-1])]
    assert b"".join(shown) == b"".join(pieces).replace(b'"m"', b'"mine"')


def test_an_answer_without_end_of_members_is_looked_at_within_bounds() -> None:
    many = b'{"a":{%b},"model":"m"}'
    for count, name in ((CANDIDATES_MAX - 2, b"mine"), (2 * CANDIDATES_MAX - 2, b"m")):
        answered = many % b",".join([b'"b":{}'] * count)
        assert ModelNameFilter("mine").apply(answered).endswith(b'"model":"%b"}' % name)


async def test_one_model_is_asked_for_by_any_of_its_names(start: Starter) -> None:
    names = ("org/model:latest", "plain", "a b?c#d%2F", "..", "a//b")
    aliases = {"grüße/gpt": "plain"}
    async with simulated(models=names) as sim, start(sim.url, aliases=aliases) as live:
        listed = (await live.get("/v1/models")).json["data"]
        assert [card["id"] for card in listed] == [*names, *aliases]
        for card in listed:
            got = await card_of(live, quote(card["id"], safe=""))
            assert (got.status, got.json) == (200, card)
        for name in ("org/model:latest", "a//b", quote("grüße/gpt")):
            assert (await card_of(live, name)).status == 200
        got = await card_of(live, "nobody%FF/x")
        assert (got.status, got.error["code"]) == (404, "model_not_found")
        for name in (*names, *aliases):
            assert name in got.error["message"]
        assert "grüße/gpt" in (await live.ask(CHAT, chat() | {"model": "nobody"})).error["message"]
        async with live.http.options(live.url + "/v1/models/plain") as response:
            assert response.headers["allow"] == "GET, HEAD, OPTIONS"
        assert (await live.ask("/v1/models/plain", {})).status == 405
        assert (await live.get("/v1/models/")).status == 400


async def test_adapters_are_served_beside_the_models_that_a_pool_lists(start: Starter) -> None:
    async with (
        simulated(models=("base", "lora", "unlisted", "small"), adapters=("lora", "small")) as large,
        simulated(models=("small",)) as small,
    ):
        pools = [
            {"name": "large", "models": ["base"], "fallback": "small", "backends": [{"url": large.url, "name": "l"}]},
            {"name": "small", "models": ["small"], "backends": [{"url": small.url, "name": "s"}]},
        ]
        async with start(pools=pools) as live:
            listed = (await live.get("/v1/models")).json["data"]
            assert [card["id"] for card in listed] == ["lora", "small", "base"]
            for model in ("base", "lora", "small"):
                got = await live.ask(CHAT, chat(max_tokens=2) | {"model": model})
                assert (got.status, got.json["model"]) == (200, model)
            assert [line["backend"] for line in (await live.lines(4))[1:]] == ["l", "l", "s"], (
                "what is listed goes first"
            )
            assert (await live.ask(CHAT, chat() | {"model": "unlisted"})).status == 404
            large.server.model_names += ("new",)
            large.server.adapters += ("new",)
            await live.gateway.pools[0].check(live.http)
            assert (await live.ask(CHAT, chat(max_tokens=2) | {"model": "new"})).status == 200
            live.gateway.pools[0].drain(live.gateway.pools[0].backends["l"], True)
            for model in ("base", "lora", "new"):
                assert (await live.ask(CHAT, chat(max_tokens=2) | {"model": model})).json["model"] == model
            assert {line["backend"] for line in (await live.lines(9))[-3:]} == {"s"}


BODIES: dict[str, dict[str, Any]] = {
    CHAT: chat(max_tokens=2),
    "/v1/responses": {"input": "x"},
    "/v1/messages": chat(max_tokens=2),
    "/v1/embeddings": {"input": "x"},
    "/rerank": {"query": "x", "documents": ["y"]},
}
UNNAMED: dict[str, dict[str, Any]] = {"left out": {}, "null": {"model": None}, "empty": {"model": ""}}


def without(body: dict[str, Any], how: str, size: int = 1) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "model"} | UNNAMED[how] | {"padding": "x" * size}


@pytest.mark.parametrize("path", BODIES)
async def test_the_model_that_answers_is_written_in(start: Starter, path: str) -> None:
    bodies = [without(BODIES[path], how, size) for how in UNNAMED for size in (1, 400_000)]
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        for body in bodies:
            assert (await live.ask(path, body)).status == 200
        assert [seen.json for seen in upstream.requests] == [body | {"model": MODEL} for body in bodies]
        assert {line["model"] for line in await live.lines(len(bodies))} == {MODEL}


async def test_limits_of_a_model_and_its_price_hold_for_what_names_none(start: Starter) -> None:
    usage = {"url": str(start.directory / "usage.db"), "prices": {MODEL: {"input": 1e6, "output": 0}}}
    quota = {"per_model": {MODEL: {"requests_per_minute": len(UNNAMED)}}}
    tenants = [{"name": "t", "keys": [hash_key("k")], "quota": quota}]
    async with Upstream(replies(OK)) as upstream, start(upstream.url, tenants=tenants, usage=usage) as live:
        for how in UNNAMED:
            assert (await live.ask(CHAT, without(chat(), how))).status == 200
        for body in (*[without(chat(), how) for how in UNNAMED], chat()):
            assert (await live.ask(CHAT, body)).error["code"] == "rate_limited"
        counted = [row for row in await live.metrics() if row[0] == "fairgate_requests_total"]
        assert counted
        assert all(MODEL in row for row in counted)
        assert live.gateway.usage is not None
        await live.gateway.usage.flush()
        [row] = (await live.get("/usage?since=1h&by=model", admin=True)).json["rows"]
        assert (row["model"], row["cost"], row["unpriced_tokens"]) == (MODEL, 7.0 * len(UNNAMED), 0)


async def test_the_model_is_the_engines_own_and_no_adapter(start: Starter) -> None:
    async with simulated(models=("lora", "base"), adapters=("lora",)) as sim, start(sim.url) as live:
        assert (await live.ask(CHAT, without(chat(max_tokens=2), "left out"))).json["model"] == "base"
        pools = [{"name": "p", "models": ["base"], "backends": [{"url": sim.url}]}]
        async with start(pools=pools) as other:
            assert (await other.ask(CHAT, without(chat(max_tokens=2), "null"))).json["model"] == "base"
            pool = other.gateway.pools[0]
            pool.backends[next(iter(pool.backends))].models.clear()
            assert (await other.ask(CHAT, without(chat(max_tokens=2), "empty"))).json["model"] == "base"
        pool = live.gateway.pools[0]
        pool.backends[next(iter(pool.backends))].models.clear()
        got = await live.ask(CHAT, without(chat(), "left out"))
        assert (got.status, got.error["code"]) == (503, "no_backend"), "nobody knows yet whose request it is"


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
