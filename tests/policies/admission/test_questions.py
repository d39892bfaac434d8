"""Only events change what is decided: no question does, whenever it is asked, and no order of a list in the config."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission.decisions import Reject
from policies.admission.engine import AdmissionEngine
from policies.capacity.gauges import Gauges
from policies.capacity.obstacle import Obstacle
from policies.capacity.overload import OverloadSettings
from policies.limits.throttle import Ceilings, ThrottleSettings
from policies.orders.policy_entries import POLICIES
from policies.request import Refusal
from tests.policies.making import make_request, policy_with
from tests.policies.plays import BACKENDS, KV_TOKENS, STEPS, Play, Step, engine_of


@settings(max_examples=40)
@given(
    policy=st.sampled_from([*sorted(POLICIES), *["fairserve"] * len(POLICIES)]),  # it knows most questions
    steps=STEPS,
    backends=st.integers(1, 3),
    asks=st.lists(st.sampled_from([None, 0.0, 0.3, 70.0]), min_size=1, max_size=7),
)
def test_no_question_changes_a_decision(
    policy: str, steps: list[Step], backends: int, asks: list[float | None]
) -> None:
    names = BACKENDS[:backends]
    silent, asked = Play(engine_of(policy, names)), Play(engine_of(policy, names))
    for number, step in enumerate(steps):
        silent.step(*step)
        asked.step(*step)
        later_s = asks[number % len(asks)]
        if later_s is not None:
            asked.ask(later_s)
        assert asked.log == silent.log
        assert asked.engine.next_wakeup() == silent.engine.next_wakeup()


@settings(max_examples=40)
@given(policy=st.sampled_from(sorted(POLICIES)), steps=STEPS, order=st.permutations(BACKENDS))
def test_the_order_of_the_engines_in_the_config_changes_nothing(
    policy: str, steps: list[Step], order: list[str]
) -> None:
    one, other = Play(engine_of(policy)), Play(engine_of(policy, order))
    for step in steps:
        one.step(*step)
        other.step(*step)
        assert other.log == one.log
        assert other.engine.pressure(one.now) == one.engine.pressure(one.now)


def short_of_kv(backends: Sequence[str]) -> AdmissionEngine:
    """One engine is short of KV, and another one is down; something waits."""
    throttle = ThrottleSettings(user=Ceilings(starts=8), app_user=Ceilings(), app=Ceilings())
    engine = AdmissionEngine(policy_with("fairserve", throttle=throttle), overload=OverloadSettings(0.95, 0.85, 0.0))
    for name in backends:
        engine.add_backend(name, max_num_seqs=100, healthy=name != "down")
    engine.backend_changed("kv", Gauges(0.0, 0, 0, 0.0, KV_TOKENS, 16), 0.0)
    number = 0
    while not engine.queued:
        number += 1
        engine.arrived(make_request("a", id=f"a{number}", prompt=500, reserved=100), 0.1)
    return engine


def test_what_stands_in_the_way_is_known_of_each_engine_whichever_is_listed_last() -> None:
    for backends in (["kv", "down"], ["down", "kv"]):
        engine = short_of_kv(backends)
        assert engine.blocked is not None
        assert engine.blocked.obstacles == {"kv": Obstacle.KV, "down": Obstacle.CLOSED}
        assert engine.blocked.nearest() is Obstacle.KV
        assert engine.pressure(0.1).overloaded
        why = engine.explain(engine.blocked.request.id, 0.1)
        assert why is not None
        assert why.reason == "queued: the KV cache has no room for the next request in order"
        assert why.blocked is not None
        assert why.blocked.obstacles == {"kv": "kv", "down": "closed"}


def test_who_arrives_while_it_is_full_is_refused() -> None:
    throttle = ThrottleSettings(user=Ceilings(starts=3), app_user=Ceilings(), app=Ceilings())
    engine = AdmissionEngine(policy_with("fairserve", throttle=throttle), overload=OverloadSettings(0.95, 0.85, 0.0))
    engine.add_backend("one", max_num_seqs=1)
    for number in range(8):
        engine.arrived(make_request("a", id=f"a{number}", arrived_s=0.1), 0.1)
    engine.backend_changed("one", Gauges(1.0, 1, 0, 0.97, KV_TOKENS, 16), 1.0)
    (rejected,) = engine.arrived(make_request("a", id="late", arrived_s=1.05), 1.05)
    assert isinstance(rejected, Reject)
    assert rejected.reason is Refusal.OVER_USER_LIMIT
