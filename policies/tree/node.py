"""A node of the tree: the pool, a group or a tenant. What part of the pool is it entitled to, and what can it use now?

**Parts.** The pool is divided from the root down among the children that have requests: a child gets its part by
weight, but at least its floor (`ClassLine.share`). Class batch is a second line at each node, with parts of its own. A
third line divides the KV cache among the contexts of interactive work: in it a tenant without requests stays present
while a context of it counts, as between two calls of an agent.

**Usage.** A node counts the usage of its subtree, at all gateways, by resource: running sequences and their KV tokens,
for both lines together, and the contexts of open interactions (`capacity.working_set`), for each line. Ceilings and
kept parts bound the running requests. The part of a floor that is not lent is kept for the node: the parent counts it
as used, whether the node uses it or not. A floor without a `lending_limit` keeps nothing free: it only raises the part
by weight. One recursion then covers ceilings, borrowing and lending at every level, as in Kueue:

    available(node) = min(ceiling - used, kept but unused + available(parent))

Example: a group keeps 4 of 16 slots and uses 1. It has 3 kept slots, and may take what is available at the pool.
A node that runs nothing has room for one request whatever its ceiling: otherwise a large request would never start.
"""

from __future__ import annotations

from math import inf
from typing import Final, NamedTuple

from policies.tree.terms import GroupSettings

RESOURCES: Final = (0, 1, 2, 3)
SEQUENCES, TOKENS, CONTEXTS, BATCH_CONTEXTS = RESOURCES
"""Running sequences, the KV tokens that they hold, and the tokens of the contexts of open interactions, interactive and
batch."""
RUNNING: Final = (SEQUENCES, TOKENS)
"""Resources of running requests. Ceilings and kept parts bound these."""
PRESENT, WEIGHT = (-1, -2)
"""Numbers that gateways report of each tenant node with requests: 1, and the weight if that is not 1."""
_IN_WORDS: Final = (("run", "sequence slots"), ("hold", "KV cache"))
LEAST_PART: Final = 0.01
"""Fraction of a node for its children without a floor. Floors that add up to the whole node would starve them."""


class NodeUsage(NamedTuple):
    """A number that a gateway reports to other gateways about a node. The numbers of several gateways are added."""

    node: str
    resource: int
    """Measure: an entry of `RESOURCES`, `PRESENT` or `WEIGHT`."""
    amount: float


