"""A list that is left from anywhere is what a dict in order of entry would be."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.oldest_first import Listed, OldestFirst

pytestmark = pytest.mark.interpreted_only("it extends an entry of the list")


class Number(Listed):
    def __init__(self, number: int) -> None:
        self.line = None
        self.number = number


@given(st.lists(st.integers(0, 5), max_size=60))
def test_it_is_in_the_order_of_entry_whoever_leaves(moves: list[int]) -> None:
    line: OldestFirst[Number] = OldestFirst()
    entries, model = [Number(number) for number in range(6)], dict[int, None]()
    for number in moves:
        entry = entries[number]
        if number in model and moves.index(number) % 2:
            del model[number]
            entry.leave()
            entry.leave()  # out of no list
        else:
            model.pop(number, None)
            model[number] = None
            line.append(entry)
        assert [one.number for one in line] == list(model)
        assert len(line) == len(model)
        assert (entry.line is line) == (number in model)
        assert (line.first.number if line.first is not None else None) == next(iter(model), None)


def test_what_has_left_keeps_nobody_and_is_kept_by_nobody() -> None:
    line: OldestFirst[Number] = OldestFirst()
    entries = [Number(number) for number in range(3)]
    for entry in entries:
        line.append(entry)
    first, left, last = entries
    left.leave()
    first.leave()
    gone = ref(first)
    del entry, entries, first
    gc.collect()
    assert gone() is None
    assert list(line) == [last]
