"""The waiting room keeps its bounds, and a flood meets them alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.queue.bounds import PLACES_MAX, BoundedQueue, QueueLimits
from policies.request import RejectReason, Request
from tests.policies.making import make_request

LIMITS = QueueLimits(queue_requests_max=6, queue_bytes_max=100)


def enter(room: BoundedQueue, request: Request) -> list[Request] | None:
    victims = room.evictions_for(request, 0.0)
    for victim in victims or ():
        room.remove(victim)
    if victims is not None:
        room.add(request)
    return victims


@settings(max_examples=200)
@given(
    arrivals=st.lists(
        st.tuples(
            st.sampled_from("abc"), st.sampled_from([0, 1, 20, 60, 100, 130]), st.sampled_from([0.5, 1.0, 3.0]),
            st.integers(0, 9),
        ),
        max_size=40,
    )
)  # fmt: skip
def test_bounds_hold_whoever_comes(arrivals: list[tuple[str, int, float, int]]) -> None:
    """The last number says which request leaves then, or leaves and comes back, and whether the lists are read."""
    room = BoundedQueue(LIMITS)
    inside: list[Request] = []
    for tenant, body_bytes, weight, number in arrivals:
        request = make_request(tenant, body_bytes=body_bytes, weight=weight)
        victims = enter(room, request)
        if victims is not None:
            assert all(victim.flow.tenant != tenant for victim in victims), "nobody gives way to himself"
            inside = [one for one in inside if one not in victims] + [request]
        if number < len(inside):
            gone = inside.pop(number)
            room.remove(gone)
            if number % 2:
                room.add(gone, front=True)
                inside.insert(0, gone)
        if number > 3:
            for each in "abc":
                assert room.of_tenant(each) == [one for one in inside if one.flow.tenant == each]
            assert set(room.by_tenant()) == {one.flow.tenant for one in inside}
        assert len(room.requests) == len(inside) <= LIMITS.queue_requests_max
        assert room.bytes == sum(one.body_bytes for one in inside) <= LIMITS.queue_bytes_max


def test_what_waits_has_the_weight_that_its_tenant_has_now() -> None:
    room, request = BoundedQueue(LIMITS), make_request("a")
    enter(room, request)
    room.reweigh(lambda _: 3.0)
    assert request.weight == room.by_tenant()["a"].weight == 3.0


def call(tenant: str, body_bytes: int = 0, *, weight: float = 1.0, inside: bool = False) -> Request:
    request = make_request(tenant, body_bytes=body_bytes, weight=weight)
    request.progress.inside = inside
    return request


def came_back(tenant: str) -> Request:
    """It was refused, and came back when it was told to."""
    request = make_request(tenant)
    request.progress.came_back = RejectReason.QUEUE_FULL
    return request


HEAVY = {"weight": 5.0}
INSIDE = {"inside": True}


@pytest.mark.parametrize(
    ("waiting", "comes"),
    [
        pytest.param(
            [call("flood") for _ in range(6)],
            [(call("flood"), None), *[(call("light"), place) for place in (5, 4, 3, None)]],
            id="whoever has most gives up its newest, until both have half",
        ),
        pytest.param(
            [call("heavy", **HEAVY) for _ in range(6)],
            [(call("light"), 5), (call("light"), None)],
            id="who weighs more gives up less",
        ),
        pytest.param(
            [call("light"), call("light"), *[call("heavy", **HEAVY) for _ in range(4)]],
            [(call("heavy", **HEAVY), 1)],
            id="who weighs more has a larger part",
        ),
        pytest.param(
            [call("flood", 30) for _ in range(3)],
            [(call("light", 40), 2), (call("light", 101), None)],
            id="bytes are shared like places",
        ),
        pytest.param(
            [call("flood", 50) for _ in range(2)],
            [(call("light", 60), None), (call("light", 50), 1)],
            id="a large request takes no more than leaves both equal",
        ),
        pytest.param(
            [call(tenant, **INSIDE) for tenant in "ababab"],
            [(call("light"), None)],
            id="a start takes no place of calls inside of two tenants",
        ),
        pytest.param(
            [call("a", **INSIDE) for _ in range(6)],
            [(call("light"), 5)],
            id="a start takes the place of a call inside of a tenant that fills more than half",
        ),
        pytest.param(
            [call("a", **INSIDE), call("a", **INSIDE), *map(call, "bcbc")],
            [(call("a"), None), (call("a", **INSIDE), 5), (call("a", **INSIDE), None)],
            id="a call inside takes the place of any start until its tenant fills half",
        ),
        pytest.param(
            [*[call("a") for _ in range(5)], came_back("a")],
            [(call("b"), 4)],
            id="who came back in time gives way last",
        ),
    ],
)  # fmt: skip
def test_who_gives_way_in_a_full_queue(waiting: list[Request], comes: list[tuple[Request, int | None]]) -> None:
    """`comes`: who comes then, each with the place of the one that gives way; None: it is not let in."""
    room = BoundedQueue(LIMITS)
    for request in waiting:
        assert enter(room, request) == []
    for request, place in comes:
        assert enter(room, request) == (None if place is None else [waiting[place]])


@settings(max_examples=100)
@given(deadlines=st.lists(st.integers(0, 20), min_size=1, max_size=20), removed=st.sets(st.integers(0, 19)))
def test_requests_expire_in_order_of_their_deadlines(deadlines: list[int], removed: set[int]) -> None:
    room = BoundedQueue(QueueLimits())
    requests = []
    for deadline_s in deadlines:
        request = make_request()
        request.progress.deadline_s = float(deadline_s)
        requests.append(request)
        room.add(request)
    for number in removed:
        if number < len(requests):
            room.remove(requests[number])
    left = [request for number, request in enumerate(requests) if number not in removed]
    assert room.earliest_deadline_s() == min((request.progress.deadline_s for request in left), default=float("inf"))
    expired = []
    while (late := room.expired(10.0)) is not None:
        room.remove(late)
        expired.append(late.progress.deadline_s)
    assert expired == sorted(request.progress.deadline_s for request in left if request.progress.deadline_s <= 10.0)


def test_who_was_refused_finds_room_when_it_comes_back_and_nobody_takes_it() -> None:
    room = BoundedQueue(QueueLimits(queue_requests_max=20))
    early, late = make_request("a", prompt=11), make_request("a", prompt=12)
    for _ in range(20):
        enter(room, make_request("a"))
    assert enter(room, early) is None
    wait_s = room.comes_back_in(early, RejectReason.QUEUE_FULL, 10.0, 0.0)
    assert wait_s == 10.0
    after_one_more_s = 10.0 * 22 / 21
    assert room.comes_back_in(late, RejectReason.QUEUE_FULL, 10.0, 0.0) == pytest.approx(after_one_more_s)
    assert room.comes_back_in(early, RejectReason.QUEUE_FULL, 99.0, 4.0) == 6.0, "it came too early, and may come then"
    for request in list(room.requests.values())[:2]:
        room.remove(request)
    assert room.evictions_for(make_request("a"), 9.0) is None, "18 of 20 wait, and a tenth is kept free"
    assert room.evictions_for(early, 9.0) is None
    assert room.evictions_for(early, 10.0) == []
    room.places.expire(14.0)
    assert room.evictions_for(make_request("a"), 14.0) == []


def test_the_places_that_are_kept_are_bounded() -> None:
    room = BoundedQueue(LIMITS)
    for number in range(PLACES_MAX + 1):
        assert room.comes_back_in(make_request("a", prompt=number), RejectReason.QUEUE_FULL, 10.0, 0.0) >= 10.0
    assert len(room.places.due) == PLACES_MAX


def test_a_place_is_kept_for_a_quarter_longer_than_its_wait() -> None:
    room, kept = BoundedQueue(LIMITS), []
    room.comes_back_in(make_request("a"), RejectReason.QUEUE_FULL, 8.0, 0.0)
    for now in (8.0, 9.9, 10.0):
        room.places.expire(now)
        kept.append(room.places.counts["a"])
    assert kept == [1, 1, 0]
