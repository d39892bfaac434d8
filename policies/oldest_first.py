"""Lists in the order of entry, which an entry may leave from anywhere in O(1).

The links are in the entries, so a list takes no memory of its own, and keeps nothing that has left.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar


class Listed:
    """An entry of at most one list."""

    __slots__ = ("after", "before", "line")

    line: OldestFirst[Any] | None
    """The list that has the entry. Set by the constructors of subclasses."""
    before: Any
    after: Any

    def leave(self) -> None:
        """Leave the list, if the entry is in one."""
        line = self.line
        if line is None:
            return
        before, after = self.before, self.after
        if before is None:
            line.first = after
        else:
            before.after = after
        if after is None:
            line.last = before
        else:
            after.before = before
        line.count -= 1
        self.line = self.before = self.after = None


E = TypeVar("E", bound=Listed)


class OldestFirst(Generic[E]):
    """A list of entries, the oldest first."""

    def __init__(self) -> None:
        self.first: E | None = None
        self.last: E | None = None
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[E]:
        entry = self.first
        while entry is not None:
            yield entry
            entry = entry.after

    def append(self, entry: E) -> None:
        """Add an entry, which leaves the list that it is in."""
        if entry.line is not None:
            entry.leave()
        last, self.last = self.last, entry
        if last is None:
            self.first = entry
        else:
            last.after = entry
        entry.before, entry.after, entry.line = last, None, self
        self.count += 1
