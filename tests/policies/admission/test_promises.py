"""What every policy promises, whatever happens: one or two pools that share tenants, engines that refuse, fail and lose
their KV, requests of several sequences, clocks that jump. The books are always right.
"""

from __future__ import annotations

import pytest

from policies.orders.policy_entries import POLICIES
from tests.policies.admission.world import MANY, QUOTA, World


def play(world: World, events: int) -> None:
    for number in range(events):
        world.event()
        world.check()
        if number % 4 == 0:
            world.check_books()
        if number % 8 == 0:
            world.nothing_was_missed()
    world.drain()


every_policy = pytest.mark.parametrize("policy", sorted(POLICIES))


@every_policy
@pytest.mark.parametrize("pools", [1, 2])
def test_whatever_can_start_has_started_and_everything_ends_once(policy: str, pools: int) -> None:
    for seed in range(2):
        world = World(policy, seed, pools=pools)
        play(world, 350)
        assert max(world.taken.values()) <= QUOTA.tokens_per_minute


@every_policy
def test_it_is_so_though_the_clock_jumps(policy: str) -> None:
    for seed in range(2):
        play(World(policy, seed, jumps=True), 350)


@pytest.mark.slow
def test_it_is_so_with_a_thousand_tenants_and_300_engines() -> None:
    world = World("fairserve", 1, slots=(1, 2, None) * 100, tenants=1000, limits=MANY)
    for _ in range(1200):
        world.now += 0.0001
        world.arrives()
    assert world.waiting
    play(world, 40)


# --- only events change what is decided ---


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_question_changes_a_decision(policy: str) -> None:
    for seed, later_s in enumerate((0.0, 0.3, 70.0)):
        silent, asked = World(policy, seed), World(policy, seed)
        for _ in range(100):
            silent.event()
            asked.event()
            asked.ask(later_s)
            assert asked.log == silent.log
            assert asked.pools[0].next_wakeup() == silent.pools[0].next_wakeup()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_order_of_the_engines_in_the_config_changes_nothing(policy: str) -> None:
    for seed, order in enumerate(((2, 0, 1), (1, 2, 0), (2, 1, 0))):
        one, other = World(policy, seed), World(policy, seed, order=order)
        for _ in range(150):
            one.event()
            other.event()
            assert other.log == one.log
            assert other.pools[0].pressure(one.now) == one.pools[0].pressure(one.now)