class ClassLine:
    """The work of one class at a node, or its contexts, with the part of the pool that it is entitled to."""

    __slots__ = ("floor", "floored", "parent", "present", "queued", "weight", "weights")

    def __init__(self, parent: ClassLine | None, weight: float, floor: float) -> None:
        self.parent = parent
        self.weight = weight
        self.floor = floor
        self.present = 0
        """Number of present children. For a tenant: requests queued or running, plus 1 if other gateways have some."""
        self.queued = 0
        """Sequences of the requests queued here, if this is the line of a tenant."""
        self.weights = 0.0
        """Sum of the weights of the present children."""
        self.floored: dict[ClassLine, None] = {}
        """Present children with a floor."""

    def __hash__(self) -> int:
        return id(self)

    def add(self) -> None:
        """Count one more child or request as present."""
        line = self
        line.present += 1
        while line.present == 1 and (parent := line.parent) is not None:
            parent.weights += line.weight
            if line.floor:
                parent.floored[line] = None
            parent.present += 1
            line = parent

    def remove(self) -> None:
        line = self
        line.present -= 1
        while not line.present and (parent := line.parent) is not None:
            parent.present -= 1
            if line.floor:
                del parent.floored[line]
            parent.weights = parent.weights - line.weight if parent.present else 0.0
            line = parent

    def reweigh(self, weight: float) -> None:
        if self.present and self.parent is not None:
            self.parent.weights += weight - self.weight
        self.weight = weight

    def share_at(self, weight: float) -> float:
        """Return the part of the pool that this line is entitled to. A line that is not present takes this weight."""
        if not self.present:
            self.weight = weight
        return self.share()

    def share(self) -> float:
        """Return the part of the pool that this line is entitled to, as if it were present."""
        parent = self.parent
        if parent is None:
            return 1.0
        whole = parent.share() if parent.parent is not None else 1.0
        weights = parent.weights if self.present else parent.weights + self.weight
        floored = parent.floored
        if not floored and not self.floor:
            return whole * self.weight / weights
        rest = whole
        # In order of floor per weight: once a floor is within the part by weight, all later floors are.
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
    """The pool, a group or a tenant, with its lines and its usage by resource."""

    __slots__ = (
        "batch", "ceiling_share", "contexts", "elsewhere", "filled", "interactive", "is_by_borrowing", "kept",
        "kept_share", "most", "name", "parent", "reserved", "running_max", "used",
    )  # fmt: skip

    def __init__(self, name: str, parent: Node | None, terms: GroupSettings, floor: float) -> None:
        self.name = name
        self.parent = parent
        self.interactive: ClassLine = ClassLine(None if parent is None else parent.interactive, terms.weight, floor)
        """Interactive work."""
        self.batch: ClassLine = ClassLine(None if parent is None else parent.batch, terms.weight, 0.0)
        """Batch work."""
        self.contexts: ClassLine = ClassLine(None if parent is None else parent.contexts, terms.weight, floor)
        """Contexts of interactive work. A tenant is present here while it has interactive requests or contexts."""
        self.running_max = inf if terms.max_running is None else float(terms.max_running)
        self.ceiling_share = terms.ceiling_share
        self.is_by_borrowing = terms.max_share != terms.ceiling_share
        """True unless `ceiling_share` is the configured `max_share`: the floor and the borrowing limit set it."""
        self.kept_share = terms.kept_share
        # By resource:
        self.used = [0.0, 0.0, 0.0, 0.0]
        """Usage of the whole subtree, at all gateways."""
        self.elsewhere = [0.0, 0.0, 0.0, 0.0]
        """Part of `used` at other gateways."""
        self.filled = [0.0, 0.0, 0.0, 0.0]
        """Sum of the children's `reserved`, plus the usage elsewhere that no child has; of a tenant: its usage."""
        self.kept = [0.0, 0.0, 0.0, 0.0]
        """Amount that is kept for this node; of the pool: its capacity."""
        self.reserved = [0.0, 0.0, 0.0, 0.0]
        """Amount that counts as used at the parent: the larger of `filled` and `kept`."""
        self.most = [self.running_max, inf, inf, inf]
        """The ceiling."""

    def __repr__(self) -> str:
        return f"<Node {self.name or 'the pool'}: {self.used[SEQUENCES]:g} of {self.most[SEQUENCES]:g} sequences>"

    def ceiling_in_words(self, resource: int, capacity: float) -> str:
        """Return the ceiling, its origin and the usage as a sentence. `capacity` is that of the whole pool."""
        who = f"group {self.name[1:]}" if self.name[:1] == " " else f"tenant {self.name}"
        most, used = self.most[resource], self.used[resource]
        if resource == SEQUENCES and not most < self.running_max:
            return f"{who} has {used:.0f} of {most:.0f} sequences running (max_running)"
        does, what = _IN_WORDS[resource]
        term = "borrowing_limit" if self.is_by_borrowing else "max_share"
        return f"{who} may {does} {most / capacity:.0%} of the {what} ({term}) and {does}s {used / capacity:.0%}"

    def line(self, *, is_batch: bool) -> ClassLine:
        return self.batch if is_batch else self.interactive

    def add(self, *, is_batch: bool) -> None:
        """Count one more request of a tenant as present, or its requests at other gateways."""
        line = self.batch if is_batch else self.interactive
        line.add()
        if line.present == 1 and not is_batch:
            self.contexts.add()

    def remove(self, *, is_batch: bool) -> None:
        line = self.batch if is_batch else self.interactive
        line.remove()
        if not line.present and not is_batch:
            self.contexts.remove()

    def reweigh(self, weight: float, *, is_batch: bool) -> None:
        """Replace the weight of a tenant: of its batch work, or of its interactive work and contexts."""
        for line in (self.batch,) if is_batch else (self.interactive, self.contexts):
            if line.weight != weight:
                line.reweigh(weight)

    @property
    def is_limited(self) -> bool:
        """Return whether the node has a ceiling, or a part that is kept for it."""
        return self.kept_share > 0.0 or min(self.running_max, self.ceiling_share) < inf

    @property
    def is_tenant(self) -> bool:
        return self.name[:1] not in ("", " ")

    @property
    def is_in_use(self) -> bool:
        """Return whether the node is of the configuration, or has requests or contexts here or at other gateways."""
        lines = self.interactive.present + self.batch.present
        return not self.is_tenant or lines > 0 or any(self.used) or self.is_limited

    def available(self, resource: int) -> float:
        """Return how much more of a resource the node may use now; inf if nothing bounds it."""
        parent = self.parent
        if parent is None:
            # The engines' ledgers know how full the engines are. The tree only protects what is kept but unused.
            is_kept = self.filled[resource] > self.used[resource] > 0.0
            return self.kept[resource] - self.filled[resource] if is_kept else inf
        unused = self.reserved[resource] - self.filled[resource]
        below = self.most[resource] - self.used[resource] if self.used[resource] else inf
        return min(below, unused + parent.available(resource))

    def here(self, resource: int) -> float:
        """Return the usage at this gateway."""
        return self.used[resource] - self.elsewhere[resource]

    def use(self, resource: int, amount: float, *, is_elsewhere: bool = False) -> None:
        """Add to the usage of this node and its ancestors (subtract if negative). O(depth)."""
        node: Node | None = self
        more = amount
        while node is not None:
            node.used[resource] += amount
            if is_elsewhere:
                node.elsewhere[resource] += amount
            filled = node.filled[resource] = node.filled[resource] + more
            before = node.reserved[resource]
            reserved = node.reserved[resource] = max(node.kept[resource], filled)
            more = reserved - before
            node = node.parent

    def size(self, resource: int, capacity: float, sharers: int) -> None:
        """Set ceiling and kept part for this capacity of the pool (inf if unknown). Each of `sharers` gateways gets an
        equal part.
        """
        running_max = self.running_max if resource == SEQUENCES else inf
        self.most[resource] = min(running_max, self.ceiling_share * capacity) / sharers
        self.kept[resource] = self.kept_share * capacity / sharers if capacity < inf else 0.0
        self.use(resource, 0.0)  # what is reserved may have changed
