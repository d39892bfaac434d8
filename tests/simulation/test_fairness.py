"""What is promised of a flood and of full engines, in virtual time against an engine of 32 sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from random import Random

import pytest

from backends.simulated.engine_model import EngineModel, EngineRequest
from backends.simulated.engine_profiles import EngineProfile, profile
from lab.lab_driver import simulate
from lab.service import throughput, ttft_s
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.capacity.gauges import Gauges
from policies.request import Claim, Flow
from simulation.run import Arrival, Record, SimulationResult

Next = Callable[[Record, float], Arrival | None]


STEP_TIMES = ("base_s", "per_prefill_token_s", "per_seq_s", "per_context_token_s")


def make_engine(policy: str = "vtc", *, output_tokens: int | None = None) -> AdmissionEngine:
    """`output_tokens`: the length of answers that it has learned."""
    engine = AdmissionEngine(named_policy(policy))
    engine.add_backend("one", max_num_seqs=32)
    for _ in range(0 if output_tokens is None else 64):
        engine.requests.lengths.learn(Arrival("", Flow("before"), 0.0, 1, 1).request(), output_tokens or 0)
    return engine


def tiny() -> dict[str, EngineModel]:
    return {"one": EngineModel(profile("tiny-cpu"))}


def slowed(times: float) -> EngineProfile:
    """The same engine on cores that are so many times slower."""
    fast = profile("tiny-cpu")
    return replace(fast, **{name: times * getattr(fast, name) for name in STEP_TIMES})


def open_until(end_s: float) -> Next:
    """Clients that keep one request open each, until then."""
    serial = count()

    def follow(record: Record, now: float) -> Arrival | None:
        old = record.arrival
        if now >= end_s or old.flow.tenant == "light":
            return None
        return replace(old, id=f"{old.flow.tenant}-{next(serial)}", arrived_s=now)

    return follow


def flooded(policy: str) -> SimulationResult:
    heavy = [Arrival(f"heavy{i}", Flow("heavy"), 0.0, 200, 200) for i in range(64)]
    light = [Arrival(f"light{i}", Flow("light"), 0.4 * i, 30, 20) for i in range(1, 25)]
    return simulate(heavy + light, engine=make_engine(policy), backends=tiny(), next_arrival=open_until(10.0))


def test_a_light_tenant_waits_at_most_a_fifth_of_what_it_does_in_arrival_order() -> None:
    fair, unfair = flooded("vtc").records.values(), flooded("fcfs").records.values()
    assert ttft_s(unfair, "light") > 0.5, "there is a flood"
    assert ttft_s(fair, "light") <= ttft_s(unfair, "light") / 5
    assert throughput(fair) >= 0.97 * throughput(unfair)


def burst(requests: int, output: int = 100) -> list[Arrival]:
    return [Arrival(f"r{i:03}", Flow(f"t{i % 3}"), 0.0001 * i, 100, output) for i in range(requests)]


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_burst_as_a_scrape_comes_does_not_queue_inside_the_engine_either(is_known: bool, streamed: bool) -> None:
    """The gauges of an engine that has just begun say that most slots are empty."""
    bursts = [
        replace(arrival, id=f"{arrival.id}-{start_s}", arrived_s=start_s + 8 * arrival.arrived_s, streamed=streamed)
        for start_s in (0.5, 3.0, 6.533, 9.566)
        for arrival in burst(200, 16)
    ]
    engine = AdmissionEngine(named_policy("vtc"))
    engine.add_backend("one", max_num_seqs=32 if is_known else None)
    run = simulate(bursts, engine=engine, backends={"one": EngineModel(slowed(5))}, network_s=0.005)
    assert run.waiting_max <= 4, "the target is 2"


def direct_throughput(arrivals: list[Arrival], engine: EngineProfile | None = None) -> float:
    """Output tokens per second when everything is sent to the engine (default: tiny) as it comes."""
    model = EngineModel(engine or profile("tiny-cpu"))
    for arrival in arrivals:
        model.submit(EngineRequest(arrival.id, arrival.prompt_tokens, arrival.output_tokens), 0.0)
    now = tokens = 0.0
    while model.has_work:
        step = model.step(now)
        now += step.duration_s
        tokens += len(step.tokens)
    return tokens / now


@pytest.mark.parametrize("output", [60, 100, 200])
def test_throughput_is_that_of_sending_everything_at_once(output: int) -> None:
    arrivals = burst(400, output)
    run = simulate(arrivals, engine=make_engine(output_tokens=output), backends=tiny())
    assert throughput(run.records.values()) >= 0.97 * direct_throughput(arrivals)


@pytest.mark.parametrize("network_s", [0.001, 0.015, 0.03])
@pytest.mark.parametrize("streamed", [True, False])
def test_small_requests_find_no_empty_slots_however_long_their_way(streamed: bool, network_s: float) -> None:
    """Clients that each keep one open, before a slow engine: some must be under way when others end."""
    fast = profile("tiny-cpu")
    slow = replace(fast, base_s=3 * fast.base_s, per_seq_s=3 * fast.per_seq_s)
    engine = AdmissionEngine(named_policy("vtc"))
    engine.add_backend("one")
    arrivals = [Arrival(f"one{i}", Flow("one", user="0"), 0.0, 60, 16, streamed=streamed) for i in range(128)]
    run = simulate(
        arrivals,
        engine=engine,
        backends={"one": EngineModel(slow)},
        next_arrival=open_until(20.0),
        network_s=network_s,
    )
    tokens = sum(5.0 <= time < 20.0 for record in run.records.values() for time in record.token_s)
    assert tokens / 15.0 >= 0.97 * direct_throughput(burst(1000, 16), slow)


def test_a_flood_of_answers_of_any_length_fills_the_cache() -> None:
    random = Random(1)
    lengths = [min(1500, 1 + int(random.expovariate(1 / 200))) for _ in range(1000)]
    unlike = [Arrival(f"heavy{i}", Flow("heavy"), 0.0, 200, length) for i, length in enumerate(lengths)]
    coming = iter(unlike[64:])

    def follow(record: Record, now: float) -> Arrival | None:
        return replace(next(coming), arrived_s=now) if now < 20.0 else None

    run = simulate(unlike[:64], engine=make_engine(), backends=tiny(), next_arrival=follow, network_s=0.01)
    tokens = sum(5.0 <= time < 20.0 for record in run.records.values() for time in record.token_s)
    assert tokens / 15.0 >= 0.97 * direct_throughput(unlike)
    assert sum(record.preemptions for record in run.records.values()) < len(run.records) / 10


def test_nothing_is_preempted_once_lengths_are_learned() -> None:
    arrivals = burst(200, 300)
    run = simulate(arrivals, engine=make_engine(output_tokens=300), backends=tiny())
    assert sum(record.preemptions for record in run.records.values()) == 0
    assert {record.outcome for record in run.records.values()} == {"completed"}

    model = EngineModel(profile("tiny-cpu"))
    for arrival in arrivals:
        model.submit(EngineRequest(arrival.id, arrival.prompt_tokens, arrival.output_tokens), 0.0)
    while not model.step(0.0).preempted:  # sent directly, they do preempt each other
        assert model.has_work


def test_a_backend_that_refuses_above_its_limit_is_kept_busy() -> None:
    arrivals = burst(300)
    engine = AdmissionEngine(named_policy("vtc"))
    engine.add_backend("one")
    run = simulate(arrivals, engine=engine, backends=tiny(), refuses=lambda name, gauges, now: gauges.running >= 16)
    free = simulate(burst(300), engine=make_engine(), backends=tiny())
    assert {record.outcome for record in run.records.values()} == {"completed"}
    assert throughput(run.records.values()) >= 0.5 * throughput(free.records.values())


@pytest.mark.parametrize("streamed", [True, False])
def test_absent_gauges_are_neither_zero_nor_full(streamed: bool) -> None:
    def absent(name: str, model: EngineModel, now: float) -> Gauges:
        return Gauges(now)

    arrivals = [Arrival(f"r{i:03}", Flow("a"), 0.001 * i, 100, 40, streamed=streamed) for i in range(200)]
    blind = simulate(arrivals, engine=make_engine(), backends=tiny(), scrape=absent)
    seeing = simulate(arrivals, engine=make_engine(), backends=tiny())
    assert {record.outcome for record in blind.records.values()} == {"completed"}
    assert blind.ended_s < 2 * seeing.ended_s
    assert len(blind.events) < 3 * len(seeing.events), "nobody is woken for nothing"


@pytest.mark.parametrize("parallel", [64, 512])
def test_who_is_alone_is_never_refused_where_no_limit_is_configured(parallel: int) -> None:
    """The KV cache of its engine is overloaded most of the time."""
    asked = [
        Arrival(f"{n}", Flow("alone"), 0.001 * n, 400, 40, 160, claim=Claim(f"{n}", 1, begins=True))
        for n in range(2 * parallel)
    ]
    coming = iter(asked[parallel:])

    def follow(record: Record, now: float) -> Arrival | None:
        following = next(coming, None)
        return replace(following, arrived_s=now) if following is not None else None

    engine = make_engine("fairserve")
    run = simulate(asked[:parallel], engine=engine, backends={"one": EngineModel(profile("demo"))}, next_arrival=follow)
    assert len(run.records) == 2 * parallel
    assert {record.outcome for record in run.records.values()} == {"completed"}
