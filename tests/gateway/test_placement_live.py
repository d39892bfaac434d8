"""Where a request went and why can be seen, and an engine that has restarted is known to have nothing cached."""

from __future__ import annotations

from typing import Any

import pytest

from backends.simulated.simulated_server import SimulatedServer
from tests.gateway.capture import Upstream, answer, replies
from tests.gateway.live import MODEL, SMALL, Live, Starter, chat, long_chat, simulated, until

CHAT = "/v1/chat/completions"
DOCUMENT = "".join(f"Sentence {number} of a long document. " for number in range(200))


async def asked(live: Live, question: str) -> dict[str, Any]:
    """Ask about the document; the line of the log."""
    before = live.log.read_bytes().count(b"\n") if live.log.exists() else 0
    got = await live.ask(CHAT, chat(f"{DOCUMENT} {question}", max_tokens=4))
    assert got.status == 200
    line = (await live.lines(before + 1))[-1]
    assert line["request_id"] == got.headers["x-request-id"]
    return line


async def prompt_tokens(live: Live) -> dict[str, float]:
    """Return what is counted of prompts by kind, of all engines together."""
    name = "fairgate_backend_prompt_tokens_total"
    return {labels[2]: value for labels, value in (await live.metrics()).items() if labels[0] == name}


async def test_the_log_explain_and_metrics_say_where_a_request_went_why_and_what_was_found(start: Starter) -> None:
    async with simulated(time_scale=0) as one, simulated(time_scale=0) as two, start(one.url, two.url) as live:
        lines = [await asked(live, f"{number}?") for number in range(3)]
        first, second, _ = lines
        assert (first["placed"], first["tokens_cached"], first["tokens_cached_expected"]) == ("rendezvous", 0, 0)
        assert (second["placed"], second["backend"]) == ("cached", first["backend"])
        assert second["tokens_cached"] > 0.9 * second["tokens_in"]
        assert abs(second["tokens_cached_expected"] - second["tokens_cached"]) < 0.2 * second["tokens_in"]
        why = (await live.get(f"/explain/{second['request_id']}", admin=True)).json
        assert why["decision"] == {
            "dispatched_to": second["backend"],
            "placed": "cached",
            "tokens_cached_expected": second["tokens_cached_expected"],
        }
        assert why["reason"].endswith("no engine has more of its prompt cached, and it is done soonest there")
        counted = await prompt_tokens(live)
        assert ("fairgate_backend_prompt_tokens_total", first["backend"], "input", "pool") in await live.metrics()
        assert counted == {
            "input": sum(line["tokens_in"] for line in lines),
            "cached": sum(line["tokens_cached"] for line in lines),
            "expected": sum(line["tokens_cached_expected"] for line in lines),
            "wrong": sum(abs(line["tokens_cached_expected"] - line["tokens_cached"]) for line in lines),
        }
        assert counted["wrong"] > 0, "blocks do not end where the engine's end"
        refused = await live.ask(CHAT, chat(n=0))
        assert refused.status == 400
        line = (await live.lines(4))[-1]
        assert (line["backend"], line["placed"], line["tokens_cached_expected"]) == ("", "", 0)


@pytest.mark.parametrize(
    ("policy", "placed"),
    [({"name": "vtc", "placement": "least_loaded"}, "least_loaded"), ("d2lpm", "assigned"), ("dlpm", "rendezvous")],
)
async def test_every_placement_says_why(start: Starter, policy: Any, placed: str) -> None:
    async with (
        simulated(time_scale=0) as one,
        simulated(time_scale=0) as two,
        start(one.url, two.url, policy=policy) as live,
    ):
        assert (await asked(live, "1?"))["placed"] == placed


async def test_an_answer_that_does_not_say_what_was_cached_counts_as_wrong(start: Starter) -> None:
    usage = b'{"usage":{"prompt_tokens":1700,"completion_tokens":2}}'
    async with (
        Upstream(replies(answer(usage))) as one,
        Upstream(replies(answer(usage))) as two,
        start(one.url, two.url) as live,
    ):
        expected = sum([(await asked(live, f"{number}?"))["tokens_cached_expected"] for number in range(2)])
        assert expected > 0
        counted = await prompt_tokens(live)
        assert (counted["cached"], counted["wrong"]) == (0, expected)


async def test_requests_go_where_their_adapter_runs(start: Starter) -> None:
    served: dict[str, Any] = {"models": (MODEL, "lora"), "adapters": ("lora",)}
    async with simulated(**served) as one, simulated(**served) as two, start(one.url, two.url) as live:
        async with live.post(CHAT, {**long_chat(), "model": "lora"}) as running:
            await running.content.readany()
            for number in range(12):
                body = {**chat(f"{number}? {DOCUMENT}", max_tokens=2), "model": "lora"}
                assert (await live.ask(CHAT, body)).status == 200
            lines = await live.lines(12)
            [home] = [name for name, ledger in live.engine.backends.items() if ledger.adapters]
            assert {line["backend"] for line in lines} == {home}
        await until(live.holds_nothing)
        assert not any(ledger.adapters for ledger in live.engine.backends.values())


async def test_an_engine_that_has_restarted_has_nothing_cached(start: Starter) -> None:
    async with simulated(time_scale=0) as one, simulated(time_scale=0) as two, start(one.url, two.url) as live:
        prefixes = live.engine.policy.prefixes
        assert prefixes is not None
        first = await asked(live, "1?")
        assert (await asked(live, "2?"))["tokens_cached_expected"] > 0
        [home] = [sim for sim in (one, two) if sim.url.endswith(first["backend"])]
        scrapes = home.server.scrapes
        await until(lambda: home.server.scrapes > scrapes + 1)  # a scrape begins when what the last one said is known
        await home.server.stop()
        again = SimulatedServer(SMALL, model_names=home.server.model_names, time_scale=0)
        await again.start("127.0.0.1", home.port)
        try:
            await until(lambda: not len(prefixes))
            after = await asked(live, "3?")
            assert (after["placed"], after["tokens_cached_expected"], after["tokens_cached"]) == ("rendezvous", 0, 0)
        finally:
            await again.stop()
