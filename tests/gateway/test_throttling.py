"""Under KV overload: agents come to their ends, whoever floods is told when to come back; at other times nobody is."""

from __future__ import annotations

import re
from typing import Any

import openai

from tests.gateway.capture import Peer, Seen, Upstream, answer
from tests.gateway.live import CHAT, MODEL, Starter, chat, simulated, until
from tests.kit.overload import RESULT, full, is_overloaded, question, tenants, turn


async def test_a_start_beyond_the_limit_is_refused_and_calls_inside_are_not(start: Starter) -> None:
    async with full(start, "agent") as gate:
        talk: list[Any] = [question()]
        for stage in range(1, 5):
            got = await gate.ask("agent", *talk)
            assert got.status == 200, got.body
            talk += [turn(got.json["choices"][0]["message"]["content"]), RESULT]
            [*_, line] = await gate.live.lines(stage)
            assert (line["stage"], len(line["interaction"])) == (stage, 16)
        refused = await gate.ask("agent", question("Something else"))
        assert refused.status == 429
        assert refused.error["code"] == "over_user_limit"
        metrics = await gate.live.metrics()
        assert metrics["fairgate_overloaded", "pool"] == 1
        assert metrics["fairgate_not_completed_total", "refused", "pool", "over_user_limit", "agent"] == 1
        assert metrics["fairgate_wasted_tokens_total", "agent"] == 0
        assert metrics["fairgate_open_interactions",] >= 1
        gate.release()
        await until(gate.live.holds_nothing)
        await until(lambda: not is_overloaded(gate.live))
        assert (await gate.ask("agent", question("Something else"))).status == 200


async def test_a_refusal_says_what_happened_and_when_to_come_back(start: Starter) -> None:
    async with full(start, "t") as gate:
        assert (await gate.ask("t", question("a"))).status == 200
        refused = await gate.ask("t", question("b"))
        assert refused.status == 429
        assert refused.error["type"] == "rate_limit_error"
        assert 1 <= int(refused.headers["retry-after"]) <= 120
        assert int(refused.headers["retry-after-ms"]) <= 120_000
        assert refused.headers["x-ratelimit-limit-requests"] == "1"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert re.fullmatch(r"(\d+m)?\d+s|\d+ms", refused.headers["x-ratelimit-reset-requests"])
        for word in ("KV cache is overloaded", "1 interactions begun", "come back in", "under way are still served"):
            assert word in refused.error["message"]
        anthropic = await gate.ask("t", question("c"), path="/v1/messages")
        assert anthropic.status == 429
        assert anthropic.json["type"] == "error"
        assert anthropic.json["error"]["type"] == "rate_limit_error"
        assert anthropic.json["error"]["message"].startswith("over_user_limit: ")


def tool_answer(text: str | None) -> bytes:
    """What an engine says: a call of a tool, or a final answer."""
    call = '[{"id":"c","type":"function","function":{"name":"ls","arguments":"{}"}}]'
    message = f'{{"role":"assistant","content":"{text}"}}' if text else f'{{"role":"assistant","tool_calls":{call}}}'
    reason = "stop" if text else "tool_calls"
    return answer(
        f'{{"id":"x","object":"chat.completion","created":1,"model":"m","choices":[{{"index":0,"message":{message},'
        f'"finish_reason":"{reason}"}}],"usage":{{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12}}}}'.encode()
    )


async def test_the_official_client_in_a_tool_loop_is_one_interaction_until_the_final_answer(start: Starter) -> None:
    async def script(seen: Seen, peer: Peer) -> None:
        results = sum(message["role"] == "tool" for message in seen.json["messages"])
        await peer.send(tool_answer("done" if results == 2 else None))

    async with Upstream(script) as upstream, start(upstream.url, tenants=tenants("t")) as live:
        interactions = live.gateway.shared.interactions
        assert interactions is not None
        async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="t", max_retries=0) as api:
            talk: list[Any] = [question()]
            while True:
                got = await api.chat.completions.create(model=MODEL, messages=talk)
                message = got.choices[0].message
                talk.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                assert len(interactions) == 1
                talk.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a.py"})
        assert len(interactions) == 0
        lines = await live.lines(3)
        assert len({line["interaction"] for line in lines}) == 1
        assert [line["stage"] for line in lines] == [1, 2, 3]


async def test_responses_go_on_by_the_id_of_the_answer(start: Starter) -> None:
    async with simulated(time_scale=0) as sim, start(sim.url, tenants=tenants("t")) as live:
        fields: dict[str, Any] = {"model": MODEL, "max_output_tokens": 4, "ignore_eos": True}
        first = await live.ask("/v1/responses", {**fields, "input": "Which files?"}, key="t")
        assert first.status == 200, first.body
        outputs = [{"type": "function_call_output", "call_id": "c", "output": "a.py"}]
        body = {**fields, "input": outputs, "previous_response_id": first.json["id"]}
        await live.ask("/v1/responses", body, key="t")
        one, two = await live.lines(2)
        assert one["interaction"] == two["interaction"] != ""
        assert two["stage"] == 2


async def test_always_on_limits_hold_without_overload_and_are_told(start: Starter) -> None:
    config = {"tenants": [*tenants("t", quota={"requests_per_minute": 2, "tokens_per_day": 10**6}), *tenants("free")]}
    async with simulated(time_scale=0) as sim, start(sim.url, **config) as live:
        body = chat(max_tokens=2, ignore_eos=True)
        got = [await live.ask(CHAT, body, key="t") for _ in range(3)]
        assert [each.status for each in got] == [200, 200, 429]
        assert [each.headers["x-ratelimit-remaining-requests"] for each in got] == ["1", "0", "0"]
        assert got[0].headers["x-ratelimit-limit-tokens"] == "1000000"
        assert got[2].error["code"] == "rate_limited"
        assert "2 requests a minute" in got[2].error["message"]
        assert "x-ratelimit-limit-requests" not in (await live.ask(CHAT, body, key="free")).headers
