"""The log of a gateway goes into a replay as it is, and the replay shows what was there."""

from __future__ import annotations

import asyncio
import hashlib
import re

from click.testing import CliRunner

from backends.simulated.engine_profiles import profile
from gateway.commands.main import main
from gateway.config.sections.keys import open_name
from simulation.replay import replay_under
from simulation.traces.reader import Trace
from tests.gateway.live import Starter, chat, simulated, until
from tests.waiting import WAIT_S


async def test_the_access_log_of_a_gateway_goes_into_a_replay_as_it_is(start: Starter) -> None:
    tenants = [{"name": "light", "weight": 3.0}, {"name": "heavy"}]
    async with simulated() as sim, start(sim.url, tenants=tenants) as live:
        keys = {minted.tenant: minted.key for minted in live.gateway.minted_keys}
        body = {"max_tokens": 12, "ignore_eos": True, "user": "somebody"}
        asked = [("heavy", chat("x" * 400, stream=number % 2 == 0, **body)) for number in range(20)]
        asked.append(("light", chat("x" * 40, **body)))
        asked.append(("light", chat("x" * 40, n=0)))  # refused unseen
        await asyncio.gather(*(live.ask("/v1/chat/completions", what, key=keys[who]) for who, what in asked))
        lines = await live.lines(len(asked))
    trace = Trace(live.log)
    assert (trace.format, trace.requests, trace.skipped, trace.assumed) == ("fairgate", 21, 1, 0)
    assert trace.weights == {"light": 3.0, "heavy": 1.0}
    arrivals = list(trace.arrivals(16))
    assert [each.arrived_s for each in arrivals] == sorted(each.arrived_s for each in arrivals)
    assert arrivals[-1].arrived_s < WAIT_S
    assert {(each.output_tokens, each.output_tokens_max) for each in arrivals} == {(12, 12)}
    assert len({each.flow.user for each in arrivals}) == 1
    assert sorted(each.prompt_tokens for each in arrivals) == sorted(
        line["tokens_in"] for line in lines if line["outcome"] == "completed"
    )
    assert sum(each.streamed for each in arrivals) == 10
    seen = replay_under("vtc", trace, profile("tiny-cpu"))
    assert (seen.requests, seen.completed) == (21, 21)
    assert {(each.name, each.weight) for each in seen.tenants} == {("heavy", 1.0), ("light", 3.0)}


async def test_a_replay_of_ones_own_log_shows_the_difference_that_was_there(start: Starter) -> None:
    """Without any option: the engines are those that the log tells of, and one light request is not passed over."""
    demo = profile("demo")
    async with simulated(demo) as one, simulated(demo) as two, start(one.url, two.url, policy="vtc") as live:
        stories = [chat("Tell me a story.", max_tokens=60 + number % 60, ignore_eos=True) for number in range(200)]
        flood = [asyncio.ensure_future(live.ask("/v1/chat/completions", body, key="heavy")) for body in stories]
        await until(lambda: live.engine.queued >= 60)
        assert (await live.ask("/v1/chat/completions", chat("Hello", max_tokens=5), key="light")).status == 200
        assert live.engine.queued, "the flood still waits"
        await asyncio.gather(*flood)
        await live.lines(201)
    done = CliRunner().invoke(main, ["replay", str(live.log), "--policy", "fcfs,vtc"])
    assert done.exit_code == 0, done.output
    light = open_name(hashlib.sha256(b"light").digest())
    found = re.match(
        rf"`{light}` gains most: under `fcfs`, its one request waited (\S+) s for its first token, "
        r"under `vtc` (\S+) s. ",
        done.output,
    )
    assert found is not None, done.output
    assert float(found[1]) > 3 * float(found[2])
    assert "before 2 simulated engines like " in done.output
    assert "Note: The engine is chosen by the log: 201 answers took " in done.output
