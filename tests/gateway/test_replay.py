"""What the gateway decides is decided by its engine's events alone: the same events give the same decisions."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import re
from collections.abc import Sequence
from typing import Any

import pytest
from click.testing import CliRunner

from backends.simulated.engine_profiles import profile
from gateway.commands.main import main
from gateway.config.sections.keys import open_name
from policies.admission.decisions import Decision, Dispatch, Reject
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from simulation.replay import replay_under
from simulation.traces.reader import Trace
from tests.gateway.live import MODEL, Live, Starter, chat, long_chat, simulated, until
from tests.waiting import WAIT_S

EVENTS = ("add_backend", "arrived", "progressed", "finished", "failed", "cancelled", "backend_changed", "woke")


class RecordingEngine(AdmissionEngine):
    """The gateway's engine, which writes down every event before it decides."""

    made: list[RecordingEngine]

    def __init__(self, policy: Any, **settings: Any) -> None:
        super().__init__(policy, **settings)
        self.settings = settings
        self.events: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.decisions: list[list[Decision]] = []
        self.is_inside_event = False
        self.made.append(self)


def _recorded(name: str) -> Any:
    original = getattr(AdmissionEngine, name)

    def event(self: RecordingEngine, *args: Any, **named: Any) -> Sequence[Decision] | None:
        decisions: Sequence[Decision] | None
        if self.is_inside_event:
            # The engine may treat one event as another one: from outside that is one event.
            decisions = original(self, *args, **named)
            return decisions
        self.events.append((name, copy.deepcopy(args), named))
        self.is_inside_event = True
        try:
            decisions = original(self, *args, **named)
        finally:
            self.is_inside_event = False
        self.decisions.append(list(decisions or ()))
        return decisions

    return event


for _name in EVENTS:
    setattr(RecordingEngine, _name, _recorded(_name))


def _replay(recording: RecordingEngine, policy: str) -> list[list[Decision]]:
    engine = AdmissionEngine(named_policy(policy), **recording.settings)
    return [list(getattr(engine, name)(*args, **named) or ()) for name, args, named in recording.events]


@pytest.mark.interpreted_only("extends the engine")
@pytest.mark.parametrize("policy", ["vtc", "fcfs"])
async def test_recorded_traffic_replays_to_the_same_decisions(
    start: Starter, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    RecordingEngine.made = []
    monkeypatch.setattr("gateway.pool.setup.AdmissionEngine", RecordingEngine)
    limits = {"queue_requests_max": 15, "queue_wait_s_max": 0.4, "attempts_max": 2}
    async with simulated() as one, simulated() as two, start(one.url, two.url, policy=policy, limits=limits) as live:
        one.faults.refuse_next = two.faults.refuse_in_stream_next = 3
        one.faults.cut_body_next = 2
        await asyncio.gather(*(_visits(live, range(first, 120, 60)) for first in range(60)))
        one.faults.reset_next = 5
        await asyncio.gather(*(_visits(live, range(first, 120, 60)) for first in range(60)))
        await until(live.holds_nothing)
    [recording] = RecordingEngine.made
    names = {name for name, _, _ in recording.events}
    assert names == set(EVENTS)
    assert {type(each) for decisions in recording.decisions for each in decisions} == {Dispatch, Reject}
    assert _replay(recording, policy) == recording.decisions
    dispatched = [each.id for decisions in recording.decisions for each in decisions if isinstance(each, Dispatch)]
    arrived = [args[0].id for name, args, _ in recording.events if name == "arrived"]
    first_dispatched = [id for id in dict.fromkeys(dispatched) if id in arrived]
    in_order = [id for id in arrived if id in set(dispatched)]
    assert (first_dispatched == in_order) is (policy == "fcfs"), "what was decided was not simply the order of arrival"


async def _visits(live: Live, numbers: range) -> None:
    """One client after the other: streams, whole answers, embeddings, and some that leave, of five tenants."""
    for number in numbers:
        key = f"tenant-{number % 5}"
        size = 1 + number * 37 % 60
        if number % 7 == 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await live.ask("/v1/chat/completions", long_chat(), key=key)
        elif number % 3 == 0:
            await live.ask("/v1/embeddings", {"model": MODEL, "input": "x" * size}, key=key)
        else:
            fields = {"max_tokens": size * 3, "ignore_eos": True, "user": str(number % 4)}
            await live.ask("/v1/chat/completions", chat("x" * size * 20, stream=number % 2 == 0, **fields), key=key)


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
