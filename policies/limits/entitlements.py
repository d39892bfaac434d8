"""What part of a pool is each tenant entitled to now, and may its groups have more running?

Groups stand in a tree, and tenants are its leaves. A leaf is present while a request of it waits or runs. The pool is
divided from the root down among the children that have a present leaf: a child gets its part by weight, but at least
its guaranteed share. The others divide the rest by weight. So what nobody uses goes to the siblings, at every level.

The part of a leaf is expressed as a weight: its part times the weights of the present children of the root. A tenant
without groups and floors has the weight that is configured. The order charges service per weight, so every order that
compares tenants follows the tree without knowing it. A request is charged by the weight that its leaf has when the
request is dispatched.

Theorem (floor). Let the floors be feasible: those of the children of a node are in sum at most the node's own, and 1 at
the root. Let a leaf wait over an interval in which the pool serves S. Then the leaf receives at least g S - C, where g
is its floor, and C is what is dispatched at once and the bound of the order (`orders.vtc`), for each leaf that is
present in the interval. Proof sketch: let V be the least waiting counter. The parts of present leaves sum to 1. A leaf
that is present receives at most its part of the growth of V, and once what it may be ahead by; so S is at most the
growth of V and the sum of these leads. The waiting leaf has a part of at least g throughout, by induction along its
path, and its counter keeps up with V. The same holds for a group with g the floor of the group, by summing over its
leaves. A leaf that was not present is lifted to V, so absence banks no credit. Where floors are all of a node, its
other children have a hundredth of it (`LEAST_PART`), and a floor is g / 1.01.

Work that can wait (class batch) has leaves of its own, in a tree of the same groups without floors. How much of the
pool it gets beside other work is decided by the backlog (`queue.backlog`).

Ceilings count what runs, of both classes together: the larger part of the pool's sequence slots and of its KV cache. A
group or tenant at its ceiling is passed over until one of its requests ends. What a floor does not lend is kept free of
others in the same way (`lending_limit`, as in Kueue).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final

from policies.request import Request, is_batch, payer
from policies.settings import Contradiction, check_bounds, setting

ROOT: Final = ""
"""No group: the pool itself."""
LEAST_PART: Final = 0.01
"""Of a group, for its children without a floor: where floors are all of it, they would wait for ever."""
PRESENT: Final = "\x1c"
SEQUENCES: Final = "\x1d"
TOKENS: Final = "\x1e"
KEPT: Final = "\x1f"
"""With these begin the names of what gateways report to each other. No tenant's name has them."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """What is a group, or a tenant, entitled to among its siblings? Shares are parts of a whole pool."""

    weight: float = setting(1.0, "Share relative to its siblings that have requests.", above=0, most=1000)
    guaranteed_share: float | None = setting(
        None, "Part of the pool that it has whenever it has requests, however many others there are.",
        kind=float, above=0, most=1,
    )  # fmt: skip
    max_share: float | None = setting(
        None, "Part of the pool that its running requests take at most, also where nobody else wants it.",
        kind=float, above=0, most=1,
    )  # fmt: skip
    max_running: int | None = setting(
        None, "Sequences of it that run at once in a pool, at most.", kind=int, least=1, most=1_000_000
    )
    lending_limit: float | None = setting(
        None, "How much of guaranteed_share others may use while it has no requests for it. Default: all of it.",
        kind=float, least=0, most=1,
    )  # fmt: skip
    borrowing_limit: float | None = setting(
        None, "How much it may have beyond guaranteed_share. Default: whatever is free.", kind=float, least=0, most=1
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        for name in ("lending_limit", "borrowing_limit"):
            if getattr(self, name) is not None and self.guaranteed_share is None:
                raise Contradiction(name, f"{name} needs a guaranteed_share: it says what becomes of that")
        if (self.lending_limit or 0.0) > (self.guaranteed_share or 0.0):
            raise Contradiction("lending_limit", "more is lent than guaranteed_share has")
        if (self.guaranteed_share or 0.0) > (self.max_share or 1.0):
            raise Contradiction("max_share", "is less than guaranteed_share: the floor is above the ceiling")

    @property
    def share_max(self) -> float:
        """The part of the pool that it may take; inf: all."""
        borrowed = inf if self.borrowing_limit is None else (self.guaranteed_share or 0.0) + self.borrowing_limit
        return min(inf if self.max_share is None else self.max_share, borrowed)

    @property
    def kept_share(self) -> float:
        """The part of the pool that is kept for it."""
        return 0.0 if self.lending_limit is None else (self.guaranteed_share or 0.0) - self.lending_limit


@dataclass(frozen=True, slots=True)
class Placing:
    """Where does a group or tenant stand, and on what terms? `group`: the group it is in, or `ROOT`."""

    group: str
    settings: GroupSettings


@dataclass(frozen=True, slots=True)
class Tree:
    """Groups by name, each after the group that it is in, and the tenants that are in one or have terms."""

    groups: Mapping[str, Placing] = field(default_factory=dict)
    tenants: Mapping[str, Placing] = field(default_factory=dict)

    def floors(self) -> dict[str, float]:
        """The floor of each group: its own, or what those in it are guaranteed together."""
        inside = dict.fromkeys(self.groups, 0.0) | {ROOT: 0.0}
        for place in self.tenants.values():
            inside[place.group] += place.settings.guaranteed_share or 0.0
        for name, place in reversed([*self.groups.items()]):
            inside[name] = max(inside[name], place.settings.guaranteed_share or 0.0)
            inside[place.group] += inside[name]
        return inside


class Ceiling:
    """What does a group or tenant have running in this pool, and how much may it have? Compared by identity."""

    __slots__ = ("elsewhere", "held_tokens", "kept_share", "name", "running", "running_max", "share_max")

    def __init__(self, name: str, settings: GroupSettings) -> None:
        self.name = name
        self.running_max = inf if settings.max_running is None else float(settings.max_running)
        self.share_max = settings.share_max
        self.kept_share = settings.kept_share
        self.running = 0
        """Sequences."""
        self.held_tokens = 0
        self.elsewhere = (0, 0)
        """Sequences and KV tokens at other gateways."""

    def is_reached(self, more: int, slots: float, kv_tokens: float) -> bool:
        """Would so many more sequences be too many? A request of a group with nothing running may always start."""
        running = self.running + self.elsewhere[0]
        return running > 0 and (
            running + more > self.running_max or self.share(slots, kv_tokens, more) > self.share_max
        )

    def share(self, slots: float, kv_tokens: float, more: int = 0) -> float:
        """The part of the pool that it has, with so many more sequences of its usual size."""
        running, held_tokens = self.running + self.elsewhere[0], self.held_tokens + self.elsewhere[1]
        more_tokens = more * held_tokens / running if running else 0.0
        return max((running + more) / slots, (held_tokens + more_tokens) / kv_tokens)


class Node:
    """A node of the tree: a group, or a present leaf."""

    __slots__ = ("floor", "floored", "parent", "present", "weight", "weights")

    def __init__(self, parent: Node | None, weight: float, floor: float) -> None:
        self.parent = parent
        self.weight = weight
        self.floor = floor
        self.present = 0
        """Present children; of a leaf: requests queued or running, and gateways where it has some."""
        self.weights = 0.0
        """Sum over the present children."""
        self.floored: dict[Node, None] = {}
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


def _floor_per_weight(node: Node) -> float:
    return node.floor / node.weight


class Entitlements:
    """The tree of one pool, with what is present and what runs."""

    def __init__(self, tree: Tree | None = None) -> None:
        self.tree = tree if tree is not None else Tree()
        self.is_flat: Final = not self.tree.groups and not self.tree.tenants
        """Each tenant's weight is what is configured, so that no event needs to be known."""
        self._groups: dict[str, Node] = {ROOT: Node(None, 1.0, 1.0)}
        self._batch_groups: dict[str, Node] = {ROOT: Node(None, 1.0, 1.0)}
        self._leaves: dict[str, Node] = {}
        """Present leaves."""
        self._ceilings: dict[str, Ceiling] = {}
        """Of groups and tenants that have one; groups by their name after a space, so that none is a tenant's."""
        self._keeping: dict[Ceiling, Ceiling | None] = {}
        """Those for which something is kept free, each with the next one around it."""
        self._pool = Ceiling("", GroupSettings())
        self._slots = self._kv_tokens = inf
        self._elsewhere: set[str] = set()
        floors = self.tree.floors()
        for name, place in self.tree.groups.items():
            self._groups[name] = Node(self._groups[place.group], place.settings.weight, floors[name])
            self._batch_groups[name] = Node(self._batch_groups[place.group], place.settings.weight, 0.0)
            self._limit(f" {name}", place)
        for name, place in self.tree.tenants.items():
            self._limit(name, place)

    def _limit(self, name: str, place: Placing) -> None:
        ceiling = Ceiling(name, place.settings)
        if ceiling.kept_share:
            self._keeping[ceiling] = next((each for each in self._around(place) if each.kept_share), None)
        if ceiling.kept_share or min(ceiling.running_max, ceiling.share_max) < inf:
            self._ceilings[name] = ceiling

    # --- questions ---

    def weight(self, leaf: str, weight: float) -> float:
        """What does this leaf weigh now? `weight`: as configured for its key or tenant."""
        if self.is_flat:
            return weight
        node = self._leaves.get(leaf)
        if node is None:
            node = self._new(leaf, weight)
        root = self._batch_groups[ROOT] if is_batch(leaf) else self._groups[ROOT]
        return node.share() * (root.weights or 1.0)

    def configured_weight(self, leaf: str, weight: float) -> float:
        """The weight of its key or tenant, which a request with this weight has."""
        node = self._leaves.get(leaf)
        return node.weight if node is not None else weight

    def share(self, leaf: str) -> float:
        """The part of the pool that this leaf is entitled to, if it has requests."""
        node = self._leaves.get(leaf)
        return (node if node is not None else self._new(leaf, 1.0)).share()

    def at_ceiling(self, request: Request) -> str | None:
        """Which group or tenant has as much running as it may, so that this request does not start? None: none."""
        if not self._ceilings:
            return None
        tenant = payer(request.flow.tenant)
        for ceiling in self._ceilings_of(tenant):
            if ceiling.is_reached(request.sequences, self._slots, self._kv_tokens):
                return ceiling.name
        return KEPT + tenant if self._is_kept_from(tenant, request.sequences) else None

    def _is_kept_from(self, tenant: str, sequences: int) -> bool:
        """Is what the pool has free kept for others than this tenant?"""
        if not self._keeping or not self._pool.running:
            return False
        own = self._ceilings_of(tenant)
        kept = sum(
            [
                max(0.0, each.kept_share - each.share(self._slots, self._kv_tokens))
                for each, outer in self._keeping.items()
                if each not in own and (outer is None or outer in own)
            ]
        )
        return kept > 0.0 and self._pool.share(self._slots, self._kv_tokens, sequences) > 1.0 - kept

    def report(self) -> list[tuple[str, int]]:
        """What must other gateways know: which leaves are present here, and what runs below each ceiling?"""
        if self.is_flat:
            return []
        found = [
            (f"{PRESENT}{leaf}{PRESENT}{node.weight}", 1)
            for leaf, node in self._leaves.items()
            if leaf not in self._elsewhere or node.present > 1
        ]
        for one in self._ceilings.values():
            if one.running:
                found += [(SEQUENCES + one.name, one.running), (TOKENS + one.name, one.held_tokens)]
        return found

    # --- events ---

    def recount(self, waiting: Iterable[Request], running: Iterable[tuple[Request, int]]) -> None:
        """Count anew, from what waits, and from what runs with the KV tokens that it holds."""
        weights = {leaf: node.weight for leaf, node in self._leaves.items()}
        for leaf, node in [*self._leaves.items()]:
            node.present = 1
            self._remove(leaf)
        elsewhere, self._elsewhere = self._elsewhere, set()
        for leaf in elsewhere:
            self._leaves[leaf] = self._new(leaf, weights[leaf])
            self._leaves[leaf].add()
        self._elsewhere = elsewhere
        for ceiling in (self._pool, *self._ceilings.values()):
            ceiling.running = ceiling.held_tokens = 0
        for request in waiting:
            self.arrived(request, weights.get(request.flow.tenant, request.weight))
        for request, held_tokens in running:
            self.arrived(request, weights.get(request.flow.tenant, request.weight))
            self.dispatched(request, held_tokens)

    def sized(self, slots: int, kv_tokens: int) -> None:
        """The pool runs so many sequences, and holds so many KV tokens; 0: that is not known."""
        self._slots, self._kv_tokens = slots or inf, kv_tokens or inf

    def arrived(self, request: Request, weight: float) -> None:
        """A request waits."""
        if not self.is_flat:
            leaf = request.flow.tenant
            node = self._leaves.get(leaf)
            if node is None:
                node = self._leaves[leaf] = self._new(leaf, weight)
            node.add()

    def left(self, request: Request) -> None:
        """A request that waited, or ran, is there no more."""
        if not self.is_flat:
            self._remove(request.flow.tenant)

    def _remove(self, leaf: str) -> None:
        node = self._leaves[leaf]
        node.remove()
        if not node.present:
            del self._leaves[leaf]

    def dispatched(self, request: Request, held_tokens: int) -> None:
        """A request runs, and holds so many KV tokens."""
        self.grew(request, held_tokens, request.sequences)

    def ended(self, request: Request, held_tokens: int) -> None:
        """A request that ran holds nothing any more."""
        self.grew(request, -held_tokens, -request.sequences)

    def grew(self, request: Request, tokens: int, sequences: int = 0) -> None:
        """A request that runs holds so many more KV tokens."""
        if self._ceilings:
            for ceiling in (self._pool, *self._ceilings_of(payer(request.flow.tenant))):
                ceiling.running += sequences
                ceiling.held_tokens += tokens

    def set_elsewhere(self, reported: Mapping[str, int]) -> None:
        """Other gateways together report this (`report`)."""
        if self.is_flat:
            return
        present = dict(name[1:].split(PRESENT) for name in reported if name[:1] == PRESENT)
        for leaf in present.keys() - self._elsewhere:
            node = self._leaves.get(leaf)
            if node is None:
                node = self._leaves[leaf] = self._new(leaf, float(present[leaf]))
            node.add()
        for leaf in self._elsewhere - present.keys():
            self._remove(leaf)
        self._elsewhere = set(present)
        for name, ceiling in self._ceilings.items():
            ceiling.elsewhere = reported.get(SEQUENCES + name, 0), reported.get(TOKENS + name, 0)

    def reweigh(self, weights: Mapping[str, float]) -> None:
        """These tenants have these weights from now on."""
        for name, weight in weights.items():
            node = self._leaves.get(name)
            if node is not None and node.parent is not None:
                node.parent.weights += weight - node.weight
                node.weight = weight

    # --- the tree ---

    def _new(self, leaf: str, weight: float) -> Node:
        place = self.tree.tenants.get(payer(leaf))
        group = place.group if place is not None else ROOT
        if is_batch(leaf):
            return Node(self._batch_groups[group], weight, 0.0)
        floor = place.settings.guaranteed_share if place is not None else None
        return Node(self._groups[group], weight, floor or 0.0)

    def _ceilings_of(self, tenant: str) -> list[Ceiling]:
        """Those of the tenant, and of the groups that it is in."""
        found = [self._ceilings[tenant]] if tenant in self._ceilings else []
        place = self.tree.tenants.get(tenant)
        return found if place is None else [*found, *self._around(place)]

    def _around(self, place: Placing) -> list[Ceiling]:
        """Those of the groups around this place, the innermost first."""
        found: list[Ceiling] = []
        while place.group:
            ceiling = self._ceilings.get(f" {place.group}")
            if ceiling is not None:
                found.append(ceiling)
            place = self.tree.groups[place.group]
        return found
