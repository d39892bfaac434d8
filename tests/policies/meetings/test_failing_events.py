"""A fault of this program and the pool: an event happens whole or not at all, and all other requests go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from policies.admission.decisions import Decision
from policies.admission.engine import AdmissionEngine
from policies.limits.quotas import Quota, Quotas
from policies.request import Flow, RejectReason, Request
from policies.tree.terms import ROOT
from tests.policies.making import SilentGateways
from tests.policies.meetings.world import World, tree


@pytest.mark.parametrize("policy", ["vtc", "fairserve", "rr", "dlpm", "d2lpm"])
def test_a_tenant_without_a_floor_is_served_beside_floors_of_all_of_the_pool(policy: str) -> None:
    owners = dict.fromkeys(("t0", "t1"), (ROOT, {"guaranteed_share": 0.5}))
    world = World(policy, {"e": (2, 60_000)}, tree=tree({}, owners))
    for owner in owners:
        world.closed(owner, 4, 300, 20)
    for _ in range(10):
        world.send("other", 300, 20, 1.0)
    world.run(200)
    assert world.outcomes("other")["completed"] >= 2
    assert world.part("t0") == pytest.approx(0.5, abs=0.02)


def test_a_request_without_an_answer_of_other_gateways_expires_while_the_set_is_full() -> None:
    world = World("fairserve", {"e": (4, 100_000)}, prefill_per_s=5000.0)
    world.engine.peers = SilentGateways("new")
    world.agents("a", 11, context=9_000, calls=100, pause_s=1.0, output=400)
    world.send("new", 40_000, 10, 20.0, wait_s_max=10.0)
    world.run(40)
    assert world.outcomes("new") == {"queue_timeout": 1}
    assert world.engine.faults == 0


class Broken:
    """Raises at the first call for the request that is named `bad`, before or after the call takes effect."""

    def __init__(self, whole: Callable[..., Any], *, before: bool) -> None:
        self.whole = whole
        self.before = before
        self.raised = False

    def __call__(self, *args: Any, **how: Any) -> Any:
        is_bad = not self.raised and any(getattr(each, "request", each) is BAD.get("request") for each in args)
        found = None if is_bad and self.before else self.whole(*args, **how)
        if is_bad:
            self.raised = True
            raise ZeroDivisionError("a fault")
        return found


BAD: dict[str, Request] = {}


@pytest.mark.interpreted_only("breaks methods of compiled classes")
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    "where",
    [
        "policy.push", "policy.charge", "requests.tree.arrived", "requests.tree.run",
        "requests.tree.left", "working_set.queued", "working_set.dispatched", "working_set.left",
        "working_set.has_room", "quotas.admitted", "quotas.ended", "requests.lengths.learn", "backends.e.add",
        "backends.e.remove", "interactions.admitted", "interactions.served", "room.find_room",
        "requests.preemption.dispatched", "requests.expected_waits.count_arrival", "requests.expected_waits.dispatched",
    ],
)  # fmt: skip
@pytest.mark.parametrize("batch", [False, True])
def test_wherever_an_event_fails_only_its_request_does(
    where: str, before: bool, batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World("fairserve", {"e": (4, 60_000)}, tree=tree({"g": (ROOT, {"max_running": 3})}, {"a": ("g", {})}))
    engine = world.engine
    engine.quotas = engine.requests.quotas = Quotas(Quota(concurrent=100))
    faults: list[str] = []
    engine.on_fault = lambda error, request_id: faults.append(request_id)
    path, _, method = where.rpartition(".")
    owner: Any = engine
    for name in path.split("."):
        owner = owner[name] if isinstance(owner, dict) else getattr(owner, name)
    monkeypatch.setattr(owner, method, Broken(getattr(owner, method), before=before))
    for tenant in ("a", "b"):
        world.closed(tenant, 6, 300, 40)
    world.send("a", 500, 30, 2.0, batch=batch)
    world.at(1.9999, arm, world, BAD)
    world.run(8)
    BAD.clear()
    assert all(id in ("", "a-bad", *world.asked) for id in faults)
    assert len(faults) <= 1
    now = len([one for one in world.asked.values() if one.outcome == "completed"])
    world.run(18)
    assert len([one for one in world.asked.values() if one.outcome == "completed"]) > now + 30
    refused = [one.request.id for one in world.asked.values() if one.outcome not in ("completed", "")]
    assert refused == [] or (len(refused) == 1 and world.asked[refused[0]].outcome == RejectReason.INTERNAL_ERROR)
    assert books(engine) == expected_books(world)


def arm(world: World, bad: dict[str, Request]) -> None:
    """The next request that arrives is the bad one."""
    arrived = world.engine.arrived

    def first(request: Request, now: float) -> Sequence[Decision]:
        world.engine.arrived = arrived
        bad["request"] = request
        return arrived(request, now)

    world.engine.arrived = first


def books(engine: AdmissionEngine) -> dict[str, object]:
    """What the tables say that is there."""
    requests = engine.requests
    backlog = engine.policy.order.backlog
    return {
        "queued": backlog.queued,
        "waiting": len(requests.waiting.requests),
        "leases": sorted(requests.leases),
        "at the engine": sorted(engine.backends["e"].leases),
        "sequences": engine.backends["e"].sequences,
        "tokens": engine.backends["e"].kv.held_tokens,
    }


def expected_books(world: World) -> dict[str, object]:
    open_ = [one for one in world.asked.values() if not one.outcome]
    running = sorted(one.request.id for one in open_ if one.went_s is not None)
    waiting, ledger = len(open_) - len(running), world.engine.backends["e"]
    tokens = sum(lease.footprint_tokens for lease in ledger.leases.values())
    return {
        "queued": waiting, "waiting": waiting, "leases": running, "at the engine": running, "sequences": len(running),
        "tokens": tokens,
    }  # fmt: skip


@pytest.mark.interpreted_only("breaks methods of compiled classes")
def test_without_anybody_who_hears_of_it_a_fault_is_raised_and_the_pool_goes_on() -> None:
    world = World("vtc", {"e": (1, 60_000)})
    engine = world.engine

    def fault(request: Request, now: float) -> None:
        raise ZeroDivisionError("a fault")

    engine.requests.admitted = fault
    request = Request("bad", Flow("a"), 1.0, 10, 10, 0.0)
    with pytest.raises(ZeroDivisionError):
        engine.arrived(request, 0.0)
    assert engine.queued == engine.dispatched == 0
    del engine.requests.admitted
    [dispatch] = engine.arrived(Request("good", Flow("a"), 1.0, 10, 10, 0.0), 0.0)
    assert dispatch.id == "good"
