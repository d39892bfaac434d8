"""A `Counters` gives the least counter first, however counters rise and fall, and stays small."""

from __future__ import annotations

import pickle
from collections import Counter

from hypothesis import example, given, settings
from hypothesis import strategies as st

from policies.queue.counters import CounterMember, Counters

NAMES = [(letter,) for letter in "abcdef"]

WINDOW = 25.0
windows = st.sampled_from([0.0, WINDOW])
changes = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "queued",
                "queued",
                "queued",
                "dispatched",
                "withdrawn",
                "ended",
                "charged",
                "charged",
                "prefer",
                "sleep",
                "wake",
                "answer",
            ]
        ),
        st.sampled_from(NAMES),
        st.integers(-30, 60),
    ),
    min_size=20,
    max_size=100,
)


class Lined:
    """A line and all its members by name, and changes to them as the callers of a line make them."""

    def __init__(self, window: float = 0.0) -> None:
        self.line: Counters[CounterMember] = Counters(window=window)
        self.members: dict[tuple[str, ...], CounterMember] = {}
        self.charges = Counter[tuple[str, ...]]()

    def member(self, name: tuple[str, ...]) -> CounterMember:
        return self.members.setdefault(name, CounterMember(name))

    def waiting(self) -> list[CounterMember]:
        return [member for member in self.members.values() if member.queued]

    def awake(self) -> list[CounterMember]:
        return [member for member in self.waiting() if not member.is_asleep]

    def change(self, kind: str, name: tuple[str, ...], amount: int) -> None:
        """One change, if it is possible for this member."""
        member, line = self.member(name), self.line
        if kind == "queued":
            line.queued(member)
        elif kind == "dispatched" and member.queued:
            line.left(member, is_served=True)
        elif kind == "withdrawn" and member.queued:
            line.left(member, is_served=False)
        elif kind == "ended" and member.running:
            line.ended(member)
        elif kind == "charged" and member.running:
            line.charged(member, float(amount))
            self.charges[name] += amount
        elif kind == "prefer":
            line.prefer(member, amount > 0)
        elif kind == "sleep" and member.queued:
            line.sleep(member)
        elif kind == "wake":
            line.wake(member)
        elif kind == "answer":  # other gateways have heard of all that wait
            line.unconfirmed.clear()

    def rank(self, member: CounterMember) -> float:
        return member.counter - self.line.window * member.preferred


@settings(max_examples=200)
@given(changes, windows)
def test_least_is_the_minimum_by_rank_turn_and_name(
    trace: list[tuple[str, tuple[str, ...], int]], window: float
) -> None:
    lined = Lined(window)
    for kind, name, amount in trace:
        lined.change(kind, name, amount)
        expected = min(lined.awake(), key=lambda member: (lined.rank(member), member.turn, member.name), default=None)
        assert lined.line.least() is expected
        if expected is not None and not expected.preferred:
            asleep = [lined.rank(member) for member in lined.waiting() if member.is_asleep]
            assert lined.line.find_floor() == min([expected.counter, *asleep])


@settings(max_examples=200)
@given(changes, windows)
@example(
    [
        ("queued", ("a",), 0),
        ("queued", ("b",), 0),
        ("dispatched", ("b",), 0),
        ("charged", ("b",), -1),
        ("sleep", ("a",), 0),
        ("queued", ("b",), 0),
    ],
    0.0,
)
def test_a_member_that_begins_to_wait_is_raised_to_the_floor(
    trace: list[tuple[str, tuple[str, ...], int]], window: float
) -> None:
    lined = Lined(window)
    for kind, name, amount in trace:
        member = lined.member(name)
        before, was_waiting, floor = member.counter, member.queued > 0, lined.line.find_floor()
        left = [lined.line.last_left.counter] if lined.line.last_left else []
        is_sole = member.is_sole or bool(lined.line.unconfirmed) or not lined.waiting()
        lined.change(kind, name, amount)
        if kind == "queued" and not was_waiting:
            assert member.counter == max(before, floor)
            assert member.lifted == member.counter - lined.charges[name], "what came from a lift is no service"
            assert member.is_sole == is_sole, "what was lifted to one that nobody has heard of is so too"
            others = [other.counter for other in lined.waiting() if other is not member]
            # Beside members that all sleep, the one that left last bounds the floor, too; a refund lowers it.
            assert not others or floor >= min([*others, *left]) - window


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.booleans(), st.integers(0, 40)), max_size=150))
def test_what_waits_stays_within_the_window_and_one_charge(trace: list[tuple[tuple[str, ...], bool, int]]) -> None:
    """However members come, turn into preferred ones and are served: the next one is served, and charged at once."""
    lined = Lined(WINDOW)
    for name, preferred, charge in trace:
        lined.change("queued", name, 0)
        lined.change("prefer", name, int(preferred))
        if charge:
            least = lined.line.least()
            lined.line.left(least, is_served=True)
            lined.line.charged(least, float(charge))
            lined.line.ended(least)
        counters = [member.counter for member in lined.waiting()]
        if counters:
            assert max(counters) - min(counters) <= WINDOW + 40


