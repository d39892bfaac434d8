"""Interactions: who joins which, when they end, what they may do, and that the table stays bounded."""

from __future__ import annotations

import gc
import pickle
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.app_paces import PACE_S_MAX, Median
from policies.interactions import Interactions, InteractionSettings
from policies.request import Claim, CorrelationKeys, Interaction, Key, Request, ServiceTokens
from tests.policies.making import make_request

SOME = ServiceTokens(10, 5)


def call(claim: Claim | str = "i", tenant: str = "a", *, app: str = "", user: str = "", prompt: int = 10) -> Request:
    claimed = Claim(claim) if isinstance(claim, str) else claim
    return make_request(tenant, app=app, user=user, prompt=prompt, claim=claimed)


def admit(table: Interactions, request: Request, now: float = 0.0) -> Request:
    table.arrived(request, now)
    table.admitted(request, now)
    return request


def serve(
    table: Interactions, request: Request, now: float = 0.0, *, awaits_more: bool | None = None,
    service: ServiceTokens = SOME,
) -> Request:  # fmt: skip
    admit(table, request, now)
    table.served(request, service, now, awaits_more)
    return request


PROMPTS = [Claim(extends=extends) for extends in ((1, 2, 3), (1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 6), (1, 2, 3, 9))]
SAME = Claim("i")
LATER = InteractionSettings(idle_s=10.0)


@pytest.mark.parametrize(
    ("settings", "calls", "last", "stages", "inside", "is_open"),
    [
        pytest.param(None, [(SAME, 0.0)] * 3, {}, [1, 2, 3], [0, 1, 1], 1, id="calls with one id are stages of one"),
        *[
            pytest.param(
                None, [(SAME, 0.0), (Claim("i", 7, begins=False), 0.0)], flow, [1, 1], [0, 0], 2,
                id=f"nobody joins that of another flow: {flow}",
            )
            for flow in ({"tenant": "b"}, {"app": "x"}, {"user": "u"})
        ],
        pytest.param(LATER, [(SAME, now) for now in (0.0, 10.0, 20.1)], {}, [1, 2, 1], [0, 1, 0], 1, id="silence"),
        pytest.param(
            None, [(claim, 0.0) for claim in PROMPTS], {}, [1, 2, 3, 1], [0, 1, 1, 0], 2,
            id="a prompt goes on with the one that it extends, if that is an end",
        ),
        pytest.param(None, [(claim, 0.0) for claim in PROMPTS[:2]], {"user": "u"}, [1, 1], [0, 0], 2, id="of its flow"),
        *[
            pytest.param(
                InteractionSettings(**cap), [(SAME, now) for now in (0.0, 1.0, 2.0, 3.0, 4.0)], {}, [1, 2, 3, 4, 5],
                [0, 1, 1, 0, 0], 1, id=f"beyond {cap} it loses its immunity, not its life",
            )
            for cap in ({"calls_max": 3}, {"tokens_max": 45}, {"lifetime_s_max": 3.0})
        ],
    ],
)  # fmt: skip
def test_who_goes_on_with_which(
    settings: InteractionSettings | None, calls: list[tuple[Claim, float]], last: dict[str, str], stages: list[int],
    inside: list[int], is_open: int,
) -> None:  # fmt: skip
    """`last`: the flow of the last of these calls."""
    table = Interactions(settings)
    found = [serve(table, call(claim), now) for claim, now in calls[:-1]]
    found.append(serve(table, call(calls[-1][0], **last), calls[-1][1]))
    assert [one.progress.stage for one in found] == stages
    assert [one.progress.inside for one in found] == inside
    assert len(table) == is_open


def test_a_first_call_that_left_the_queue_unserved_opened_nothing() -> None:
    table = Interactions()
    table.broke_off(admit(table, call()), ServiceTokens(0, 0), 0.0)
    assert len(table) == 0


