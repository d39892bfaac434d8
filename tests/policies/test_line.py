"""A `Line` gives the least counter first, however counters rise and fall, and stays small."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.line import Line, Member

NAMES = [(letter,) for letter in "abcdef"]

changes = st.lists(
    st.tuples(
        st.sampled_from(["queued", "queued", "queued", "dispatched", "withdrawn", "ended", "charged", "charged"]),
        st.sampled_from(NAMES),
        st.integers(-30, 60),
    ),
    min_size=20,
    max_size=100,
)


def member_of(line: Line[Member], name: tuple[str, ...]) -> Member:
    member = line.members.get(name)
    if member is None:
        member = Member(name)
        line.add(member)
    return member


def change(line: Line[Member], kind: str, name: tuple[str, ...], amount: int) -> None:
    """One change, if it is possible for this member."""
    member = line.members.get(name)
    if kind == "queued":
        line.queued(member_of(line, name))
    elif member is None:
        return
    elif kind == "dispatched" and member.queued:
        line.dispatched(member)
    elif kind == "withdrawn" and member.queued:
        line.withdrawn(member)
    elif kind == "ended" and member.running:
        line.ended(member)
    elif kind == "charged" and member.running:
        line.charged(member, float(amount))


@settings(max_examples=200, deadline=None)
@given(changes)
def test_least_is_the_minimum_by_counter_turn_and_name(trace: list[tuple[str, tuple[str, ...], int]]) -> None:
    line: Line[Member] = Line()
    for kind, name, amount in trace:
        change(line, kind, name, amount)
        waiting = [member for member in line.members.values() if member.queued]
        expected = min(waiting, key=lambda member: (member.counter, member.turn, member.name), default=None)
        assert line.least() is expected
        if expected is not None:
            assert line.floor() == expected.counter


@settings(max_examples=200, deadline=None)
@given(changes)
def test_whoever_starts_to_wait_is_never_below_those_who_wait(trace: list[tuple[str, tuple[str, ...], int]]) -> None:
    line: Line[Member] = Line()
    for kind, name, amount in trace:
        known = line.members.get(name)
        before = known.counter if known is not None else 0.0
        was_waiting, floor = known is not None and known.queued > 0, line.floor()
        change(line, kind, name, amount)
        if kind == "queued" and not was_waiting:
            assert line.members[name].counter == max(before, floor)


@settings(max_examples=100, deadline=None)
@given(changes)
def test_who_waits_or_runs_is_remembered_and_all_others_can_be_forgotten(
    trace: list[tuple[str, tuple[str, ...], int]],
) -> None:
    line: Line[Member] = Line()
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
        change(line, kind, name, amount)
        for other, (queued, running) in busy.items():
            if queued or running:
                assert (line.members[other].queued, line.members[other].running) == (queued, running)
    idle = [member for member in line.members.values() if not (member.queued or member.running)]
    while (forgotten := line.forget_longest_idle()) is not None:
        idle.remove(forgotten)
    assert not idle
    assert sorted(line.members) == sorted(name for name, counts in busy.items() if any(counts))


def test_entries_of_refunds_do_not_pile_up() -> None:
    line: Line[Member] = Line()
    members = [member_of(line, name) for name in NAMES]
    for member in members:
        for _ in range(3):
            line.queued(member)
        line.dispatched(member)
        line.charged(member, 1e6)
    for step in range(5000):
        line.charged(members[step % 6], -1.0)
        line.least()
    assert len(line._heap) <= 2 * len(members) + 65


def test_a_refund_moves_a_member_forward() -> None:
    line: Line[Member] = Line()
    generous, other = member_of(line, ("a",)), member_of(line, ("b",))
    for member in (generous, generous, other):
        line.queued(member)
    line.dispatched(generous)
    line.charged(generous, 20.0)
    line.charged(other, 5.0)
    assert line.least() is other
    line.withdrawn(other)
    assert line.least() is generous
    line.queued(other)
    line.charged(generous, -18.0)
    assert line.least() is generous


def test_a_newcomer_to_an_empty_line_starts_where_the_last_one_left() -> None:
    line: Line[Member] = Line()
    early, late = member_of(line, ("early",)), member_of(line, ("late",))
    line.queued(early)
    line.dispatched(early)
    line.charged(early, 40.0)
    line.queued(late)
    assert late.counter == 40.0
