"""The waiting room keeps its bounds, and a flood meets them alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.queue.bounds import BoundedQueue, QueueLimits
from policies.request import Refusal, Request
from tests.policies.making import make_request

LIMITS = QueueLimits(queue_requests_max=6, queue_bytes_max=100)


def enter(room: BoundedQueue, request: Request) -> list[Request] | None:
    victims = room.giving_way(request, 0.0)
    for victim in victims or ():
        room.remove(victim)
    if victims is not None:
        room.add(request)
    return victims


@settings(max_examples=200)
@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from([0, 1, 20, 60, 100, 130]), st.sampled_from([0.5, 1.0, 3.0])),
        max_size=40,
    )
)
def test_bounds_hold_whoever_comes(arrivals: list[tuple[str, int, float]]) -> None:
    room = BoundedQueue(LIMITS)
    inside: list[Request] = []
    for tenant, body_bytes, weight in arrivals:
        request = make_request(tenant, body_bytes=body_bytes, weight=weight)
        victims = enter(room, request)
        if victims is not None:
            assert all(victim.flow.tenant != tenant for victim in victims), "nobody gives way to himself"
            inside = [one for one in inside if one not in victims] + [request]
        assert len(room) == len(inside) <= LIMITS.queue_requests_max
        assert room.bytes == sum(one.body_bytes for one in inside) <= LIMITS.queue_bytes_max


def test_a_tenant_of_more_weight_has_a_larger_part_of_a_full_queue() -> None:
    room = BoundedQueue(LIMITS)
    light = [make_request("light") for _ in range(2)]
    for request in (*light, *[make_request("heavy", weight=4.0) for _ in range(4)]):
        enter(room, request)
    assert enter(room, make_request("heavy", weight=4.0)) == [light[1]]


def test_what_waits_has_the_weight_that_its_tenant_has_now() -> None:
    room, request = BoundedQueue(LIMITS), make_request("a")
    enter(room, request)
    room.reweigh({"a": 3.0})
    assert request.weight == 3.0


def test_a_full_queue_of_small_requests_does_not_take_in_a_huge_one() -> None:
    room = BoundedQueue(LIMITS)
    for _ in range(LIMITS.queue_requests_max):
        enter(room, make_request("flood", body_bytes=15))
    enter(room, make_request("light", body_bytes=90))
    assert room.bytes <= LIMITS.queue_bytes_max


def test_whoever_has_most_in_the_queue_gives_up_its_newest() -> None:
    room = BoundedQueue(LIMITS)
    flood = [make_request("flood") for _ in range(LIMITS.queue_requests_max)]
    for request in flood:
        assert enter(room, request) == []
    assert enter(room, make_request("flood")) is None
    assert enter(room, make_request("light")) == [flood[-1]]
    assert enter(room, make_request("light")) == [flood[-2]]
    assert enter(room, make_request("light")) == [flood[-3]]
    assert enter(room, make_request("light")) is None, "both have half"


def test_weights_count_in_a_full_queue() -> None:
    room = BoundedQueue(LIMITS)
    for _ in range(LIMITS.queue_requests_max):
        enter(room, make_request("heavy", weight=5.0))
    assert enter(room, make_request("light", weight=1.0)) is not None
    assert enter(room, make_request("light", weight=1.0)) is None


def test_bytes_are_shared_like_places() -> None:
    room = BoundedQueue(LIMITS)
    flood = [make_request("flood", body_bytes=30) for _ in range(3)]
    for request in flood:
        enter(room, request)
    assert enter(room, make_request("light", body_bytes=40)) == [flood[2]]
    assert enter(room, make_request("light", body_bytes=101)) is None


def test_a_large_request_takes_no_more_from_the_largest_tenant_than_leaves_both_equal() -> None:
    room = BoundedQueue(LIMITS)
    for _ in range(2):
        enter(room, make_request("flood", body_bytes=50))
    assert room.giving_way(make_request("light", body_bytes=60), 0.0) is None, "60 bytes, and 40 would be left"
    assert room.giving_way(make_request("light", body_bytes=50), 0.0) is not None


def call_inside(tenant: str) -> Request:
    request = make_request(tenant)
    request.progress.inside = True
    return request


def test_a_start_takes_the_place_of_a_call_inside_only_where_one_tenant_fills_more_than_half() -> None:
    for agents, is_let_in in ((("a", "b"), False), (("a", "a"), True)):
        room = BoundedQueue(LIMITS)
        for tenant in 3 * agents:
            enter(room, call_inside(tenant))
        assert (room.giving_way(make_request("light"), 0.0) is not None) is is_let_in


def test_a_call_inside_takes_the_place_of_any_start_until_its_tenant_fills_half() -> None:
    room = BoundedQueue(LIMITS)
    starts = [make_request(tenant) for tenant in ("b", "c", "b", "c")]
    for request in (call_inside("a"), call_inside("a"), *starts):
        enter(room, request)
    assert enter(room, make_request("a")) is None
    assert enter(room, call_inside("a")) == [starts[3]]
    assert enter(room, call_inside("a")) is None


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


def test_a_request_that_is_not_waiting_cannot_be_removed() -> None:
    with pytest.raises(KeyError):
        BoundedQueue(LIMITS).remove(make_request())


def test_who_was_refused_finds_room_when_it_comes_back_and_nobody_takes_it() -> None:
    room = BoundedQueue(QueueLimits(queue_requests_max=20))
    early, late = make_request("a", prompt=11), make_request("a", prompt=12)
    for _ in range(20):
        enter(room, make_request("a"))
    assert enter(room, early) is None
    wait_s = room.comes_back_in(early, Refusal.QUEUE_FULL, 10.0, 0.0)
    assert wait_s == 10.0
    assert room.comes_back_in(late, Refusal.QUEUE_FULL, 10.0, 0.0) == pytest.approx(10.0 * 22 / 21), (
        "one more goes before it"
    )
    assert room.comes_back_in(early, Refusal.QUEUE_FULL, 99.0, 4.0) == 6.0, (
        "it came too early, and is still to come then"
    )
    for request in list(room.requests.values())[:2]:
        room.remove(request)
    assert room.giving_way(make_request("a"), 9.0) is None, "18 of 20 wait, and a tenth is kept free"
    assert room.giving_way(early, 9.0) is None
    assert room.giving_way(early, 10.0) == []
    room.places.expire(14.0)
    assert room.giving_way(make_request("a"), 14.0) == []


def test_of_a_tenant_that_gives_way_who_came_back_in_time_gives_way_last() -> None:
    room = BoundedQueue(QueueLimits(queue_requests_max=3))
    requests = [make_request("a") for _ in range(3)]
    for request in requests:
        enter(room, request)
    requests[2].progress.came_back = Refusal.QUEUE_FULL
    assert room.giving_way(make_request("b"), 0.0) == [requests[1]]


@pytest.mark.parametrize("is_read_between", [False, True])
def test_what_has_left_is_in_no_list_whether_or_not_the_lists_were_read_meanwhile(is_read_between: bool) -> None:
    room = BoundedQueue(LIMITS)
    gone, stays, back = (make_request("a", body_bytes=number) for number in (1, 2, 3))
    for request in (gone, stays):
        enter(room, request)
    if is_read_between:
        assert room.of_tenant("a") == [gone, stays]
    room.remove(gone)
    room.add(back, front=True)
    assert room.of_tenant("a") == [back, stays]
    assert (room.bytes, room.by_tenant()["a"].requests) == (5, 2)
    room.remove(stays)
    room.remove(back)
    assert (room.of_tenant("a"), room.by_tenant(), room.earliest_deadline_s()) == ([], {}, float("inf"))
