"""The official client works against the gateway as against the engine, errors included."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.gateway.live import MODEL, Live, Starter, simulated

HELLO: Any = [{"role": "user", "content": "Hello"}]


def client(live: Live, key: str = "k") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=live.url + "/v1", api_key=key, max_retries=0)


async def test_every_api_that_it_knows(start: Starter) -> None:
    async with simulated(time_scale=0) as sim, start(sim.url) as live, client(live) as api:
        options: Any = {"extra_body": {"ignore_eos": True}, "max_tokens": 7, "model": MODEL, "messages": HELLO}
        whole: Any = await api.chat.completions.create(**options)
        assert whole.choices[0].message.content
        assert whole.usage.completion_tokens == 7
        assert whole._request_id.startswith("req_")
        chunks = [chunk async for chunk in await api.chat.completions.create(stream=True, **options)]
        assert sum(bool(each.choices[0].delta.content) for each in chunks) == 7
        assert all(each.usage is None for each in chunks)
        counted = await api.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options)
        last = [chunk async for chunk in counted][-1]
        assert (last.choices, last.usage.completion_tokens) == ([], 7)
        text = await api.completions.create(model=MODEL, prompt="Hello", max_tokens=5)
        assert text.choices[0].text
        vectors = await api.embeddings.create(model=MODEL, input=["a", "b"], encoding_format="float")
        assert [len(each.embedding) for each in vectors.data] == [8, 8]
        assert [card.id async for card in api.models.list()] == [MODEL]
        response = await api.responses.create(model=MODEL, input="Hi", max_output_tokens=6)
        assert response.usage is not None
        assert response.output
        stream = await api.responses.create(model=MODEL, input="Hi", max_output_tokens=6, stream=True)
        events: list[Any] = [event async for event in stream]
        assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
        assert events[-1].response.usage is not None


async def test_the_error_classes(start: Starter) -> None:
    async with simulated() as sim, start(sim.url, tenants=[{"name": "t"}]) as live:
        key = live.gateway.minted_keys[0].key
        async with client(live, key) as api, client(live, "wrong") as stranger:
            with pytest.raises(openai.AuthenticationError) as unknown:
                await stranger.completions.create(model=MODEL, prompt="x")
            assert unknown.value.code == "invalid_api_key"
            with pytest.raises(openai.NotFoundError) as missing:
                await api.completions.create(model="gpt-9", prompt="x")
            assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
            with pytest.raises(openai.BadRequestError) as bad:
                await api.completions.create(model=MODEL, prompt="x", n=0)
            assert (bad.value.code, bad.value.param) == ("invalid_request", "n")
            assert bad.value.request_id
            nonsense: Any = 5
            with pytest.raises(openai.BadRequestError):
                await api.chat.completions.create(model=MODEL, messages=nonsense)
            with pytest.raises(openai.PermissionDeniedError):
                await api.completions.create(model=MODEL, prompt="x", extra_headers={"x-fairgate-app": "forged"})
            sim.faults.cut_body_next = 1
            with pytest.raises(openai.InternalServerError) as broken:
                await api.completions.create(model=MODEL, prompt="x")
            assert broken.value.code == "backend_failed"
            sim.faults.truncate_after_events = 10
            streams: list[Any] = [
                await api.chat.completions.create(model=MODEL, messages=HELLO, stream=True, max_tokens=90),
                await api.responses.create(model=MODEL, input="x", stream=True, max_output_tokens=90),
            ]
            for stream in streams:
                with pytest.raises(openai.APIError, match="broke off"):
                    [_ async for _ in stream]
