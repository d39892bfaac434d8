"""Requests that wait for the word of other gateways are in the one queue: bounded, explained, woken and let go."""

from __future__ import annotations

import pytest

from policies.admission.decisions import Decision, Dispatch
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.interactions import Interactions
from policies.limits.quotas import Quota, Quotas
from policies.queue.bounds import QueueLimits
from policies.replicas.pool_replica import PoolReplica
from policies.replicas.tenant_replica import TenantReplica
from policies.request import NO_CLAIM, Claim, RejectReason, Request, ServiceTokens, State
from tests.kit.typed_script_store import TypedScriptStore
from tests.policies.making import make_request, pool_of, rejected

LIMITS = QueueLimits(queue_requests_max=10, queue_bytes_max=1000, queue_wait_s_max=2.0)


class Gateway:
    """One of several, with a tight limit on every tenant."""

    def __init__(self, store: TypedScriptStore, name: str, *, requests_per_minute: int = 5) -> None:
        self.name = name
        self.store = store
        self.number = 0
        quotas, interactions = Quotas(Quota(requests_per_minute=requests_per_minute)), Interactions()
        self.engine = AdmissionEngine(
            named_policy("fairserve"), limits=LIMITS, quotas=quotas, interactions=interactions
        )
        self.engine.add_backend("b", max_num_seqs=32)
        self.replica = TenantReplica(quotas, interactions, [self.engine])

    def ask(self, request: Request, now: float) -> list[Decision]:
        return list(self.engine.arrived(request, now))

    def exchange(self, now: float) -> list[Decision]:
        self.number += 1
        report = self.replica.report(now)
        view = self.store.exchange(self.name, self.number, report, int(now * 1000))
        self.replica.receive(view, now, now)
        return list(self.replica.decisions_of(self.engine))


def test_they_count_in_the_queue_and_its_bounds_hold() -> None:
    gateway = Gateway(TypedScriptStore(), "one")
    decisions: list[Decision] = []
    for number in range(50):
        decisions += gateway.ask(make_request("a", id=f"r{number}", body_bytes=300), 0.0)
    assert gateway.engine.queued == 3
    assert gateway.engine.queued_bytes == 900
    assert [reason for _, reason in rejected(decisions)] == [RejectReason.QUEUE_FULL] * 47


def test_explain_knows_what_they_wait_for() -> None:
    gateway = Gateway(TypedScriptStore(), "one")
    request = make_request("a", id="x")
    assert gateway.ask(request, 0.0) == []
    assert request.progress.state is State.UNDECIDED
    why = gateway.engine.explain("x", 0.0)
    assert (why.state, why.blocked) == ("queued", None)
    assert (
        why.reason == "queued: other gateways are asked about a limit that all of them count, or about its interaction"
    )
    assert why.numbers["place_in_tenant"] == 1.0


@pytest.mark.parametrize(
    ("waiting", "claim", "state"),
    [
        (0, Claim("q", begins=False), State.DISPATCHED),
        (2, Claim("q", begins=False), State.UNDECIDED),
        (2, NO_CLAIM, State.QUEUED),
    ],
)
def test_others_are_asked_about_an_interaction_only_while_something_waits(
    waiting: int, claim: Claim, state: State
) -> None:
    engine = pool_of("b", slots=1)
    TenantReplica(None, None, [engine])
    for number in range(waiting):
        engine.arrived(make_request("a", id=f"r{number}"), 0.0)
    call = make_request("a", id="call", claim=claim)
    engine.arrived(call, 0.0)
    assert call.progress.state is state


def test_they_expire_when_nobody_answers() -> None:
    gateway = Gateway(TypedScriptStore(), "one")
    gateway.ask(make_request("a", id="x"), 0.0)
    assert gateway.engine.next_wakeup() == 2.0
    assert rejected(gateway.engine.woke(2.0)) == [("x", RejectReason.QUEUE_TIMEOUT)]
    assert gateway.engine.queued == 0
    assert gateway.exchange(3.0) == [], "it is asked for no more"


def test_one_that_has_room_is_dispatched_with_the_answer_and_one_beyond_is_refused() -> None:
    store = TypedScriptStore()
    one, other = Gateway(store, "one"), Gateway(store, "other")
    outcomes: list[Decision] = []
    for number in range(8):
        gateway = (one, other)[number % 2]
        outcomes += gateway.ask(make_request("a", id=f"r{number}", arrived_s=0.01 * number), 0.01 * number)
    for now in (0.1, 0.2, 0.3):
        outcomes += one.exchange(now)
        outcomes += other.exchange(now + 0.01)
    assert sum(isinstance(outcome, Dispatch) for outcome in outcomes) == 5
    assert [reason for _, reason in rejected(outcomes)] == [RejectReason.RATE_LIMITED] * 3
    assert (one.engine.queued, other.engine.queued) == (0, 0)


