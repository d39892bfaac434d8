"""Which engines are asked, when are they asked again, and which of them get a request?"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from policies.admission.decisions import Failure, Reject
from policies.admission.engine import AdmissionEngine
from policies.admission.room import PoolRoom
from policies.capacity.gauges import CapacitySettings, Gauges
from policies.capacity.ledger import BackendLedger
from policies.capacity.obstacle import Blocked, Obstacle
from policies.capacity.working_set import WorkingSet
from policies.queue.bounds import QueueLimits
from policies.request import RejectReason, Request, ServiceTokens, of_batch
from policies.tree.pool_tree import PoolTree
from policies.tree.preemption import Preemption
from tests.policies.ledgers import start
from tests.policies.making import dispatched, make_request, pool_of


@pytest.mark.parametrize("tenant", ["a", "b"], ids=["of a flood", "alone"])
def test_nothing_waits_inside_an_engine_while_another_one_has_a_free_slot(tenant: str) -> None:
    engine, prefix = pool_of("one", "two", policy="fairserve", slots=16), (1, 2)
    engine.arrived(make_request("a", prefix=prefix, prompt=1000, id="first"), 0.0)
    engine.progressed("first", 1, 0.0)
    cached_at = engine.requests.leases["first"].backend
    while engine.backends[cached_at].sequences < 16:
        for decision in engine.arrived(make_request("a"), 0.0):
            engine.progressed(decision.id, 1, 0.0)
    for other in [one.request.id for one in engine.requests.leases.values() if one.backend != cached_at]:
        engine.finished(other, ServiceTokens(10, 1), 0.0)
    (decision,) = engine.arrived(make_request(tenant, prefix=prefix, prompt=1000), 0.0)
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


class Pool:
    """Engines, and the room that asks them."""

    def __init__(self, *ledgers: BackendLedger) -> None:
        self.engines, self.tree, self.preemption = Asked(), PoolTree(), Preemption()
        for ledger in ledgers:
            self.engines[ledger.name] = ledger
        self.room = PoolRoom(self.engines, WorkingSet(self.tree), self.tree, self.preemption)

    def arrive(self, *requests: Request) -> None:
        for request in requests:
            self.tree.arrived(request, 1.0)
        self.room.changed()

    def ask(self, request: Request, now: float = 0.0) -> dict[str, Obstacle | None]:
        """The engines that have room for this request; if none has, what prevents each of them."""
        self.engines.names.clear()
        self.room.at(now)
        found = self.room.find_room(request)
        return dict(found.obstacles) if isinstance(found, Blocked) else {ledger.name: None for ledger in found}


def engine(name: str, slots: int, *running: Request, **settings: int) -> BackendLedger:
    ledger = BackendLedger(name, CapacitySettings(**settings), max_num_seqs=slots)
    for request in running:
        start(ledger, request)
    return ledger


def test_a_wake_asks_only_the_engines_whose_time_has_come() -> None:
    """One is full, and of the others each has a page that is believed for a second and shows a queue."""
    full = engine("full", 2, make_request("b"), make_request("b"), waiting_target=0)
    soon, late = (engine(name, 2, make_request("b"), waiting_target=0) for name in ("soon", "late"))
    soon.observe(Gauges(0.2, running=1, waiting=9), 0.3)
    late.observe(Gauges(0.3, running=1, waiting=9), 0.3)
    pool, request = Pool(full, soon, late), make_request("a")
    pool.arrive(request)
    expected = {"full": Obstacle.SLOTS, "soon": Obstacle.WAITING, "late": Obstacle.WAITING}
    assert pool.ask(request, 0.3) == expected
    assert pool.room.opens_s() == 1.2
    assert pool.ask(request, 1.1) == expected
    assert not pool.engines.names, "the answers are kept"
    late.observe(Gauges(1.15, running=0, waiting=0), 1.15)  # it would have room, if it were asked
    assert pool.ask(request, 1.2) == {"soon": None}
    assert "late" not in pool.engines.names
    assert pool.room.opens_s() == 1.3, "the other one is still waited for"


def test_a_full_engine_is_not_asked_for_each_request_though_some_may_wait_inside() -> None:
    full = engine("full", 2)
    leases = [start(full, make_request("busy")) for _ in range(2)]
    pool, requests = Pool(full), [make_request(tenant) for tenant in ("many", "many", "alone")]
    pool.arrive(*requests)
    assert pool.ask(requests[0]) == {"full": Obstacle.SLOTS}
    for lease in leases:
        full.remove(lease, 0.0)  # it would have room, if it were asked
    assert pool.ask(requests[1]) == {"full": Obstacle.SLOTS}, "the engine is known to be full"
    assert pool.ask(requests[2]) == {"full": None}, "this one may wait inside, so the engine is asked"


def test_nothing_is_preempted_for_a_request_that_has_room_soon() -> None:
    pool, request = pool_of("one", "two"), make_request("a")
    pool.requests.tree.arrived(request, 1.0)
    for _ in range(2):
        pool.arrived(make_request(of_batch("b")), 0.0)
    room, blocked = pool.room, Blocked(request, {"one": Obstacle.PREFILL, "two": Obstacle.SLOTS})
    assert room.preempts_at(blocked) == []
    blocked.set("one", Obstacle.KV)
    assert room.preempts_at(blocked) == ["one", "two"]


def test_starts_of_a_flood_are_spread_unless_batch_runs_which_fills_the_gaps() -> None:
    def sized(tenant: str) -> Request:
        return make_request(tenant, prompt=92, output_max=10, expected=10.0, reserved=10)

    one = engine("one", 256)
    one.observe(Gauges(0.0, kv_capacity_tokens=10_000, block_size=16), 0.0)
    for _ in range(28):
        start(one, sized("a"))
    pool, other, batch = Pool(one), sized("a"), sized(of_batch("b"))
    for request in (other, batch):
        pool.arrive(request)
        assert pool.ask(request) == {"one": Obstacle.SPREAD}
    pool.preemption.dispatched(sized(of_batch("b")), "one")
    pool.room.changed()
    assert pool.ask(other) == {"one": None}
    pool.room.changed()
    assert pool.ask(batch) == {"one": Obstacle.SPREAD}


def test_an_engine_without_slots_for_many_sequences_may_have_one_for_a_single_one() -> None:
    running = [make_request("b", prompt=1, sequences=sequences) for sequences in (16, 16, 16, 1, 1, 1)]
    pool, many, single = Pool(engine("one", 16, *running)), make_request("a", sequences=16), make_request("a")
    pool.arrive(many, single)
    assert pool.ask(many) == {"one": Obstacle.SLOTS}
    assert pool.ask(single) == {"one": None}


PATIENT = QueueLimits(queue_wait_s_max=1000.0)


def test_the_next_of_a_light_tenant_waits_inside_the_engine_and_has_the_first_slot_that_is_free() -> None:
    engine = pool_of("one", limits=PATIENT)
    for number in range(12):
        engine.arrived(make_request("flood", id=f"flood-{number}"), 0.0)
    assert engine.dispatched == 2, "no flood waits inside the engine"
    assert dispatched(engine.arrived(make_request("b", id="light"), 5.0)) == ["light"]
    assert dispatched(engine.finished("flood-0", ServiceTokens(10, 1), 5.0)) == [], "the slot is that of the light one"
    assert dispatched(engine.finished("flood-1", ServiceTokens(10, 1), 6.0)) == ["flood-2"]


def refusing(*ids: str, slots: int | None = 8, streamed: bool = True) -> AdmissionEngine:
    """An engine on which one request runs, and that was sent these, in this order."""
    engine = pool_of("one", policy="fcfs", slots=slots, limits=PATIENT)
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
    assert engine.failed("poison", Failure.REFUSED, now + 0.002)[0] == Reject("poison", RejectReason.SERVER_BUSY, 1.0)
    assert engine.queued == 0


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
        assert wakeup_s > now
        now = wakeup_s
        engine.woke(now)


@pytest.mark.parametrize(
    ("sent", "slots", "streamed", "events", "proven"),
    [
        pytest.param("x taken", 8, False, ["refuses x", "ends taken"], "x", id="a whole answer shows it as well"),
        pytest.param("before x", 8, True, ["refuses x", "streams before"], "", id="none that was sent before it"),
        pytest.param(
            "x y z", None, True, ["streams runs", "refuses x", "refuses y", "streams z", "streams z"], "xy",
            id="one that is taken after several refusals tells of each once",
        ),
        pytest.param(
            "x y z", 8, True, ["streams z", "refuses y", "refuses x"], "xy",
            id="one that was taken before the refusals came tells of each at once",
        ),
    ],
)  # fmt: skip
def test_a_request_is_proven_to_be_refused_for_itself_by_one_that_was_sent_later_and_is_taken(
    sent: str, slots: int | None, streamed: bool, events: list[str], proven: str
) -> None:
    engine = refusing(*sent.split(), slots=slots, streamed=streamed)
    requests = [lease.request for lease in engine.requests.leases.values()]
    for number, event in enumerate(events, 1):
        what, id = event.split()
        if what == "refuses":
            refused(engine, id, 0.01 * number)
        elif what == "streams":
            engine.progressed(id, 1, 0.01 * number)
        else:
            engine.finished(id, ServiceTokens(10, 5), 0.01 * number)
    counts = {request.id: request.progress.proven_refusals for request in requests}
    assert +Counter(counts) == Counter(proven)
    assert (engine.queued == 0) == bool(proven), "else the engine is left alone"
    assert engine.backends["one"].slots.known() == slots
