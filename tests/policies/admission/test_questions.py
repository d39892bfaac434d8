"""Only events change what is decided: no question does, whenever it is asked, and no order of a list in the config."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission.decisions import Decision
from policies.admission.engine import AdmissionEngine
from policies.capacity.gauges import Gauges
from policies.capacity.overload import OverloadSettings
from policies.limits.throttle import Ceilings, ThrottleSettings
from policies.orders.policy_entries import POLICIES
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


def test_a_scrape_of_the_metrics_refuses_nobody() -> None:
    """Between two events the cache was full for a moment: only who arrives then is refused."""

    def decided(*, asked: bool) -> Sequence[Decision]:
        throttle = ThrottleSettings(user=Ceilings(starts=3), app_user=Ceilings(), app=Ceilings())
        engine = AdmissionEngine(
            policy_with("fairserve", throttle=throttle), overload=OverloadSettings(0.95, 0.85, 0.0)
        )
        engine.add_backend("one", max_num_seqs=1)
        for number in range(8):
            engine.arrived(make_request("a", id=f"a{number}", arrived_s=0.1), 0.1)
        engine.backend_changed("one", Gauges(1.0, 1, 0, 0.97, KV_TOKENS, 16), 1.0)
        if asked:
            assert engine.pressure(1.05).overloaded, "it is so at that moment"
        engine.backend_changed("one", Gauges(1.1, 1, 0, 0.9, KV_TOKENS, 16), 1.1)
        return engine.arrived(make_request("a", id="late", arrived_s=1.15), 1.15)

    assert decided(asked=True) == decided(asked=False) == []