def test_one_that_comes_while_the_store_is_asked_waits_for_what_others_have_used_meanwhile() -> None:
    store = TypedScriptStore()
    one, other = [Gateway(store, name, requests_per_minute=10) for name in ("one", "other")]
    outcomes = one.ask(make_request("a", id="first"), 0.0) + one.exchange(0.1)
    for number in range(9):
        outcomes += other.ask(make_request("a", id=f"r{number}"), 0.2)
    outcomes += other.exchange(0.2)
    assert sum(isinstance(outcome, Dispatch) for outcome in outcomes) == 10, "the limit"
    assert one.ask(make_request("a", id="asked"), 0.2) == []
    report = one.replica.report(0.2)
    assert one.ask(make_request("a", id="late"), 0.21) == [], "the report reserves more, and the store may have none"
    one.replica.receive(store.exchange("one", 2, report, 210), 0.2, 0.22)
    outcomes = [*one.replica.decisions_of(one.engine)]
    one.number = 2
    outcomes += one.exchange(0.23)
    assert {id for id, _ in rejected(outcomes)} == {"asked", "late"}


def test_one_whose_client_leaves_is_not_counted() -> None:
    store = TypedScriptStore()
    gateway = Gateway(store, "one")
    for number in range(5):
        gateway.ask(make_request("a", id=f"r{number}"), 0.0)
    assert gateway.engine.cancelled("r0", 0.05) == []
    report = gateway.replica.report(0.1)
    assert gateway.engine.cancelled("r1", 0.11) == [], "it was being asked for"
    gateway.replica.receive(store.exchange("one", 1, report, 100), 0.1, 0.12)
    decisions = gateway.replica.decisions_of(gateway.engine)
    assert {decision.id for decision in decisions} == {"r2", "r3", "r4"}
    gateway.number = 1
    later: list[Decision] = []
    for number in range(5, 8):
        later += gateway.ask(make_request("a", id=f"r{number}", arrived_s=0.2), 0.2)
    later += gateway.exchange(0.3)
    assert sum(isinstance(one, Dispatch) for one in later) == 2, "three of five are used"


def test_a_queued_one_gives_way_to_who_has_less_also_while_it_is_undecided() -> None:
    gateway = Gateway(TypedScriptStore(), "one", requests_per_minute=1)
    for number in range(10):
        gateway.ask(make_request("a", id=f"a{number}"), 0.0)
    assert gateway.engine.queued == 10
    assert rejected(gateway.ask(make_request("b", id="b0"), 0.1)) == [("a9", RejectReason.QUEUE_FULL)]
    assert gateway.engine.queued == 10


def test_explain_says_that_another_gateway_has_the_turn() -> None:
    store, engines, reasons = TypedScriptStore(), {}, set()
    for name in ("one", "other"):
        engine = pool_of("b")
        engines[name] = engine, PoolReplica(engine)
        for number in range(30):
            engine.arrived(make_request(name, id=f"{name}{number}", prompt=1000), 0.0)
    for number in range(1, 41):
        now = 0.025 * number
        for name, (engine, replica) in engines.items():
            view = store.exchange(name, number, replica.report(now), int(now * 1000))
            replica.receive(view, now, now)
            if engine.blocked is not None:
                why = engine.explain(engine.blocked.request.id, now)
                reasons.add(why.reason)
            for request_id in list(engine.requests.leases) if name == "one" else ():
                engine.finished(request_id, ServiceTokens(1000, 50), now)
    assert "queued: a request of another gateway goes first, or the room is kept for interactive work" in reasons


def test_the_time_until_the_answer_is_part_of_how_long_they_may_wait() -> None:
    gateway = Gateway(TypedScriptStore(), "one")
    gateway.ask(make_request("a", id="x"), 0.0)
    gateway.engine.backend_changed("b", False, 0.1)
    assert gateway.exchange(1.5) == []
    assert gateway.engine.next_wakeup() == 2.0
    assert rejected(gateway.engine.woke(2.0)) == [("x", RejectReason.NO_BACKEND)]


def test_of_those_that_were_asked_about_together_the_latest_are_refused() -> None:
    gateway = Gateway(TypedScriptStore(), "one")
    for number in range(8):
        gateway.ask(make_request("a", id=f"r{number}"), 0.0)
    assert {id for id, _ in rejected(gateway.exchange(0.1))} == {"r5", "r6", "r7"}
