"""The engine loop of the papers and its baselines; simple windows before a vLLM; impossible requests."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import profile
from lab.lab_driver import simulate
from lab.vtc.in_engine import A10G_LLAMA2_7B, serve_in_engine
from lab.vtc.unfair_orders import WINDOW_S, Rpm
from lab.vtc.windows import in_flight, serve_with_rule, starts_now, waiting
from lab.vtc.workload import overload
from policies.admission.engine import AdmissionEngine
from policies.admission.policy import Policy
from policies.orders.fcfs import Fcfs
from policies.orders.order import Selection
from policies.orders.policy_entries import POLICIES
from policies.orders.vtc import Vtc
from policies.request import CALM, Flow, Limit, Rejection, RejectReason
from simulation.run import IMPOSSIBLE, Arrival, Record
from tests.policies.making import Room, make_request, policy_with

LOOP = A10G_LLAMA2_7B


def arrival(number: int, prompt: int, output: int, *, at_s: float = 0.0, client: str = "a") -> Arrival:
    return Arrival(f"{number:03}", Flow(client), at_s, prompt, output)


def held_tokens(records: list[Record], time: float) -> int:
    """KV tokens at this time: prompts of those that run, and what they have said."""
    return sum(
        record.arrival.prompt_tokens + sum(token <= time for token in record.token_s)
        for record in records
        if record.token_s[0] <= time < record.token_s[-1]
    )


def test_one_request_takes_a_prefill_and_its_decode_steps() -> None:
    run = serve_in_engine([arrival(0, 100, 3)], Fcfs())
    prefill_s = LOOP.prefill_base_s + 100 * LOOP.per_prefill_token_s
    decodes_s = [LOOP.decode_base_s + LOOP.per_seq_s + used * LOOP.per_context_token_s for used in (101, 102)]
    times = run.records["000"].token_s
    assert times[0] == pytest.approx(prefill_s)
    assert [later - earlier for earlier, later in pairwise(times)] == pytest.approx(decodes_s)
    assert run.ended_s == times[-1]


def test_a_newcomer_waits_for_ten_decode_steps() -> None:
    run = serve_in_engine([arrival(0, 100, 50), arrival(1, 100, 50, at_s=0.06)], Fcfs())
    first, second = (run.records[name] for name in ("000", "001"))
    assert second.dispatched_s == first.token_s[10], "the prefill's token and ten more"


def test_memory_is_never_exceeded_and_nothing_is_preempted() -> None:
    arrivals = [arrival(i, 40 + 97 * i % 500, 20 + 61 * i % 400, client="abc"[i % 3]) for i in range(60)]
    run = serve_in_engine(arrivals, Fcfs())
    records = list(run.records.values())
    assert {record.outcome for record in records} == {"completed"}
    times = sorted({record.token_s[0] for record in records})
    held = [held_tokens(records, time) for time in times]
    assert max(held) <= LOOP.kv_tokens - 32
    assert max(held) > 0.7 * LOOP.kv_tokens, "there was something to exceed"


def test_adapters_take_memory_too() -> None:
    """Two requests that fill memory to the last token fit if they are one client's, not if they are two's."""
    tight = replace(LOOP, kv_tokens=232)
    alone = serve_in_engine([arrival(0, 50, 50), arrival(1, 50, 50)], Fcfs(), loop=tight)
    two = serve_in_engine([arrival(0, 50, 50), arrival(1, 50, 50, client="b")], Fcfs(), loop=tight)
    assert alone.records["001"].dispatched_s == 0.0
    assert (two.records["001"].dispatched_s or 0.0) > 0.0


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_serves_everything_the_same_way_twice(name: str) -> None:
    arrivals = overload((60, 120), 60.0)
    runs = [serve_in_engine(arrivals, policy_with(name, requests_per_minute=1000).order) for _ in range(2)]
    assert {record.outcome for record in runs[0].records.values()} == {"completed"}
    assert [r.token_s for r in runs[0].records.values()] == [r.token_s for r in runs[1].records.values()]


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 600), st.integers(1, 300), st.floats(0, 20)), max_size=40)
)
def test_every_request_gets_all_its_tokens_in_order(requests: list[tuple[str, int, int, float]]) -> None:
    requests.sort(key=lambda one: one[3])
    arrivals = [arrival(i, p, q, at_s=t, client=c) for i, (c, p, q, t) in enumerate(requests)]
    run = serve_in_engine(arrivals, Vtc())
    for record in run.records.values():
        assert record.dispatched_s is not None
        assert len(record.token_s) == record.arrival.output_tokens
        assert record.arrival.arrived_s <= record.dispatched_s < record.token_s[0]
        assert all(earlier < later for earlier, later in pairwise(record.token_s))


# --- a gateway with a simple rule before a vLLM ---

TINY = profile("tiny-cpu")


def burst(requests: int) -> list[Arrival]:
    return [arrival(i, 200, 100, client="ab"[i % 2]) for i in range(requests)]


def in_flight_max(records: list[Record]) -> int:
    starts = sorted(record.dispatched_s or 0.0 for record in records)
    ends = sorted(record.finished_s or 0.0 for record in records)
    return max(bisect_right(starts, start) - bisect_right(ends, start) for start in starts)


def test_a_window_holds_back_what_is_beyond_it() -> None:
    run = serve_with_rule(burst(60), Vtc(), TINY, in_flight(7))
    assert {record.outcome for record in run.records.values()} == {"completed"}
    assert in_flight_max(list(run.records.values())) == 7


def test_requests_that_start_at_once_never_wait_inside() -> None:
    run = serve_with_rule(burst(60), Vtc(), TINY, starts_now)
    preempted = sum(record.preemptions for record in run.records.values())
    assert run.waiting_max <= preempted
    assert in_flight_max(list(run.records.values())) > 7


def test_a_waiting_target_is_kept() -> None:
    short = [arrival(i, 20, 30) for i in range(100)]
    assert serve_with_rule(short, Vtc(), TINY, waiting(3)).waiting_max <= 4
    assert serve_with_rule(short, Vtc(), TINY, in_flight(1000)).waiting_max > 50


def test_impossible_requests_are_refused_before_an_engine_too() -> None:
    arrivals = [arrival(0, 4_000, 2_000), arrival(1, 100, 10)]
    ruled = serve_with_rule(arrivals, Vtc(), TINY, starts_now)
    engine = AdmissionEngine(Policy(Vtc()))
    engine.add_backend("one")
    driven = simulate(arrivals, engine=engine, backends={"one": EngineModel(TINY)})
    for run in (ruled, driven):
        assert [record.outcome for record in run.records.values()] == [IMPOSSIBLE, "completed"]
    assert (engine.queued, engine.dispatched) == (0, 0)


# --- requests per minute: a sliding window per tenant, and arrival order behind it ---


def arrives(policy: Policy, tenant: str, now: float) -> Rejection | None:
    """As the engine does it: what is not refused is queued."""
    request = make_request(tenant, arrived_s=now)
    refused = policy.order.find_rejection(request, now, CALM)
    if refused is None:
        policy.push(request, now)
    return refused


@pytest.mark.interpreted_only("extends a policy")
@settings(max_examples=200)
@given(
    limit=st.integers(1, 5),
    arrivals=st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 40, allow_subnormal=False)), max_size=60),
)
def test_admits_what_fits_in_any_sixty_seconds_and_nothing_more(limit: int, arrivals: list[tuple[str, float]]) -> None:
    policy, now = Policy(Rpm(limit)), 0.0
    admitted: dict[str, list[float]] = {"a": [], "b": []}
    for tenant, pause_s in arrivals:
        now += pause_s
        in_window = [then for then in admitted[tenant] if then + WINDOW_S > now]
        refused = arrives(policy, tenant, now)
        assert (refused is not None) == (len(in_window) >= limit)
        if refused is None:
            admitted[tenant].append(now)
        else:
            opens_in_s = in_window[0] + WINDOW_S - now
            assert refused == Rejection(
                RejectReason.RATE_LIMITED,
                refused.retry_after_s,
                Limit("requests", limit, 0, refused.retry_after_s, WINDOW_S),
            )
            assert refused.retry_after_s == pytest.approx(opens_in_s)
            returns = policy.order.find_rejection(make_request(tenant), now + refused.retry_after_s, CALM)
            assert returns is None, "whoever comes back when told is admitted, and a refusal is not counted"


@pytest.mark.interpreted_only("extends a policy")
def test_what_a_backend_sent_back_is_not_counted_again() -> None:
    policy = Policy(Rpm(2))
    arrives(policy, "a", 0.0)
    selection = policy.pop(1.0, Room())
    assert isinstance(selection, Selection)
    policy.push(selection.request, 2.0, front=True)
    assert arrives(policy, "a", 3.0) is None
    assert arrives(policy, "a", 4.0) is not None
