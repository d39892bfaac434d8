"""Which engines are asked, when are they asked again, and which of them get a request?"""

from __future__ import annotations

from typing import Any

import pytest

from policies.admission.decisions import Dispatch, Failure, Reject
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.admission.room import PoolRoom
from policies.capacity.gauges import CapacitySettings, Gauges
from policies.capacity.lease import Lease
from policies.capacity.ledger import BackendLedger
from policies.capacity.obstacle import Blocked, Obstacle
from policies.capacity.working_set import WorkingSet
from policies.queue.bounds import QueueLimits
from policies.request import Refusal, Request, ServiceTokens, of_batch
from policies.tree.pool_tree import PoolTree
from policies.tree.preemption import Preemption
from tests.policies.making import dispatched, make_request


def engines_of(policy: str, *names: str, slots: int = 4) -> AdmissionEngine:
    engine = AdmissionEngine(named_policy(policy))
    for name in names:
        engine.add_backend(name, max_num_seqs=slots)
    return engine


@pytest.mark.parametrize("policy", ["fairserve", "vtc", "fcfs"])
def test_an_engine_that_runs_nothing_is_tried_whatever_was_learned_of_it(policy: str) -> None:
    engine = engines_of(policy, "full", slots=32)  # a slot there is soon free
    engine.add_backend("idle")
    engine.backend_changed("idle", False, 0.0)
    while not engine.queued:
        engine.arrived(make_request("a"), 0.0)
    engine.cancelled(next(iter(engine.requests.waiting.requests)), 0.0)
    engine.backends["idle"].slots.refused(1)
    engine.backend_changed("idle", True, 1.0)
    assert engine.arrived(make_request("b", id="x", sequences=2), 1.0) == [Dispatch("x", "idle")]


@pytest.mark.parametrize("tenant", ["a", "b"], ids=["of a flood", "alone"])
def test_nothing_waits_inside_an_engine_while_another_one_has_a_free_slot(tenant: str) -> None:
    engine, prefix = engines_of("fairserve", "one", "two", slots=16), (1, 2)
    engine.arrived(make_request("a", prefix=prefix, prompt=1000, id="first"), 0.0)
    engine.progressed("first", 1, 0.0)
    cached_at = engine.requests.leases["first"].backend
    while engine.backends[cached_at].sequences < 16:
        for decision in engine.arrived(make_request("a"), 0.0):
            assert isinstance(decision, Dispatch)
            engine.progressed(decision.id, 1, 0.0)
    for other in [one.request.id for one in engine.requests.leases.values() if one.backend != cached_at]:
        engine.finished(other, ServiceTokens(10, 1), 0.0)
    (decision,) = engine.arrived(make_request(tenant, prefix=prefix, prompt=1000), 0.0)
    assert isinstance(decision, Dispatch)
    assert decision.backend != cached_at, "though all of its prompt is cached there"


