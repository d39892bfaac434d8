"""When is a start to come back, and for how long is its place kept?"""

from __future__ import annotations

from math import sqrt
from random import Random

import pytest

from policies.queue.places import KEPT_LONGER
from policies.queue.start_waits import PLACES_MAX, StartWaits
from policies.request import WAIT_S_MAX, Request
from tests.policies.making import make_request

TURN_S = 10.0


def with_turns(*queued: str) -> StartWaits:
    """Starts of these users wait, and each turn so far took as long."""
    waits = StartWaits()
    gone = start("gone")
    for request in (*[start(user) for user in queued], gone):
        waits.queued(request, 0.0)
    waits.admitted(gone, TURN_S)
    return waits


def start(user: str, prompt: int = 100) -> Request:
    return make_request("a", user=user, prompt=prompt)


def turns_before(queued: list[str], user: str) -> int:
    """Turns until one more start of this user has gone, if users take turns and it joins the last of them."""
    left = {name: queued.count(name) for name in [*dict.fromkeys(queued), user]}
    left[user] = queued.count(user) + 1
    others = [name for name in left if name != user]
    turns = 0
    while left[user]:
        for name in (*others, user):
            if left[name]:
                left[name] -= 1
                turns += 1
    return turns


@pytest.mark.parametrize("seed", range(50))
def test_users_take_turns(seed: int) -> None:
    random = Random(seed)
    queued = [f"u{random.randrange(5)}" for _ in range(random.randrange(1, 30))]
    waits = with_turns(*queued)
    for user in ("u0", "u4", "new"):
        turns = turns_before(queued, user)
        assert waits.comes_back_in(start(user, prompt=1), turns * TURN_S * 2, TURN_S) == 0.0
        wait_s = waits.comes_back_in(start(user, prompt=2), 0.0, TURN_S)
        assert wait_s == pytest.approx(TURN_S * (turns + sqrt(turns)))
        queued.append(user)


def test_a_turn_that_is_not_over_takes_at_least_as_long_as_it_has_taken() -> None:
    waits = StartWaits()
    waits.queued(start("u"), 0.0)
    assert waits.comes_back_in(start("v"), 0.0, 30.0) == pytest.approx(30.0 * (2 + sqrt(2)))
    waits = with_turns("u")
    assert waits.comes_back_in(start("v"), 0.0, 2 * TURN_S) == pytest.approx(TURN_S * (2 + sqrt(2))), "as the mean"
    waits = with_turns("u")
    mean_s = TURN_S + (3 * TURN_S - TURN_S) / 2
    assert waits.comes_back_in(start("v"), 0.0, TURN_S + 3 * TURN_S) == pytest.approx(mean_s * (2 + sqrt(2)))


def test_a_place_that_nobody_comes_back_to_is_kept_for_a_quarter_longer() -> None:
    waits = with_turns("u")
    wait_s = waits.comes_back_in(start("v"), 0.0, TURN_S)
    ends_s = TURN_S + wait_s * 1.25
    waits.expire(ends_s - 0.01)
    assert waits.comes_back_in(start("w"), 1000.0, TURN_S) == 0.0
    assert waits.comes_back_in(start("w"), 0.0, TURN_S) == pytest.approx(TURN_S * (3 + sqrt(3)))
    waits = with_turns("u")
    waits.comes_back_in(start("v"), 0.0, TURN_S)
    waits.expire(ends_s)
    assert waits.comes_back_in(start("w"), 0.0, TURN_S) == pytest.approx(TURN_S * (2 + sqrt(2)))


def test_a_place_that_is_given_anew_is_kept_until_its_own_end() -> None:
    waits = with_turns("u")
    first_s = waits.comes_back_in(start("v"), 0.0, TURN_S)
    assert waits.comes_back_in(start("v"), 1000.0, TURN_S) == 0.0
    again_s = waits.comes_back_in(start("v"), 0.0, 2 * TURN_S)
    waits.expire(TURN_S + first_s * 1.25)
    assert waits.comes_back_in(start("v"), 0.0, 2 * TURN_S + 1.0) == pytest.approx(again_s - 1.0)


def test_the_mean_of_turns_is_that_of_about_the_last_fifty() -> None:
    waits, now = StartWaits(), 0.0
    waits.queued(start("u"), now)
    for seconds in [10.0] * 50 + [60.0]:
        waits.queued(start("u"), now)
        now += seconds
        waits.admitted(start("u"), now)
    assert waits.comes_back_in(start("u"), 0.0, now) == pytest.approx(11.0 * (2 + sqrt(2)))


def test_the_places_of_one_tenant_are_bounded_and_all_are_forgotten() -> None:
    waits = with_turns("u")
    wait_s = [waits.comes_back_in(start(f"v{number}"), 0.0, TURN_S) for number in range(PLACES_MAX + 2)]
    assert max(wait_s) == wait_s[-1] == WAIT_S_MAX
    assert PLACES_MAX == 1000
    waits.left(start("u"))
    assert waits.waiting("a") == 0
    waits.expire(TURN_S + wait_s[-1] * (1 + KEPT_LONGER))
    assert not waits.known("a")
    waits.queued(start("u"), 0.0)
    assert waits.comes_back_in(start("v"), 0.0, 10.0) == pytest.approx(10.0 * (2 + sqrt(2))), "nothing else is left"


def test_a_client_that_comes_and_goes_leaves_nothing_behind() -> None:
    waits = with_turns("u")
    for number in range(10_000):
        assert waits.comes_back_in(start("v", prompt=number), 0.0, TURN_S) > 0.0
        assert waits.comes_back_in(start("v", prompt=number), 1000.0, TURN_S) == 0.0
    assert len(waits) <= 66


def test_a_place_is_that_of_a_flow_and_a_prompt() -> None:
    waits = with_turns("u")
    assert waits.comes_back_in(start("v", prompt=500), 0.0, TURN_S) > 0.0
    for other, comes_back in ((start("v", 501), False), (start("w", 500), False), (start("v", 500), True)):
        assert waits.comes_back_in(other, 1000.0, TURN_S) == 0.0
        assert other.progress.came_back is comes_back
    once = start("v", prompt=500)
    waits.comes_back_in(once, 1000.0, TURN_S)
    assert not once.progress.came_back