def test_the_same_question_once_more_is_another_interaction() -> None:
    table = Interactions()
    first = serve(table, call(Claim("i", begins=True)), awaits_more=True)
    again = serve(table, call(Claim("i", begins=True)), awaits_more=True)
    assert (again.progress.stage, again.progress.inside) == (1, False)
    assert len(table) == 2
    # Nothing tells their next calls apart, so each of the two goes on with one of them.
    on = [admit(table, call(Claim("i", begins=False))) for _ in range(2)]
    assert {id(one.progress.interaction) for one in on} == {id(one.progress.interaction) for one in (first, again)}


def test_what_the_client_named_goes_on_whatever_its_content_looks_like() -> None:
    table = Interactions()
    named = Claim("i", begins=True, explicit=True)
    serve(table, call(named), awaits_more=False)
    assert serve(table, call(named), awaits_more=False).progress.stage == 2
    serve(table, call(replace(named, ends=True)))
    assert len(table) == 0


def test_an_end_waits_for_the_calls_that_are_under_way() -> None:
    table = Interactions()
    slow = admit(table, call())
    serve(table, call(Claim("i", ends=True)))
    assert len(table) == 1
    table.served(slow, SOME, 1.0, None)
    assert len(table) == 0


def test_a_stage_is_believed_only_downwards() -> None:
    table = Interactions()
    assert admit(table, call(Claim("i", 40))).progress.stage == 1
    assert admit(table, call(Claim("i", 1))).progress.stage == 1, "calls side by side share a stage"
    assert admit(table, call(Claim("i", 40))).progress.stage == 3
    assert admit(table, call(Claim("i", -2))).progress.stage == 4


def test_a_call_under_way_is_not_silence() -> None:
    table = Interactions(InteractionSettings(idle_s=10.0))
    admit(table, call(), 0.0)
    assert admit(table, call(), 500.0).progress.inside


def test_idle_ones_are_collected_without_being_asked_for() -> None:
    table = Interactions(InteractionSettings(idle_s=10.0))
    for number in range(1000):
        serve(table, call(f"old{number}"), 0.0)
    for number in range(200):
        serve(table, call(f"new{number}"), 30.0)
    assert len(table) <= 200


def test_a_clock_that_is_set_back_loses_no_interaction_and_keeps_none_for_ever() -> None:
    table = Interactions(InteractionSettings(idle_s=10.0))
    serve(table, call("i"), 1000.0)
    assert serve(table, call("i"), 3.0).progress.inside
    serve(table, call("left"), 1000.0)
    for number in range(50):
        serve(table, call(f"n{number}"), 20.0 + number)
    assert not serve(table, call("left"), 75.0).progress.inside


def test_a_median_follows_and_no_single_value_moves_it_far() -> None:
    rng = random.Random(5)
    median = Median()
    for _ in range(3000):
        median.learn(rng.lognormvariate(3.0, 1.0))
    assert 12 < median.value < 33  # e^3 is 20
    before = median.value
    median.learn(1e12)
    assert median.value < 1.1 * before


@pytest.mark.parametrize("wrong", [{"idle_s": 0}, {"calls_max": -1}, {"tokens_max": 0}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        InteractionSettings(**wrong)


# --- what was wasted ---


def cut(table: Interactions) -> int:
    """What is wasted once the next call is refused."""
    refused = call()
    table.arrived(refused, 0.0)
    table.cut(refused)
    return table.wasted_tokens


def test_what_was_spent_before_a_cut_is_wasted_once_and_a_refused_start_wastes_nothing() -> None:
    table = Interactions()
    assert cut(table) == 0
    serve(table, call())
    serve(table, call())
    assert [cut(table), cut(table)] == [30, 30]
    serve(table, call())
    assert cut(table) == 45


# --- bounds ---


def test_of_too_many_the_tenant_that_has_most_loses_its_oldest() -> None:
    table = Interactions(InteractionSettings(open_max=100))
    for number in range(10):
        serve(table, call(f"i{number}", "small"))
    for number in range(90):
        serve(table, call(f"i{number:04}", "flood"))
    assert len(table) == 100
    full = len(pickle.dumps(table))
    for number in range(90, 1000):
        serve(table, call(f"i{number:04}", "flood"))
        assert len(table) <= 100
        assert len(pickle.dumps(table)) <= 2.1 * full, "of those that have closed only as many are kept"
    assert all(serve(table, call(f"i{number}", "small")).progress.inside for number in range(10))


actions = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "serve", "break", "refuse"]),
        st.sampled_from(["a", "b"]),
        st.sampled_from(["i", "j", ""]),
        st.sampled_from([None, True, False]),
        st.booleans(),
        st.floats(-30.0, 30.0),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(trace=actions)