class Asked(dict[str, BackendLedger]):
    """The engines of a pool, with the names of those that were looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __getitem__(self, name: str) -> BackendLedger:
        self.names.append(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.append(name)
        return super().get(name, default)

    def values(self) -> Any:
        self.names += super().keys()
        return super().values()


def test_a_wake_asks_only_the_engines_whose_time_has_come() -> None:
    """One is full, and of the others each has a page that is believed for a second and shows a queue."""
    engines, request = Asked(), make_request("a")
    for name in ("full", "soon", "late"):
        ledger = engines[name] = BackendLedger(name, CapacitySettings(waiting_target=0), max_num_seqs=2)
        for _ in range(2 if name == "full" else 1):
            lease = Lease(make_request("b"), name, 0.0)
            ledger.add(lease)
            ledger.started(lease, 0.0)
    engines["soon"].observe(Gauges(0.2, running=1, waiting=9), 0.3)
    engines["late"].observe(Gauges(0.3, running=1, waiting=9), 0.3)
    tree = PoolTree()
    room = PoolRoom(engines, WorkingSet(tree), tree, Preemption())
    tree.arrived(request, 1.0)
    room.changed()
    room.at(0.3)
    blocked = room.with_room(request)
    assert isinstance(blocked, Blocked)
    assert blocked.obstacles == {"full": Obstacle.SLOTS, "soon": Obstacle.WAITING, "late": Obstacle.WAITING}
    assert room.opens_s() == 1.2
    engines.names.clear()
    room.at(1.1)
    assert room.with_room(request) is blocked
    assert not engines.names, "the answers are kept"
    engines["late"].observe(Gauges(1.15, running=0, waiting=0), 1.15)  # it would have room, if it were asked
    engines.names.clear()
    room.at(1.2)
    found = room.with_room(request)
    assert not isinstance(found, Blocked)
    assert [ledger.name for ledger in found] == ["soon"]
    assert "late" not in engines.names
    assert room.opens_s() == 1.3, "the other one is still waited for"


def test_a_full_engine_is_not_asked_for_each_request_though_some_may_wait_inside() -> None:
    engines, tree = {"full": BackendLedger("full", CapacitySettings(), max_num_seqs=2)}, PoolTree()
    leases = [Lease(make_request("busy"), "full", 0.0) for _ in range(2)]
    for lease in leases:
        engines["full"].add(lease)
        engines["full"].started(lease, 0.0)
    room = PoolRoom(engines, WorkingSet(tree), tree, Preemption())
    requests = [make_request(tenant) for tenant in ("many", "many", "alone")]
    for request in requests:
        tree.arrived(request, 1.0)
    room.changed()
    room.at(0.0)
    assert isinstance(room.with_room(requests[0]), Blocked)
    for lease in leases:
        engines["full"].remove(lease, 0.0)  # it would have room, if it were asked
    assert isinstance(room.with_room(requests[1]), Blocked), "the engine is known to be full"
    assert not isinstance(room.with_room(requests[2]), Blocked), "this one may wait inside, so the engine is asked"


@pytest.mark.interpreted_only("counts look-ups, which compiled code does without asking")
def test_a_wake_looks_only_at_engines_where_something_has_happened_or_is_due() -> None:
    engine, engines = AdmissionEngine(named_policy("vtc")), Asked()
    engine.backends = engine.requests.backends = engines
    engine.room = PoolRoom(engines, engine.working_set, engine.requests.tree, Preemption())
    for number in range(50):
        engine.add_backend(str(number), max_num_seqs=2)
        engine.backend_changed(str(number), Gauges(0.0, kv_capacity_tokens=100_000), 0.0)
    while not engine.queued:
        for decision in engine.arrived(make_request("a"), 0.0):
            engine.progressed(decision.id, 1, 0.0)
    looked_at = []
    for number in range(1, 101):
        engines.names.clear()
        engine.woke(number / 50)
        looked_at.append(len(set(engines.names)))
    assert looked_at[:2] == [50, 50], "a request began at each, and streamed"
    assert looked_at[2] == 0
    assert 50 in looked_at[3:], "time has passed"
    assert sum(looked_at[3:]) <= 8 * 50
    one = next(iter(engine.requests.leases.values()))
    engine.progressed(one.request.id, 3, 2.0)
    engines.names.clear()
    engine.woke(2.02)
    assert set(engines.names) == {one.backend}


def test_the_slot_of_a_request_that_is_cancelled_is_used_at_once() -> None:
    engine = engines_of("vtc", "one", "two", slots=1)
    while not engine.queued:
        engine.arrived(make_request("a"), 0.0)
    (waits,) = engine.requests.waiting.requests
    assert dispatched(engine.cancelled(next(iter(engine.requests.leases)), 1.0)) == [waits]


def test_nothing_is_preempted_for_a_request_that_has_room_soon() -> None:
    room = engines_of("vtc", "one", "two").room
    blocked = Blocked(make_request("a"), {"one": Obstacle.PREFILL, "two": Obstacle.SLOTS})
    assert room.preempts_at(blocked) == []
    blocked.set("one", Obstacle.KV)
    assert room.preempts_at(blocked) == ["one", "two"]


def test_starts_of_a_flood_are_spread_unless_batch_runs_which_fills_the_gaps() -> None:
    def sized(tenant: str) -> Request:
        return make_request(tenant, prompt=92, output_max=10, expected=10.0, reserved=10)

    ledger, tree, preemption = BackendLedger("one", CapacitySettings(), max_num_seqs=256), PoolTree(), Preemption()
    ledger.observe(Gauges(0.0, kv_capacity_tokens=10_000, block_size=16), 0.0)
    for _ in range(28):
        lease = Lease(sized("a"), "one", 0.0)
        ledger.add(lease)
        ledger.started(lease, 0.0)
    room = PoolRoom({"one": ledger}, WorkingSet(tree), tree, preemption)
    other, batch = sized("a"), sized(of_batch("b"))
    for request in (other, batch):
        tree.arrived(request, 1.0)
        assert spread_at(room, request) == ["one"]
    preemption.dispatched(sized(of_batch("b")), "one")
    assert spread_at(room, other) == []
    assert spread_at(room, batch) == ["one"]


def spread_at(room: PoolRoom, request: Request) -> list[str]:
    """The engines that have room for this request, and leave it for later."""
    room.changed()
    found = room.with_room(request)
    return (
        [name for name, why in found.obstacles.items() if why is Obstacle.SPREAD] if isinstance(found, Blocked) else []
    )


def test_an_engine_without_slots_for_many_sequences_may_have_one_for_a_single_one() -> None:
    engines = Asked()
    ledger = engines["one"] = BackendLedger("one", CapacitySettings(), max_num_seqs=16)
    for sequences in (16, 16, 16, 1, 1, 1):
        lease = Lease(make_request("b", prompt=1, sequences=sequences), "one", 0.0)
        ledger.add(lease)
        ledger.started(lease, 0.0)
    tree = PoolTree()
    room = PoolRoom(engines, WorkingSet(tree), tree, Preemption())
    many, single = make_request("a", sequences=16), make_request("a")
    for request in (many, single):
        tree.arrived(request, 1.0)
    room.changed()
    assert isinstance(room.with_room(many), Blocked)
    assert not isinstance(room.with_room(single), Blocked)


PATIENT = QueueLimits(queue_wait_s_max=1000.0)


def test_the_next_of_a_light_tenant_waits_inside_the_engine_and_has_the_first_slot_that_is_free() -> None:
    engine = AdmissionEngine(named_policy("vtc"), limits=PATIENT)
    engine.add_backend("one", max_num_seqs=2)
    for number in range(12):
        engine.arrived(make_request("flood", id=f"flood-{number}"), 0.0)
    assert engine.dispatched == 2, "no flood waits inside the engine"
    assert dispatched(engine.arrived(make_request("b", id="light"), 5.0)) == ["light"]
    assert dispatched(engine.finished("flood-0", ServiceTokens(10, 1), 5.0)) == [], "the slot is that of the light one"
    assert dispatched(engine.finished("flood-1", ServiceTokens(10, 1), 6.0)) == ["flood-2"]


def refusing(*ids: str, slots: int | None = 8, streamed: bool = True) -> AdmissionEngine:
    """An engine on which one request runs, and that was sent these, in this order."""
    engine = AdmissionEngine(named_policy("fcfs"), limits=PATIENT)
    engine.add_backend("one", max_num_seqs=slots)
    for id in ("runs", *ids):
        assert dispatched(engine.arrived(make_request("a", id=id, streamed=streamed), 0.0)) == [id]
    return engine


def refused(engine: AdmissionEngine, id: str, now: float) -> list[str]:
    return dispatched(engine.failed(id, Failure.REFUSED, now))


def test_a_request_that_is_refused_though_later_ones_are_taken_is_given_up() -> None:
    engine, now = refusing(), 1.0
    assert dispatched(engine.arrived(make_request("a", id="poison"), now)) == ["poison"]
    for number in range(PATIENT.attempts_max):
        taken = f"taken-{number}"
        assert dispatched(engine.arrived(make_request("a", id=taken), now)) == [taken]
        assert refused(engine, "poison", now + 0.002) == []
        now += 0.02
        assert dispatched(engine.progressed(taken, 1, now)) == ["poison"], "the engine is not full, and not left alone"
        engine.finished(taken, ServiceTokens(10, 5), now)
    assert engine.failed("poison", Failure.REFUSED, now + 0.002)[0] == Reject("poison", Refusal.SERVER_BUSY, 1.0)
    assert engine.queued == 0


def test_whole_answers_show_it_as_well() -> None:
    engine = refusing("poison", "taken", streamed=False)
    poison = engine.requests.leases["poison"].request
    assert refused(engine, "poison", 0.1) == []
    assert dispatched(engine.finished("taken", ServiceTokens(10, 5), 0.11)) == ["poison"]
    assert poison.progress.proven_refusals == 1


def test_an_engine_that_refuses_whatever_comes_is_full_and_gives_nobody_up() -> None:
    engine, now = refusing("x", "y", slots=None), 0.1
    engine.progressed("runs", 1, now)
    for _ in range(4 * PATIENT.attempts_max):
        sent = [id for id in engine.requests.leases if id != "runs"]
        assert sent
        for id in sent:
            assert refused(engine, id, now) == []
        assert engine.backends["one"].slots.known() == 1
        wakeup_s = engine.next_wakeup()
        assert wakeup_s is not None
        assert wakeup_s > now
        now = wakeup_s
        engine.woke(now)


def test_what_was_sent_before_a_refused_request_says_nothing_of_it() -> None:
    engine = refusing("before", "refused")
    request = engine.requests.leases["refused"].request
    assert refused(engine, "refused", 0.01) == []
    assert dispatched(engine.progressed("before", 1, 0.02)) == []
    assert request.progress.proven_refusals == 0
    assert engine.next_wakeup() == pytest.approx(0.11), "it is left alone"


def test_one_that_is_taken_after_several_that_were_refused_tells_of_each_once() -> None:
    engine = refusing("x", "y", "z", slots=None)
    requests = [engine.requests.leases[id].request for id in ("x", "y", "z")]
    engine.progressed("runs", 1, 0.001)
    refused(engine, "x", 0.01)
    refused(engine, "y", 0.01)
    assert engine.backends["one"].slots.known() is None, "one that was sent later may still be taken"
    engine.progressed("z", 1, 0.02)
    engine.progressed("z", 1, 0.03)
    assert [request.progress.proven_refusals for request in requests] == [1, 1, 0]
    assert engine.backends["one"].slots.known() is None


def test_one_that_was_taken_before_the_refusals_came_tells_of_each_at_once() -> None:
    engine = refusing("x", "y", "z")
    requests = [engine.requests.leases[id].request for id in ("x", "y")]
    engine.progressed("z", 1, 0.01)
    assert refused(engine, "y", 0.02) == ["y"]
    assert refused(engine, "x", 0.02) == ["x"]
    assert [request.progress.proven_refusals for request in requests] == [1, 1]
