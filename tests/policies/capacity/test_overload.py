"""Overload: when it begins and ends, what it does to arrivals, and that everything can be explained."""

from __future__ import annotations

import json
from typing import Any

import pytest

from policies.admission.decisions import Decision, Dispatch, Reject
from policies.admission.named import named_policy
from policies.admission.takeover import adopt, read, snapshot
from policies.capacity.gauges import CapacitySettings, Gauges
from policies.capacity.lease import Lease
from policies.capacity.ledger import BackendLedger
from policies.capacity.obstacle import Blocked, Obstacle
from policies.capacity.overload import Overload, OverloadSettings
from policies.interactions import Interactions, InteractionSettings
from policies.limits.throttle import Ceilings, ThrottleSettings
from policies.queue.bounds import QueueLimits
from policies.request import Claim, RejectReason, ServiceTokens
from tests.policies.making import make_request, pool_of, rejected

CAPACITY_TOKENS = 1000
SOME = ServiceTokens(90, 10)
STARTS = ThrottleSettings(user=Ceilings(starts=3), app_user=Ceilings(), app=Ceilings())


class Pool:
    """One engine with one backend of 1,000 KV tokens, scraped as often as its gauges are believed."""

    def __init__(self, *, slots: int | None = 64, kv: bool = True, limits: QueueLimits | None = None, **params: Any):
        self.engine = pool_of(
            "one", policy=named_policy("fairserve", throttle=STARTS), slots=slots, limits=limits, **params
        )
        self.kv = kv
        self.now = 0.0
        self.scrape(0.0)

    def scrape(self, usage: float) -> None:
        if self.kv:
            gauges = Gauges(self.now, 0, 0, kv_usage=usage, kv_capacity_tokens=CAPACITY_TOKENS, block_size=16)
            self.engine.backend_changed("one", gauges, self.now)

    def ask(self, tenant: str = "a", claim: str = "", *, prompt: int = 90, id: str | None = None) -> Decision | None:
        """What happens to one more request; None: it is queued."""
        request = make_request(tenant, id=id, prompt=prompt, output_max=10, arrived_s=self.now, claim=Claim(claim))
        decisions = self.engine.arrived(request, self.now)
        return next((decision for decision in decisions if decision.id == request.id), None)

    def served(self, claim: str) -> None:
        """A call of this interaction."""
        self.engine.finished(self.ask("a", claim).id, SOME, self.now)

    def fill(self, tenant: str = "filler") -> list[str]:
        """Requests until one has to wait."""
        ids = []
        while isinstance(decision := self.ask(tenant), Dispatch):
            ids.append(decision.id)
            self.engine.progressed(decision.id, 1, self.now)
        return ids


# --- the state ---


def filled(level: float, now: float) -> BackendLedger:
    """A backend that says how full it is, and not how large."""
    ledger = BackendLedger("one", CapacitySettings())
    ledger.add(Lease(make_request(), "one", now))
    ledger.observe(Gauges(now, kv_usage=level), now)
    return ledger


def observed(overload: Overload, level: float, now: float, *others: float, waits: bool = True) -> bool:
    ledgers = [filled(each, now) for each in (level, *others)]
    blocked = Blocked(make_request(), {"one": Obstacle.KV}) if waits else None
    foreseen = overload.seen(ledgers, blocked, now)
    found = overload.observe(ledgers, blocked, now)
    assert (found, overload.since_s) == foreseen
    assert overload.pressure is found
    return found.overloaded


def test_it_begins_and_ends_at_different_levels_and_lasts() -> None:
    overload = Overload(OverloadSettings(enter=0.9, leave=0.7, dwell_s=2.0))
    levels = [(0.89, 0.0), (0.9, 1.0), (0.1, 2.0), (0.1, 3.0), (0.99, 4.0), (0.99, 5.0), (0.8, 9.0), (0.69, 9.1)]
    states = [observed(overload, level, now) for level, now in levels]
    assert states == [False, True, True, False, False, True, True, False]


def test_it_shows_its_reason() -> None:
    blocked = Blocked(make_request(), {"one": Obstacle.KV})
    state = Overload(OverloadSettings()).observe([filled(0.97, 0.0)], blocked, 0.0)
    assert state.overloaded
    assert state.reason == "KV cache, measured, 97% full; overload begins at 95%, ends below 85%"


@pytest.mark.parametrize(
    ("levels", "waits", "is_overloaded"),
    [
        pytest.param((1.0, 0.96), True, True, id="all are full"),
        pytest.param((1.0, 0.5), True, False, id="a pool is as full as its emptiest backend"),
        pytest.param((1.0,), False, False, id="only while something waits"),
    ],
)
def test_when_it_begins(levels: tuple[float, ...], waits: bool, is_overloaded: bool) -> None:
    first, *others = levels
    assert observed(Overload(OverloadSettings()), first, 0.0, *others, waits=waits) is is_overloaded


@pytest.mark.parametrize("back_s", [0.5, 1e6])
def test_a_clock_that_is_set_back_does_not_hold_it_for_ever(back_s: float) -> None:
    overload = Overload(OverloadSettings(dwell_s=1.0))
    assert observed(overload, 1.0, 2e6)
    assert observed(overload, 0.1, 2e6 - back_s), "its dwell begins again"
    assert not observed(overload, 0.1, 2e6 - back_s + 1.0)


