"""Gateways know what the others sent, whatever got lost, and nobody makes them keep more than their bounds."""

from __future__ import annotations

from collections import Counter
from math import inf, nan
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission.named import named_policy
from policies.orders.order import Selection
from policies.replicas.messages import PrefixReport
from policies.replicas.prefixes import VERSION, SharedPrefixes
from policies.request import ServiceTokens
from tests.policies.caching import BLOCK, document
from tests.policies.making import Engines, make_request

ENGINES = ("x", "y", "z")
QUESTION_TOKENS, OUTPUT_TOKENS = 10, 5

chains = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(
    lambda path: tuple(hash(tuple(path[: depth + 1])) for depth in range(len(path)))
)


class Gateways:
    """So many policies, and what they tell each other."""

    def __init__(self, count: int, policy: str = "vtc", **settings: float) -> None:
        self.policies = [named_policy(policy, **settings) for _ in range(count)]
        self.shared = [SharedPrefixes(one, ENGINES, name=str(number)) for number, one in enumerate(self.policies)]

    def send(self, gateway: int, prefix: tuple[int, ...], tenant: str = "a", engine: str | None = None) -> str:
        """One request there; to which engine it went."""
        policy = self.policies[gateway]
        request = make_request(tenant, prompt=BLOCK * len(prefix), prefix=prefix)
        policy.push(request, 0.0)
        selection = policy.pop(0.0, Engines(dict.fromkeys((engine,) if engine is not None else ENGINES, 0)))
        assert isinstance(selection, Selection)
        policy.charge(request, ServiceTokens(request.prompt_tokens, 0), 0.0, final=False)
        policy.charge(request, ServiceTokens(request.prompt_tokens, OUTPUT_TOKENS), 0.0, final=True)
        return selection.backend

    def exchange(self) -> None:
        """All hear what each has to tell, also who told it."""
        for news in [one.report() for one in self.shared]:
            for one in self.shared:
                assert one.receive(news)


@settings(max_examples=200)
@given(
    sent=st.lists(st.tuples(chains, st.sampled_from("xy"), st.booleans()), max_size=30),
    asked=chains,
)
def test_what_was_heard_is_matched_and_what_was_lost_is_not(
    sent: list[tuple[tuple[int, ...], str, bool]], asked: tuple[int, ...]
) -> None:
    gateways = Gateways(2)
    for chain, engine, is_lost in sent:
        gateways.send(0, chain, engine=engine)
        news = gateways.shared[0].report()
        assert is_lost or gateways.shared[1].receive(news)
    for engine in "xy":
        known = {block for chain, where, is_lost in sent if where == engine and not is_lost for block in chain}
        longest = next((depth for depth, block in enumerate(asked) if block not in known), len(asked))
        assert gateways.policies[1].prefixes.depth(asked, engine) == longest


def test_prompts_that_begin_alike_go_where_another_gateway_sent_one() -> None:
    gateways = Gateways(3)
    turns = [document(7, 8)]
    went = [gateways.send(0, turns[0])]
    for gateway in (1, 2, 0, 2, 1):
        gateways.exchange()
        turns.append((*turns[-1], hash(("turn", len(turns)))))
        went.append(gateways.send(gateway, turns[-1]))
        assert gateways.policies[gateway].prefixes.depth(turns[-2], went[-1]) == len(turns[-2])
    assert len(set(went)) == 1


@pytest.mark.parametrize("count", [2, 8])
def test_a_tenant_leaves_an_engine_after_one_quantum_whatever_gateways_it_comes_to(count: int) -> None:
    per_request = BLOCK * 9 + 2 * OUTPUT_TOKENS
    quantum = 20.0 * per_request

    def placed(gateways: Gateways, *, hears: bool = True) -> dict[str, float]:
        rng, went = Random(1), Counter[str]()
        for number in range(360):
            tenant = "ab"[number % 2]
            prefix = (*document(ord(tenant), 8), hash(("question", number)))
            went[f"{tenant} at {gateways.send(rng.randrange(len(gateways.policies)), prefix, tenant)}"] += 1
            if hears and number % 4 == 0:
                gateways.exchange()
        return {where: count / 360 for where, count in went.items()}

    one = placed(Gateways(1, "d2lpm", backend_quantum=quantum))
    assert set(one) == {f"{tenant} at {engine}" for tenant in "ab" for engine in ENGINES}
    several = placed(Gateways(count, "d2lpm", backend_quantum=quantum))
    assert several == pytest.approx(one, abs=0.03)
    alone = placed(Gateways(8, "d2lpm", backend_quantum=quantum), hears=False)
    assert alone != pytest.approx(one, abs=0.03), "each lets the tenant stay for a quantum of its own"


def test_what_is_told_is_bounded_and_the_latest_goes_first() -> None:
    gateways = Gateways(2, "d2lpm")
    for number in range(3 * 4096 // 100):
        gateways.send(0, document(number, 100), tenant=f"tenant-{number}")
    for number in range(2 * 256):
        gateways.send(0, (number,), tenant=f"tenant-{number}")
    news = gateways.shared[0].report()
    told = [prefix for prefixes in news.sent.values() for prefix in prefixes]
    assert 4096 - 100 < sum(map(len, told)) <= 4096
    assert (2 * 256 - 1,) in told
    charged = [tenant for tenants in news.charged.values() for tenant in tenants]
    assert len(charged) == 256
    assert f"tenant-{2 * 256 - 1}" in charged
    assert gateways.shared[1].receive(news)
    assert not gateways.shared[0].has_report


@pytest.mark.parametrize(
    "news",
    [
        PrefixReport(VERSION + 1, "other", {"x": [(1,)]}, {}),
        PrefixReport(VERSION, "other", {"x": [tuple(range(4096 + 1))]}, {}),
        PrefixReport(VERSION, "other", {"x": [(1,)]}, {"x": {f"tenant-{n}": 1.0 for n in range(256 + 1)}}),
        *(PrefixReport(VERSION, "other", {"x": [(1,)]}, {"x": {"a": service}}) for service in (nan, inf, -1e300)),
    ],
    ids=["version", "blocks", "charges", "nan", "inf", "huge"],
)
def test_what_makes_no_sense_changes_nothing(news: PrefixReport) -> None:
    gateways = Gateways(1, "d2lpm")
    assert not gateways.shared[0].receive(news)
    assert len(gateways.policies[0].prefixes) == 0
    assert gateways.policies[0].placement.explain("a") == {}


def test_what_is_said_of_engines_of_others_is_not_kept() -> None:
    gateways = Gateways(1, "d2lpm")
    for number in range(100):
        engine = f"engine-{number}"
        assert gateways.shared[0].receive(PrefixReport(VERSION, "other", {engine: [(1,)]}, {engine: {"a": 1.0}}))
    assert len(gateways.policies[0].prefixes) == 0
    assert gateways.policies[0].placement.explain("a") == {}
