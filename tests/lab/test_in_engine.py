"""The engine loop of the papers and its baselines; simple windows before a vLLM."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from backends.simulated.engine_profiles import profile
from lab.vtc.in_engine import A10G_LLAMA2_7B, serve_in_engine
from lab.vtc.windows import in_flight, serve_with_rule, starts_now, waiting
from policies.orders.fcfs import Fcfs
from policies.orders.vtc import Vtc
from policies.request import Flow
from simulation.run import Arrival, Record

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


def test_memory_is_never_exceeded_and_nothing_is_preempted() -> None:
    arrivals = [arrival(i, 40 + 97 * i % 500, 20 + 61 * i % 400, client="abc"[i % 3]) for i in range(60)]
    run = serve_in_engine(arrivals, Fcfs())
    records = list(run.records.values())
    assert {record.outcome for record in records} == {"completed"}
    times = sorted({record.token_s[0] for record in records})
    held = [held_tokens(records, time) for time in times]
    assert max(held) <= LOOP.kv_tokens - 32
    assert max(held) > 0.7 * LOOP.kv_tokens, "there was something to exceed"


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


def test_a_rule_holds_back_what_is_beyond_it() -> None:
    ruled = serve_with_rule(burst(60), Vtc(), TINY, in_flight(7))
    assert {record.outcome for record in ruled.records.values()} == {"completed"}
    assert in_flight_max(list(ruled.records.values())) == 7
    at_once = serve_with_rule(burst(60), Vtc(), TINY, starts_now)
    assert at_once.waiting_max <= sum(record.preemptions for record in at_once.records.values())
    assert in_flight_max(list(at_once.records.values())) > 7
    short = [arrival(i, 20, 30) for i in range(100)]
    assert serve_with_rule(short, Vtc(), TINY, waiting(3)).waiting_max <= 4
    assert serve_with_rule(short, Vtc(), TINY, in_flight(1000)).waiting_max > 50