def test_the_books_are_right_after_anything(trace: list[tuple[str, str, str, bool | None, bool, float]]) -> None:
    table = Interactions(InteractionSettings(idle_s=20.0, open_max=3))
    under_way: list[Request] = []
    begun: dict[tuple[str, Key], Interaction] = {}
    """Of each key the one that began last: the only one that can be open."""
    now = 100.0
    for what, tenant, id, begins, ends, step_s in trace:
        now += step_s
        if what in ("arrive", "refuse"):
            request = call(Claim(id, begins=begins, ends=ends), tenant)
            table.arrived(request, now)
            if what == "refuse":
                table.cut(request)
                continue
            table.admitted(request, now)
            under_way.append(request)
            interaction = request.progress.interaction
            if interaction is not None:
                begun[interaction.tenant, interaction.key] = interaction
        elif under_way:
            request = under_way.pop(0)
            if what == "serve":
                table.served(request, SOME, now, begins)
            else:
                table.broke_off(request, ServiceTokens(0, 0), now)
        opened = [one for one in begun.values() if table.is_open(one.tenant, one.key)]
        assert len(table) == len(opened) <= 3
        for interaction in opened:
            assert interaction.under_way == sum(request.progress.interaction is interaction for request in under_way)
        for request in under_way:
            if request.progress.interaction is not None:
                assert request.progress.interaction.tenant == request.flow.tenant
                assert request.progress.inside <= (request.progress.stage >= 1)


# --- across restarts ---


def test_what_was_learned_is_restored_and_nothing_else_is_taken_for_it() -> None:
    table = Interactions()
    for _ in range(100):
        table.paces.replied("a", "agent", 1.0)
    learned = table.paces.snapshot()
    fresh = Interactions()
    fresh.paces.adopt(fresh.paces.read(learned))
    assert fresh.paces.pace_s("a", "agent") == table.paces.pace_s("a", "agent") != fresh.paces.pace_s("a", "")
    for wrong in (None, {}, [["a"]], [["a", "b", float("nan"), 1]], [["a", "b", -1, 1]], [[1, 2, 3, 4]]):
        with pytest.raises(ValueError, match=r"expected|row 0"):
            fresh.paces.read(wrong)
    assert fresh.paces.snapshot() == learned


def test_nothing_is_kept_of_a_question_once_nobody_can_go_on_with_it() -> None:
    def kept() -> int:
        gc.collect()
        return sum(isinstance(one, Interaction) for one in gc.get_objects())

    table, before = Interactions(), kept()
    serve(table, call("agent"), 0.0, awaits_more=True)  # and is awaited for an hour
    for number in range(100):
        serve(table, answered(Claim(f"{number}", 1, True)), 1.0, awaits_more=False)
    assert kept() == before + 101
    for number in range(100):
        serve(table, call(Claim(f"later {number}", 1, True)), 2.0 + PACE_S_MAX, awaits_more=False)
    assert (kept(), len(table)) == (before + 1, 1)


def test_what_goes_on_after_a_rest_is_awaited_like_any_other() -> None:
    table = Interactions()
    serve(table, answered(Claim("q", 1, True)), 0.0, awaits_more=False)
    on = call(Claim("on", 2, None, keys=CorrelationKeys((), ("turn q",))))
    assert serve(table, on, 1.0, awaits_more=True).progress.stage == 2
    serve(table, call("another"), 2.0 + PACE_S_MAX, awaits_more=True)
    assert len(table) == 2
    assert admit(table, call(Claim("q", 3, False)), 2.0 + PACE_S_MAX).progress.interaction is on.progress.interaction


def answered(claim: Claim) -> Request:
    """A call whose answer gives out a key."""
    request = call(claim)
    request.progress.answer_keys = CorrelationKeys((), (f"turn {claim.id}",))
    return request
