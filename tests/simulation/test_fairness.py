"""What is promised of a flood, of full engines, of work that can wait and of a fresh start, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from random import Random

import pytest

from backends.simulated.engine_model import EngineModel, EngineRequest
from backends.simulated.engine_profiles import EngineProfile, profile
from lab.lab_driver import simulate
from lab.service import service, throughput
from lab.simulation_result import SimulationResult
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.capacity.gauges import Gauges
from policies.orders.cost import LinearCost
from policies.request import Claim, Flow, ServiceTokens, of_batch
from simulation.run import Arrival, Record

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
        model.submit(EngineRequest(arrival.id, arrival.prompt_tokens, arrival.output_tokens))
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


@pytest.mark.parametrize("network_s", [0.001, 0.03])
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
        model.submit(EngineRequest(arrival.id, arrival.prompt_tokens, arrival.output_tokens))
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


# --- work that can wait takes what is free, and gives it back when other work comes ---


NIGHT = of_batch("night")


def with_batch(
    arrivals: list[Arrival], policy: str = "fairserve", *, batch: int = 0, until_s: float = 60.0, output: int = 120
) -> tuple[SimulationResult, AdmissionEngine]:
    """`batch`: so many requests that can wait are open at any time, of answers in one piece."""
    engine = AdmissionEngine(named_policy(policy))
    engine.add_backend("one", max_num_seqs=32)
    serial, rng = count(), Random(2)

    def work(now: float) -> Arrival:
        return Arrival(
            f"b-{next(serial)}", Flow(NIGHT, "app", ""), now, 64, rng.randint(output // 2, output * 3 // 2),
            output_tokens_max=2 * output, streamed=False,
        )  # fmt: skip

    def following(record: Record, now: float) -> Arrival | None:
        return work(now) if record.arrival.flow.tenant == NIGHT and now < until_s else None

    first = [work(0.0) for _ in range(batch)]
    found = simulate(
        sorted([*first, *arrivals], key=lambda one: one.arrived_s), engine=engine,
        backends={"one": EngineModel(profile("tiny-cpu"))}, next_arrival=following,
    )  # fmt: skip
    assert {record.outcome for record in found.records.values()} <= {"completed"}
    return found, engine


def visits(per_s: float, until_s: float, tenant: str = "day") -> list[Arrival]:
    rng, now, found = Random(5), 5.0, []
    while now < until_s:
        found.append(Arrival(f"{tenant}-{len(found)}", Flow(tenant, "app", ""), now, 64, rng.randint(10, 60), 100))
        now += rng.expovariate(per_s)
    return found


def first_tokens_s(found: SimulationResult, tenant: str = "day") -> list[float]:
    return sorted(
        record.token_s[0] - record.arrival.arrived_s
        for record in found.records.values()
        if record.arrival.flow.tenant == tenant
    )


def p95(values: list[float]) -> float:
    return values[len(values) * 95 // 100]


def step_s(sequences: int, tokens_each: int) -> float:
    """How long one step of the engine takes with so many sequences."""
    engine = profile("tiny-cpu")
    return engine.base_s + sequences * (engine.per_seq_s + tokens_each * engine.per_context_token_s)


@pytest.mark.parametrize("policy", ["fairserve", "dlpm"])
def test_other_work_goes_at_once_and_the_engine_is_full(policy: str) -> None:
    until_s = 20.0
    beside, engine = with_batch(visits(10.0, until_s), policy, batch=64, until_s=until_s)
    only, _ = with_batch([], policy, batch=64, until_s=until_s)
    received, whole = service(beside.records.values(), 5.0, until_s), service(only.records.values(), 5.0, until_s)
    assert sum(received.values()) > 0.95 * whole[NIGHT]
    # One step is under way when it comes, and its own may hold the prompts of others.
    times = first_tokens_s(beside)
    assert times[len(times) // 2] < 3 * step_s(32, 200)
    assert p95(times) < 10 * step_s(32, 200)
    preemption = engine.requests.preemption
    assert preemption.preempted > 0
    assert preemption.wasted_tokens <= 0.05 * preemption.received_tokens + preemption.at_once_tokens


def test_who_returns_does_not_wait_for_answers_of_minutes() -> None:
    back = [Arrival(f"day-{n}", Flow("day", "app", ""), 30.0, 64, 40, 100) for n in range(32)]
    found, engine = with_batch(back, batch=40, until_s=31.0, output=1200)
    times = first_tokens_s(found)
    alone = first_tokens_s(with_batch(back)[0])
    # What the KV cache has no room for waits for answers of its own tenant.
    assert times[24] < 3 * max(alone[24], step_s(32, 1200))
    assert 5 <= engine.requests.preemption.preempted <= 10


# --- a gateway that has just started: nobody is worse off than under plain VTC ---


HEAVY = Flow("heavy")
LIGHT = {"another tenant": Flow("light"), "another user": Flow("heavy", "", "light"), "another app": Flow("heavy", "b")}
AFTER_S = (0.1, 1.0, 5.0)


def fresh(policy: str, light: Flow, after_s: float, *, engines: int = 1, streamed: bool = False) -> SimulationResult:
    """Short answers where long ones are allowed: what a guess of their length gets most wrong."""
    lengths = Random(7)
    arrivals = [
        Arrival(f"heavy-{number:03}", HEAVY, 0.001 * number, 20, lengths.randint(40, 120), streamed=streamed)
        for number in range((200 if after_s > 1.0 else 100) * engines)  # so many that some wait for longer
    ]
    arrivals.append(Arrival("light", light, after_s, 9, 5))
    names = [f"engine-{number}" for number in range(engines)]
    admission = AdmissionEngine(named_policy(policy))
    for name in names:
        admission.add_backend(name)
    return simulate(
        sorted(arrivals, key=lambda arrival: arrival.arrived_s),
        engine=admission,
        backends={name: EngineModel(profile("demo")) for name in names},
    )


def wait_s(run: SimulationResult) -> float:
    waited_s = run.records["light"].ttft_s
    assert waited_s is not None
    return waited_s


def passed_by(run: SimulationResult) -> float:
    """Service of the requests that were dispatched while the light one waited."""
    cost, light = LinearCost(), run.records["light"]
    assert light.dispatched_s is not None
    return sum(
        cost(ServiceTokens(record.arrival.prompt_tokens, record.arrival.output_tokens))
        for record in run.records.values()
        if record.dispatched_s is not None and light.arrival.arrived_s < record.dispatched_s < light.dispatched_s
    )


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("after_s", AFTER_S)
@pytest.mark.parametrize("light", LIGHT.values(), ids=LIGHT)
def test_what_has_learned_nothing_is_as_fair_as_plain_vtc(
    light: Flow, after_s: float, streamed: bool, engines: int
) -> None:
    plain_s = wait_s(fresh("vtc", light, after_s, engines=engines, streamed=streamed))
    for policy in ("fairserve", "wsc"):
        run = fresh(policy, light, after_s, engines=engines, streamed=streamed)
        assert wait_s(run) <= 2 * plain_s or not passed_by(run), policy