def test_what_is_cached_has_no_other_window_over_a_preferred_member() -> None:
    lined = Lined(WINDOW)
    for letter in "ab":
        lined.change("queued", (letter,), 0)
        lined.change("prefer", (letter,), 1)
    a, b = lined.member(("a",)), lined.member(("b",))
    lined.line.charged(b, 1.0)
    assert not lined.line.may_pass(b, a)
    lined.line.prefer(a, False)
    assert lined.line.may_pass(b, a)


@settings(max_examples=100)
@given(changes)
def test_who_waits_or_runs_is_kept_and_all_others_can_be_forgotten(
    trace: list[tuple[str, tuple[str, ...], int]],
) -> None:
    lined = Lined()
    busy: dict[tuple[str, ...], list[int]] = {name: [0, 0] for name in NAMES}
    for kind, name, amount in trace:
        counts = busy[name]
        if kind == "queued":
            counts[0] += 1
        elif kind in ("dispatched", "withdrawn") and counts[0]:
            counts[0] -= 1
            counts[1] += kind == "dispatched"
        elif kind == "ended" and counts[1]:
            counts[1] -= 1
        lined.change(kind, name, amount)
        for other, member in lined.members.items():
            assert [member.queued, member.running] == busy[other]
    seen = {name for kind, name, _ in trace if kind == "queued"}
    forgotten = set()
    while (longest := lined.line.forget_longest_idle()) is not None:
        forgotten.add(longest.name)
    assert forgotten == {name for name in seen if not any(busy[name])}


def test_entries_of_refunds_do_not_pile_up() -> None:
    line: Counters[CounterMember] = Counters()
    members = [CounterMember(name) for name in NAMES]
    for member in members:
        for _ in range(3):
            line.queued(member)
        line.left(member, is_served=True)
        line.charged(member, 1e6)
    sizes = []
    for step in range(5000):
        line.charged(members[step % 6], -1.0)
        line.least()
        sizes.append(len(pickle.dumps(line)))
    assert max(sizes[1000:]) <= max(sizes[:1000]), "as many refunds later it is as small"


def test_preferred_newcomers_lower_the_floor_neither_here_nor_at_other_gateways() -> None:
    """Each gateway lifts a newcomer to what the other one says, and says what it lifted to."""
    here, there = Lined(WINDOW), Lined(WINDOW)
    for number in range(20):
        for lined, other in ((here, there), (there, here)):
            name = (f"{number}",)
            lined.change("queued", name, 0)
            lined.change("prefer", name, 1)
            least = lined.line.least()
            other.line.wait_elsewhere(lined.line.rank(least), is_preferred=True)
    assert here.line.find_floor() == there.line.find_floor() == 0.0


def test_the_next_member_is_ahead_of_nobody() -> None:
    lined = Lined(WINDOW)
    for letter, charge in (("a", 10), ("b", 20)):
        lined.change("queued", (letter,), 0)
        lined.line.charged(lined.member((letter,)), charge)
    lined.change("prefer", ("b",), 1)
    assert [lined.line.ahead(lined.member((letter,))) for letter in "ba"] == [0.0, 5.0]


def test_the_floor_is_the_least_that_waits_here_or_elsewhere() -> None:
    line: Counters[CounterMember] = Counters()
    waiting = CounterMember(("waiting",))
    line.queued(waiting)
    line.charged(waiting, 20.0)
    for elsewhere, floor in ((30.0, 20.0), (20.0, 20.0), (10.0, 10.0), (None, 20.0)):
        line.wait_elsewhere(elsewhere)
        assert line.find_floor() == floor