@pytest.mark.parametrize("wrong", [{"enter": 1.1}, {"leave": 0.0}, {"enter": 0.5, "leave": 0.6}, {"dwell_s": -1.0}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        OverloadSettings(**wrong)


# --- what it does ---


def test_starts_beyond_a_limit_are_refused_only_while_the_kv_cache_is_overloaded_and_it_is_explained() -> None:
    pool = Pool()
    ids = pool.fill("a")
    assert len(ids) > 5, "far more starts than the limit, and none was refused"
    refused = pool.ask("a", id="refused")
    assert (refused.reason, refused.limit.name) == (RejectReason.OVER_USER_LIMIT, "user_starts")
    assert 1.0 <= refused.retry_after_s <= 65.0
    why = pool.engine.explain("refused", pool.now)
    assert (why.state, why.pressure.overloaded, why.stage, why.inside) == ("rejected", True, 1, False)
    assert "beyond a limit (user_starts 3, 0 left)" in why.reason
    assert why.limits[0].name == "user_starts"
    assert why.numbers["user_starts"] > why.numbers["user_starts_limit"] == 3
    assert why.kv["one"] > 0.8
    assert pool.ask("b", id="waits") is None, "who is under the limits is queued"
    why = pool.engine.explain("waits", pool.now)
    assert (why.state, why.blocked.nearest(), why.last) == ("queued", "kv", None)
    assert why.reason == "queued: the KV cache has no room for the next request in order"
    assert (why.numbers["place_in_tenant"], why.numbers["queue"]) == (1, 2)
    assert {"weight", "tenant_ahead", "flow_ahead"} <= set(why.numbers)
    pressure = pool.engine.pressure(pool.now)
    assert pressure.overloaded
    assert pressure.reason.startswith("KV cache, projected with the next request,")
    for request_id in ids:
        pool.engine.finished(request_id, SOME, pool.now)
    pool.now += 5.0
    pool.scrape(0.1)
    assert not isinstance(pool.ask("a"), Reject)


@pytest.mark.parametrize("kv", [True, False], ids=["its cache has room", "nothing is known of its cache"])
def test_full_slots_are_no_overload(kv: bool) -> None:
    pool = Pool(slots=4, kv=kv)
    pool.fill("a")
    assert pool.engine.blocked.nearest() == "slots"
    assert all(pool.ask("a") is None for _ in range(20))
    assert not pool.engine.pressure(pool.now).overloaded


@pytest.mark.parametrize("pools", [1, 2], ids=["of its pool", "of a pool with which that shares interactions"])
def test_calls_inside_an_interaction_are_queued_whatever_the_counts(pools: int) -> None:
    table = Interactions()
    one, *others = (Pool(interactions=table) for _ in range(pools))
    pool = others[0] if others else one
    one.served("i")
    pool.fill("a")
    assert isinstance(pool.ask("a"), Reject)
    assert all(pool.ask("a", "i") is None for _ in range(20))
    assert isinstance(pool.ask("a", "forged"), Reject)
    assert table.wasted_tokens == 0


def test_an_interaction_beyond_its_caps_may_be_refused_and_what_it_took_is_wasted() -> None:
    pool = Pool(interactions=Interactions(InteractionSettings(calls_max=1)))
    pool.served("i")
    pool.fill("a")
    assert isinstance(pool.ask("a", "i"), Reject)
    assert pool.engine.interactions.wasted_tokens == 100


def test_what_is_inside_waits_longer_before_it_expires() -> None:
    pool = Pool(limits=QueueLimits(queue_wait_s_max=10.0, queue_wait_s_max_inside=50.0))
    pool.served("i")
    pool.fill("b")
    assert pool.ask("a", "i", id="inside") is None
    assert "inside" not in dict(rejected(pool.engine.woke(11.0)))
    assert "inside" in dict(rejected(pool.engine.woke(51.0)))


# --- beside it ---


def test_what_was_learned_survives_a_restart_and_nothing_else_is_taken_for_it() -> None:
    pool = Pool()
    for number in range(50):
        pool.engine.finished(pool.ask("a", f"i{number}").id, SOME, pool.now, awaits_more=False)
        pool.now += 10.0
    learned = json.loads(json.dumps(snapshot(pool.engine)))
    fresh = Pool().engine
    adopt(read(fresh, learned))
    assert snapshot(fresh) == learned
    for wrong in ({}, [], {**learned, "version": 99}, {**learned, "policy": {"profiles": 3}}):
        with pytest.raises(ValueError, match=r"missing|expected|version"):
            read(Pool().engine, wrong)


def test_only_the_last_decisions_are_remembered() -> None:
    pool = Pool()
    for number in range(5000):
        pool.engine.arrived(make_request("a", id=str(number)), 0.0)
        pool.engine.cancelled(str(number), 0.0)
    assert pool.engine.explain("0", 0.0) is None
    assert pool.engine.explain("4999", 0.0) is not None
