"""Which addresses count as engines is decided by what lookups answered, and when."""

from __future__ import annotations

import random

import pytest

from gateway.config.sections.limits import Limits
from gateway.pool.engine_addresses import FollowedName, resolve

TTL_S = 10.0
A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"


class Resolver:
    """One name, and a time that goes on by five seconds with each lookup."""

    def __init__(self, addresses_max: int = 64) -> None:
        self.known = FollowedName("vllm")
        self.limits = Limits(upstream_addresses_s=TTL_S, upstream_addresses_max=addresses_max)
        self.now_s = 0.0

    def __call__(self, *addresses: str) -> list[str]:
        before = list(self.known)
        is_changed = self.known.resolved(addresses, self.now_s, self.limits)
        assert is_changed == (list(self.known) != before)
        self.now_s += 5.0
        return list(self.known)


def test_what_appears_counts_at_once_and_what_is_gone_for_a_time_to_live() -> None:
    resolver = Resolver()
    assert resolver(B, A, A) == [A, B]
    assert resolver(A, B, C) == [A, B, C]
    assert resolver(A, C) == [A, B, C]
    assert resolver(A, C) == [A, B, C]
    assert resolver(A, C) == [A, C], "missed for ten seconds"


def test_an_address_that_comes_and_goes_stays() -> None:
    resolver = Resolver()
    resolver(A, B)
    for _ in range(20):
        assert resolver(A) == resolver(A) == resolver(A, B) == [A, B]


def test_answers_that_name_some_of_them_each_time_add_up() -> None:
    resolver, chance = Resolver(), random.Random(7)
    for _ in range(10):
        resolver(A, B, C)
    for _ in range(100):
        assert resolver(*chance.sample([A, B, C], 3)[: chance.choice((2, 3))])[:1] != []
    resolver = Resolver()
    for _ in range(50):
        assert set(resolver(A) + resolver(B)) == {A, B} or len(resolver.known) == 1
    assert sorted(resolver.known) == [A, B]


def test_of_too_many_the_known_stay() -> None:
    resolver = Resolver(addresses_max=3)
    many = [f"10.1.{n // 250}.{n % 250}" for n in range(500)]
    assert resolver(A, B) == [A, B]
    first = resolver(A, B, *many)
    assert first[:2] == [A, B]
    assert len(first) == 3
    assert resolver.known.left_out == 499
    random.Random(1).shuffle(many)
    assert resolver(*many, B, A) == first
    resolver.limits = Limits(upstream_addresses_s=TTL_S, upstream_addresses_max=1)
    assert resolver(*many, B, A) == [A], "the bound was lowered"


def test_an_engine_with_addresses_of_both_families_is_one() -> None:
    resolver = Resolver()
    assert resolver("fd00::1", A) == [A]
    assert resolver("fd00::1") == resolver("fd00::1") == [A], "while a known one is left, the other family is no news"
    assert resolver("fd00::1") == []
    assert resolver("fd00::1", "fd00::2") == ["fd00::1", "fd00::2"]
    assert resolver(A, "fd00::1", "fd00::2") == ["fd00::1", "fd00::2"]


async def test_the_system_is_asked() -> None:
    assert "127.0.0.1" in await resolve("localhost")
    with pytest.raises(OSError, match=r"not known|No address|failure"):
        await resolve("no-such-name.invalid")
