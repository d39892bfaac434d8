"""The simulation is the production engine on another clock: the same input gives the same decisions, every time."""

from __future__ import annotations

import pytest

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import profile
from lab.lab_driver import simulate
from lab.service import service, service_per_weight, throughput, ttft_s
from policies.admission.decisions import Dispatch
from policies.admission.engine import AdmissionEngine
from policies.admission.lifecycle import UnknownRequest
from policies.orders.policy_entries import POLICIES
from policies.queue.bounds import QueueLimits
from policies.request import Flow
from simulation.run import Arrival, Record, SimulationResult
from simulation.statistics import jain, percentile
from tests.policies.making import policy_with
from tests.simulation.decided_again import replay


def make_engine(policy: str = "vtc", limits: QueueLimits | None = None) -> AdmissionEngine:
    engine = AdmissionEngine(policy_with(policy, requests_per_minute=10_000), limits=limits)
    engine.add_backend("one", max_num_seqs=4)
    engine.add_backend("two")
    return engine


LIMITS = QueueLimits(queue_requests_max=30, queue_wait_s_max=0.5)


def mixed_traffic() -> list[Arrival]:
    return [
        Arrival(
            f"r{number}", Flow("abc"[number % 3], user=str(number % 2)), 0.004 * number, 20 + number % 97,
            5 + number * 7 % 60, streamed=number % 5 != 0,
        )
        for number in range(150)
    ]  # fmt: skip


def run_mixed(policy: str) -> tuple[SimulationResult, AdmissionEngine]:
    engine = make_engine(policy, LIMITS)
    backends = {"one": EngineModel(profile("tiny-cpu")), "two": EngineModel(profile("demo"))}
    found = simulate(
        mixed_traffic(), engine=engine, backends=backends,
        refuses=lambda name, gauges, now: name == "two" and gauges.running >= 6,
    )  # fmt: skip
    return found, engine


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_request_ends_and_recorded_events_lead_a_fresh_engine_to_the_same_decisions(policy: str) -> None:
    run, engine = run_mixed(policy)
    assert (engine.queued, engine.dispatched) == (0, 0)
    assert not any(ledger.sequences or ledger.starting for ledger in engine.backends.values())
    completed = [record for record in run.records.values() if record.outcome == "completed"]
    assert len(completed) > len(run.records) / 2
    for record in completed:
        assert len(record.token_s) == record.arrival.output_tokens
        assert record.dispatched_s is not None
        assert record.arrival.arrived_s <= record.dispatched_s < record.token_s[0] <= record.token_s[-1]
    assert replay(run.events, make_engine(policy, LIMITS)) == run.decisions
    other = "vtc" if policy == "fcfs" else "fcfs"
    with pytest.raises((UnknownRequest, AssertionError)):  # the replay has teeth: another policy decides otherwise
        assert replay(run.events, make_engine(other, LIMITS)) == run.decisions


def test_closed_loop_clients_send_the_next_when_one_has_ended() -> None:
    def follow(record: Record, now: float) -> Arrival | None:
        number = int(record.arrival.id) + 1
        return Arrival(str(number), Flow("a"), now + 0.5, 10, 5) if number < 4 else None

    engine = make_engine()
    backends = {name: EngineModel(profile("tiny-cpu")) for name in ("one", "two")}
    run = simulate([Arrival("0", Flow("a"), 1.0, 10, 5)], engine=engine, backends=backends, next_arrival=follow)
    assert list(run.records) == ["0", "1", "2", "3"]
    ends = [record.finished_s for record in run.records.values()]
    starts = [record.arrival.arrived_s for record in run.records.values()]
    assert starts[1:] == [end + 0.5 for end in ends[:-1] if end is not None]
    assert [decision.id for _, decision in run.decisions if isinstance(decision, Dispatch)] == ["0", "1", "2", "3"]


def finished_record(tenant: str, weight: float, dispatched_s: float, tokens: list[float]) -> Record:
    arrival = Arrival(tenant, Flow(tenant), 0.0, 10, len(tokens), weight=weight)
    return Record(arrival, dispatched_s, tokens)


def test_service_is_counted_when_it_is_received() -> None:
    records = [finished_record("a", 1.0, 1.0, [2.0, 3.0, 4.0]), finished_record("b", 2.0, 5.0, [6.0])]
    assert service(records, 0.0, 10.0) == {"a": 16.0, "b": 12.0}
    assert service(records, 2.0, 4.0) == {"a": 4.0, "b": 0.0}
    assert service_per_weight(records, 0.0, 10.0) == {"a": 16.0, "b": 6.0}


def test_jain_is_one_for_equal_shares_and_one_over_n_for_one_who_has_all() -> None:
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain([0.0, 0.0, 5.0, 0.0]) == pytest.approx(0.25)
    assert jain([0.0, 0.0]) == 1.0


def test_percentiles_are_values_that_were_seen() -> None:
    assert [percentile([4.0, 1.0, 3.0, 2.0], share) for share in (0.0, 0.5, 0.9, 1.0)] == [1.0, 2.0, 4.0, 4.0]
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_ttft_counts_from_the_arrival_and_throughput_to_the_last_token() -> None:
    records = [finished_record("a", 1.0, 1.0, [2.0, 3.0, 4.0])]
    assert ttft_s(records, "a") == 2.0
    assert throughput(records) == 3 / 4
