"""By what an interaction is known again, what each key proves, and that what is remembered of them is bounded."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.correlation_table import HOLDERS_MAX, KEYS_MAX, CorrelationTable
from policies.interactions import Interactions, InteractionSettings
from policies.replicas.messages import ReplicaReport
from policies.replicas.shared_interactions import SharedInteractions
from policies.request import Claim, CorrelationKeys, Flow, Interaction, Request, ServiceTokens
from tests.kit.typed_script_store import TypedScriptStore
from tests.policies.making import make_request

_serial = count()
SOME = ServiceTokens(10, 5)


def call(claim: Claim, user: str = "") -> Request:
    return make_request("a", user=user, claim=claim)


def question(name: str | None = None, **fields: object) -> Claim:
    return replace(Claim(name or f"q{next(_serial)}", 1, begins=True), **fields)


def shown(**keys: object) -> Claim:
    """The claim of a call whose question nobody has heard of."""
    claim = question(keys=CorrelationKeys(**keys))
    return replace(claim, begins=not claim.keys.strong)


def serve(
    table: Interactions, claim: Claim, now: float = 0.0, *, awaits_more: bool | None = True,
    answer_keys: CorrelationKeys | None = None, user: str = "",
) -> Request:  # fmt: skip
    request = call(claim, user)
    table.arrived(request, now)
    table.admitted(request, now)
    request.progress.answer_keys = answer_keys or CorrelationKeys()
    table.served(request, SOME, now, awaits_more)
    return request


def is_of(request: Request, first: Request) -> bool:
    return request.progress.interaction is first.progress.interaction and request.progress.inside


# --- what each of them proves ---


def test_a_strong_key_is_enough_whatever_has_become_of_the_question() -> None:
    table = Interactions()
    first = serve(table, question(), answer_keys=CorrelationKeys(strong=("id",)))
    assert is_of(serve(table, shown(strong=("unheard", "id"))), first)
    assert not serve(table, shown(strong=("unheard",))).progress.inside
    assert not serve(table, shown(strong=("id",)), user="thief").progress.inside


def test_a_strong_key_counts_for_more_than_the_question_which_decides_if_several_answers_gave_it_out() -> None:
    table = Interactions()
    first, second = (serve(table, question(name), answer_keys=CorrelationKeys(strong=(f"id-{name}",))) for name in "qr")
    back = Claim("q", begins=False, keys=CorrelationKeys(("id-r",)))
    assert is_of(serve(table, back), second)
    assert is_of(serve(table, Claim("q", begins=False)), first)
    table = Interactions()
    calls = [serve(table, question(name), answer_keys=CorrelationKeys(strong=("call:0",))) for name in "pqr"]
    back = Claim("q", begins=False, keys=CorrelationKeys(("call:0",)))
    assert is_of(serve(table, back), calls[1])


def test_a_weak_key_holds_at_an_agents_pace_only() -> None:
    for pause_s, is_inside in ((20.0, True), (20.1, False)):
        table = Interactions()
        first = serve(table, question(), awaits_more=False, answer_keys=CorrelationKeys(weak=("turn",)))
        assert len(table) == 0
        assert is_of(serve(table, shown(weak=("turn",)), pause_s), first) == is_inside


def test_a_call_while_another_is_under_way_follows_at_any_pace() -> None:
    table = Interactions()
    first = call(question(session="s"))
    table.arrived(first, 0.0)
    table.admitted(first, 0.0)
    assert is_of(serve(table, shown(weak=("s",)), 500.0), first)


def test_a_weak_key_of_several_is_of_the_one_that_weaker_keys_speak_for() -> None:
    table = Interactions()
    first, second = (
        serve(table, question(), awaits_more=False, answer_keys=CorrelationKeys(weak=("all", turn), text=(line, 7)))
        for turn, line in (("one", 1), ("two", 2))
    )
    assert is_of(serve(table, shown(weak=("all", "two")), answer_keys=CorrelationKeys(weak=("all",))), second)
    assert is_of(serve(table, shown(weak=("all",), text=(7, 1))), first)


def test_whoever_was_silent_for_too_long_is_gone_however_many_have_the_same_weak_key() -> None:
    table = Interactions()
    for _ in range(10):
        serve(table, question(), awaits_more=None, answer_keys=CorrelationKeys(weak=("turn",)))
    assert len(table) == 10
    assert not serve(table, shown(weak=("turn",)), 301.0).progress.inside
    assert len(table) == 1


def test_lines_count_where_nothing_better_is_known_and_only_if_they_are_enough() -> None:
    table = Interactions()
    first = serve(table, question(), answer_keys=CorrelationKeys(text=(1, 2)))
    serve(table, question(), answer_keys=CorrelationKeys(text=(2, 3)))
    assert is_of(serve(table, shown(text=(1, 2, 9), text_min=2)), first)
    assert not serve(table, shown(text=(1, 9), text_min=2)).progress.inside
    assert not serve(table, shown(text=(9,))).progress.inside


def test_a_session_goes_on_with_its_latest_interaction() -> None:
    table = Interactions()
    session = CorrelationKeys(weak=("s",))
    serve(table, question(session="s"))
    second = serve(table, question(session="s"), 100.0, awaits_more=False)
    assert is_of(serve(table, question(session="s", keys=session), 105.0, awaits_more=False), second)
    later = serve(table, question(session="s", keys=session), 205.0)
    assert not later.progress.inside, "a person asks something new"
    compacted = question(session="s", begins=False, keys=CorrelationKeys(strong=("unheard", "s")))
    assert is_of(serve(table, compacted, 400.0), later), "a tool's result asks nothing"


def test_what_a_client_ended_is_not_gone_on_with() -> None:
    table = Interactions()
    serve(table, question(ends=True), awaits_more=True, answer_keys=CorrelationKeys(("id",), ("turn",)))
    assert not serve(table, shown(strong=("id",))).progress.inside
    assert not serve(table, shown(weak=("turn",))).progress.inside


# --- how long it may be silent, and how soon it goes on ---


@pytest.mark.parametrize(
    ("awaits_more", "idle_s", "silence_s"), [(True, None, 3600.0), (None, None, 300.0), (True, 60.0, 60.0)]
)
def test_silence_is_an_hour_before_a_tools_result_and_else_five_minutes_unless_it_is_set(
    awaits_more: bool | None, idle_s: float | None, silence_s: float
) -> None:
    for after_s in (silence_s - 1.0, silence_s + 1.0):
        table = Interactions(InteractionSettings(idle_s=idle_s))
        serve(table, question("q"), awaits_more=awaits_more, answer_keys=CorrelationKeys(("id",)))
        assert serve(table, shown(strong=("id",)), after_s).progress.inside == (after_s < silence_s)


def replied(pause_s: float, times: int = 20) -> float:
    """The pace of an app to whose answers something was said after so long."""
    table = Interactions()
    for number in range(times):
        for keys, after_s in ((CorrelationKeys(), 0.0), (CorrelationKeys(weak=("s",)), pause_s)):
            serve(table, question(session="s", keys=keys), 1000.0 * number + after_s, awaits_more=False)
    return table.paces.pace_s("a", "")


def test_agents_have_more_time_than_people() -> None:
    assert replied(0.5) == replied(4.9) == 60.0
    assert replied(45.0) == replied(5.1) == 10.0
    assert replied(0.5, 7) == replied(45.0, 7) == 20.0, "too little is known"
    assert replied(0.5, 8) == 60.0


# --- bounds ---


def test_of_one_interaction_the_latest_witnesses_are_remembered_and_those_in_use() -> None:
    table = Interactions()
    for number in range(3 * KEYS_MAX):
        answer_keys = CorrelationKeys((f"id{number}",), (f"turn{number}",), (number,))
        last = serve(table, question(session="s", begins=False, keys=CorrelationKeys(("s",))), answer_keys=answer_keys)
        assert last.progress.stage == number + 1
    assert not serve(table, shown(strong=("id1",))).progress.inside
    assert is_of(serve(table, shown(strong=(f"id{number}",))), last)


def made(tenant: str, name: str) -> Interaction:
    return Interaction(tenant, ("", "", name), 0.0)


def test_of_the_keys_of_one_answer_the_oldest_are_forgotten() -> None:
    table, one = CorrelationTable(), made("t", "i")
    for key in [*range(KEYS_MAX), *[str(number) for number in range(5)]]:
        table.add(one, key)
    assert len(table) == len(one.key_hashes) == KEYS_MAX
    assert table.find(Flow("t"), "4") == (one,)
    assert not table.find(Flow("t"), 4)


def test_the_tenant_with_most_witnesses_loses_its_oldest() -> None:
    table = CorrelationTable(keys_max=100)
    small = made("small", "i")
    for number in range(5):
        table.add(small, number)
    for number in range(10_000):
        table.add(made("flood", "i"), number)
        assert len(table) <= 100
    assert all(table.find(Flow("small"), number) == (small,) for number in range(5))
    assert table.find(Flow("flood"), 9_999)
    assert not table.find(Flow("flood"), 1)


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "alone", "forget"]), st.integers(0, 30), st.integers(0, 40)), max_size=300
    )
)
def test_the_table_and_its_interactions_agree_after_anything(trace: list[tuple[str, int, int]]) -> None:
    table = CorrelationTable(keys_max=60)
    interactions = [made(f"t{number % 3}", f"i{number}") for number in range(31)]
    known: dict[int, int] = {}
    for what, number, key in trace:
        interaction = interactions[number]
        if what == "forget":
            table.forget(interaction)
        else:
            table.add(interaction, key, alone=what == "alone")
            known[hash(("", "", key))] = key
        assert len(table) == sum(len(one.key_hashes) for one in interactions) <= 60
        for one in interactions:
            hashes = one.key_hashes
            assert len(hashes) == len(set(hashes)) <= KEYS_MAX
            for key_hash in hashes:
                holders = table.find(Flow(one.tenant), known[key_hash])
                assert one in holders
                assert len(holders) <= HOLDERS_MAX


# --- at several gateways ---


BEGAN_MS = 1_000_000


class Pair:
    """Two gateways that tell each other of their interactions."""

    def __init__(self) -> None:
        self.tables = [Interactions() for _ in range(2)]
        self.shared = [SharedInteractions(table) for table in self.tables]
        self.exchange = TypedScriptStore()
        self.number = count(1)

    def report(self, at: int, now: float) -> None:
        self._exchange(at, [], now)

    def arrives(self, at: int, claim: Claim, now: float) -> Request:
        """A call at this gateway that asks the other one."""
        request = call(claim)
        self.tables[at].arrived(request, now)
        if self.shared[at].is_unknown(request):
            self._exchange(at, [request], now)
            self.tables[at].arrived(request, now)
        return request

    def _exchange(self, at: int, asking: list[Request], now: float) -> None:
        asked = [call for request in asking for call in self.shared[at].ask(request)]
        calls = asked + self.shared[at].report(100, now)
        report = ReplicaReport([], [], [], [], calls, [], [], 0.0)
        view = self.exchange.exchange(str(at), next(self.number), report, round(now * 1000) + BEGAN_MS)
        for request in asking:
            self.shared[at].take_up(request, view.opened[: len(asked)], now)
        self.shared[at].receive(view.opened[len(asked) :])


def test_witnesses_hold_at_every_gateway() -> None:
    pair = Pair()
    pair.report(1, 0.0)
    for _ in range(3):
        first = serve(pair.tables[0], question("q", session="s"), answer_keys=CorrelationKeys(("id",), ("turn",), (1,)))
        serve(pair.tables[0], Claim("q", begins=False), answer_keys=CorrelationKeys(("id2",)))
    assert first.progress.stage == 1
    pair.report(0, 1.0)
    for number, claim in enumerate([shown(strong=("id2",)), shown(weak=("unheard", "turn")), shown(strong=("s",))]):
        found = pair.arrives(1, claim, 2.0 + number)
        assert found.progress.inside, claim
        assert found.progress.stage > 1
    assert not pair.arrives(1, shown(strong=("unheard",)), 6.0).progress.inside
    assert not pair.arrives(1, shown(text=(1,)), 6.0).progress.inside


def test_a_weak_key_of_another_gateway_holds_no_longer_than_one_of_its_own() -> None:
    pair = Pair()
    pair.report(1, 0.0)
    serve(pair.tables[0], question(), answer_keys=CorrelationKeys(("id",), ("turn",)))
    pair.report(0, 1.0)
    assert not pair.arrives(1, shown(weak=("turn",)), 62.0).progress.inside
    assert pair.arrives(1, shown(strong=("id",)), 62.0).progress.inside


def test_each_witness_is_reported_once() -> None:
    pair = Pair()
    serve(pair.tables[0], question("q"), answer_keys=CorrelationKeys(("id",)))
    assert len(pair.shared[0].report(100, 0.0)) == 2, "the question and the id"
    serve(pair.tables[0], Claim("q", begins=False))
    assert len(pair.shared[0].report(100, 1.0)) == 1


def test_a_call_beside_another_one_says_nothing_of_how_soon_an_app_replies() -> None:
    for under_way in (True, False):
        table = Interactions()
        serve(table, question(session="s"))
        if under_way:
            other = call(Claim(keys=CorrelationKeys(weak=("s",))))
            table.arrived(other, 3.0)
            table.admitted(other, 3.0)
        before = table.paces.snapshot()
        table.arrived(call(shown(weak=("s",))), 5.0)
        assert (table.paces.snapshot() == before) is under_way


def test_an_interaction_is_as_old_at_every_gateway() -> None:
    pair = Pair()
    serve(pair.tables[0], question(), answer_keys=CorrelationKeys(("id",)))
    pair.report(0, 100.0)
    found = pair.arrives(1, shown(strong=("id",)), 150.0).progress.interaction
    assert found.began_s == 0.0


def test_of_too_many_apps_the_one_that_was_answered_longest_ago_is_forgotten() -> None:
    paces = Interactions(InteractionSettings(apps_max=2)).paces
    for app in "abac":
        paces.replied("t", app, 1.0)
    assert [row[1] for row in paces.snapshot()] == ["a", "c"]
