"""A node of the tree: the pool, a group or a tenant. What part of the pool is it entitled to, and what is there for it?

**Parts.** The pool is divided from the root down among the children that have requests: a child gets its part by
weight, but at least its floor (`ClassLine.share`). Class batch is a second line at each node, with parts of its own.

**Usage.** A node counts what runs below it, of both lines together, and of each resource. What a floor does not lend
is kept for the node: it counts as used at the parent, used or not. So one recursion answers for ceilings, borrowing and
lending at every level, as in Kueue:

    available(node) = the least of what its own ceiling leaves it,
                      and of what it keeps unused plus available(parent)

A node that runs nothing has room for one request whatever its ceiling: else a large one would never start.
"""

from __future__ import annotations

from math import inf
from typing import Final

from policies.tree.terms import GroupSettings

RESOURCES: Final = (0, 1)
SEQUENCES, TOKENS = RESOURCES
"""Sequences that run, and KV tokens that they hold."""
_IN_WORDS: Final = (("run", "sequence slots"), ("hold", "KV cache"))
LEAST_PART: Final = 0.01
"""Of a group, for its children without a floor: where floors are all of it, they would wait for ever."""


class ClassLine:
    """The work of one class at a node: who is present, and what is its part?"""

    __slots__ = ("floor", "floored", "parent", "present", "weight", "weights")

    def __init__(self, parent: ClassLine | None, weight: float, floor: float) -> None:
        self.parent = parent
        self.weight = weight
        self.floor = floor
        self.present = 0
        """Present children; of a tenant: requests queued or running, and gateways where it has some."""
        self.weights = 0.0
        """Sum over the present children."""
        self.floored: dict[ClassLine, None] = {}
        """Those of them with a floor."""

    def __hash__(self) -> int:
        return id(self)

    def add(self) -> None:
        """One more child, or request, is present."""
        self.present += 1
        if self.present == 1 and self.parent is not None:
            self.parent.weights += self.weight
            if self.floor:
                self.parent.floored[self] = None
            self.parent.add()

    def remove(self) -> None:
        self.present -= 1
        if not self.present and self.parent is not None:
            parent = self.parent
            parent.remove()
            parent.floored.pop(self, None)
            parent.weights = parent.weights - self.weight if parent.present else 0.0

    def reweigh(self, weight: float) -> None:
        if self.present and self.parent is not None:
            self.parent.weights += weight - self.weight
        self.weight = weight

    def share(self) -> float:
        """Its part of the pool, taken for present."""
        parent = self.parent
        if parent is None:
            return 1.0
        whole = parent.share()
        weights = parent.weights if self.present else parent.weights + self.weight
        floored = parent.floored
        if not floored and not self.floor:
            return whole * self.weight / weights
        rest = whole
        # The child whose floor exceeds its part by weight the most is the first that its floor decides for.
        children = [*floored] if self.present or not self.floor else [*floored, self]
        for child in sorted(children, key=_floor_per_weight, reverse=True):
            if child.floor * weights <= child.weight * rest:
                break
            if child is self:
                return min(child.floor, rest) or LEAST_PART * whole
            rest, weights = max(0.0, rest - child.floor), weights - child.weight
        return max(rest, LEAST_PART * whole) * self.weight / weights


def _floor_per_weight(line: ClassLine) -> float:
    return line.floor / line.weight


class Node:
    """The pool, a group or a tenant, with its two lines."""

    __slots__ = (
        "batch", "elsewhere", "filled", "is_by_borrowing", "kept", "kept_share", "most", "name", "others", "parent",
        "reserved", "running_max", "share_max", "used",
    )  # fmt: skip

    def __init__(self, name: str, parent: Node | None, terms: GroupSettings, floor: float) -> None:
        self.name = name
        self.parent = parent
        self.others: ClassLine = ClassLine(None if parent is None else parent.others, terms.weight, floor)
        """Work that cannot wait."""
        self.batch: ClassLine = ClassLine(None if parent is None else parent.batch, terms.weight, 0.0)
        """Work that can (class batch)."""
        self.running_max = inf if terms.max_running is None else float(terms.max_running)
        self.share_max = terms.share_max
        self.is_by_borrowing = terms.max_share != terms.share_max
        """Is `share_max` the floor and what may be borrowed?"""
        self.kept_share = terms.kept_share
        # By resource:
        self.used = [0.0, 0.0]
        """By all below it, at all gateways."""
        self.elsewhere = [0.0, 0.0]
        """The part of it that runs at other gateways, and is in no node below that they report."""
        self.filled = [0.0, 0.0]
        """What its children use, or keep if that is more; of a tenant: what it uses."""
        self.kept = [0.0, 0.0]
        """What is kept for it; of the pool: all that there is."""
        self.reserved = [0.0, 0.0]
        """What it takes of its parent: what is filled, or kept if that is more."""
        self.most = [self.running_max, inf]
        """Its ceiling."""

    def __repr__(self) -> str:
        return f"<Node {self.name or 'the pool'}: {self.used[SEQUENCES]:g} of {self.most[SEQUENCES]:g} sequences>"

    def ceiling_in_words(self, resource: int, capacity: float) -> str:
        """Return its ceiling, where that comes from, and how much is used: `capacity` is the whole pool's."""
        who = f"group {self.name[1:]}" if self.name[:1] == " " else f"tenant {self.name}"
        most, used = self.most[resource], self.used[resource]
        if resource == SEQUENCES and not most < self.running_max:
            return f"{who} has {used:.0f} of {most:.0f} sequences running (max_running)"
        does, what = _IN_WORDS[resource]
        term = "borrowing_limit" if self.is_by_borrowing else "max_share"
        return f"{who} may {does} {most / capacity:.0%} of the {what} ({term}) and {does}s {used / capacity:.0%}"

    @property
    def is_limited(self) -> bool:
        """May it have less than the pool has, or is something kept for it?"""
        return self.kept_share > 0.0 or min(self.running_max, self.share_max) < inf

    def available(self, resource: int) -> float:
        """How much more of this may it use now? inf: no ceiling and nothing that is kept for others bounds it."""
        parent = self.parent
        if parent is None:
            # How full the engines are is for their ledgers. The pool only leaves free what is kept and not used.
            is_kept = self.filled[resource] > self.used[resource] > 0.0
            return self.kept[resource] - self.filled[resource] if is_kept else inf
        unused = self.reserved[resource] - self.filled[resource]
        below = self.most[resource] - self.used[resource] if self.used[resource] else inf
        return min(below, unused + parent.available(resource))

    def use(self, resource: int, amount: float) -> None:
        """So much more is used by it (less if negative). O(depth)."""
        node, more = self, amount
        while True:
            node.used[resource] += amount
            parent = node.parent
            more = node.fill(resource, more)
            if parent is None:
                return
            node = parent

    def fill(self, resource: int, more: float) -> float:
        """So much more of it is filled. Returns how much more it takes of its parent."""
        self.filled[resource] += more
        before, self.reserved[resource] = self.reserved[resource], max(self.kept[resource], self.filled[resource])
        return self.reserved[resource] - before

    def size(self, resource: int, capacity: float, sharers: int) -> None:
        """The pool has so much of it, or that is not known (inf). `sharers`: gateways that have an equal part each."""
        self.most[resource] = min(
            self.running_max if resource == SEQUENCES else inf, self.share_max * capacity
        ) / sharers  # fmt: skip
        self.kept[resource] = self.kept_share * capacity / sharers if capacity < inf else 0.0
        more, node = self.fill(resource, 0.0), self.parent
        while more and node is not None:
            more, node = node.fill(resource, more), node.parent
