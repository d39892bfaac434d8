"""P9 where engines cache: tenants stay within the bound of the window, or of the quantum, and caches are used."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from policies.admission.named import named_policy
from policies.admission.policy import Policy
from tests.policies.caching import KEEPS_ALL, CachingServers, Questions, local

WINDOW = 100.0
SEEDS = [range(8), pytest.param(range(8, 125), marks=pytest.mark.slow)]


def furthest_behind(servers: CachingServers, steps: int) -> float:
    """The most service per weight by which `a` falls behind `c` over any interval."""
    received, weights = servers.received, servers.questions.weights
    least = worst = 0.0
    for now in range(steps):
        servers.step(now)
        ahead = received["c"] / weights["c"] - received["a"] / weights["a"]
        least = min(least, ahead)
        worst = max(worst, ahead - least)
    return worst


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.parametrize("name", ["vtc", "wsc", "fairserve", "dlpm"])
def test_p9_the_bound_holds_on_random_traces(name: str, seeds: range) -> None:
    """Theorems 4.1 and 4.2 of DLPM: for tenants that always wait, and beside one that comes and goes."""
    for seed in seeds:
        traffic = Questions.of(seed)
        if name == "dlpm":
            traffic = replace(traffic, engines=1)
        if seed % 2:
            assert CachingServers(local(name, WINDOW), traffic).spread(60, "a", "c") <= traffic.bound(WINDOW), traffic
        else:
            servers = CachingServers(local(name, WINDOW), replace(traffic, sometimes_idle="c"))
            assert furthest_behind(servers, 60) <= 2 * traffic.bound(WINDOW), traffic


@pytest.mark.parametrize(
    ("window", "is_caught"), [(WINDOW, False), (50 * WINDOW, True), (inf, True)], ids=["window", "wider", "none"]
)
@pytest.mark.parametrize(("name", "cache_blocks"), [("vtc", 60), ("dlpm", KEEPS_ALL)])
def test_the_bound_is_one_that_a_wider_window_breaks(
    name: str, cache_blocks: int, window: float, is_caught: bool
) -> None:
    hard = [Questions(dict.fromkeys("abc", 1.0), 1, 20, 3, 2, 1, cache_blocks, seed) for seed in range(5)]
    spreads = [CachingServers(local(name, window), traffic).spread(900, "a", "c") for traffic in hard]
    assert (max(spreads) > hard[0].bound(WINDOW)) is is_caught


@pytest.mark.parametrize(
    ("with_it", "without", "gain"),
    [
        (local("vtc", 1000.0), local("vtc", 0.0), 0.08),
        (local("dlpm", 2000.0), named_policy("vtc", placement="least_loaded"), 0.2),
    ],
    ids=["window", "dlpm"],
)
def test_locality_is_kept_where_a_fair_order_without_it_thrashes(with_it: Policy, without: Policy, gain: float) -> None:
    traffic = Questions(dict.fromkeys("abcdef", 1.0), 1, 20, 3, 2, 1, 60, seed=3)
    one, other = (CachingServers(policy, traffic).run(600) for policy in (with_it, without))
    assert one.cached / one.prompts > other.cached / other.prompts + gain
