"""The tree of one pool: what part of the pool is each tenant entitled to now, and may its groups run more?

Groups form a tree, and tenant nodes are its leaves: one for a tenant's interactive work, and one for its batch work. A
tenant node is present while a request of it waits or runs. Unused parts go to the siblings, at every level
(`tree.node`).

The part of a tenant node is expressed as a weight: its part times the weights of the present children of the root. A
tenant without groups and floors has its configured weight. The order charges service per weight, so every order that
compares tenants follows the tree without knowing it. A request is charged by the weight of its tenant node at dispatch.

Theorem (floor). Let the floors be feasible: those of the children of a node sum to at most the node's own, and 1 at the
root. Let a tenant node wait over an interval in which the pool serves S. Then the node receives at least g S - C, where
g is its floor, and C is the burst that is dispatched at once plus the bound of the order (`orders.vtc`), for each
tenant node that is present in the interval. Proof sketch: let V be the least waiting counter. The parts of present
tenant nodes sum to 1. A present node receives at most its part of the growth of V, and once its possible lead; so S is
at most the growth of V and the sum of these leads. The waiting node has a part of at least g throughout, by induction
along its path, and its counter keeps up with V. For a group, g is the floor of the group, by summing over its tenant
nodes. A node that was not present is lifted to V, so absence banks no credit. Where the floors take all of a node, its
other children have a hundredth of it (`LEAST_PART`), and a floor is g / 1.01.

The backlog (`queue.backlog`) decides how much of the pool batch work gets beside interactive work. Ceilings count the
running requests of both classes together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import Final

from policies.request import BATCH, Request, is_batch, payer
from policies.tree.node import RESOURCES, SEQUENCES, TOKENS, ClassLine, Node
from policies.tree.terms import ROOT, GroupSettings, Tree

ROUNDING: Final = 1e-6
"""Tolerance of comparisons, since parts of a pool are not whole numbers."""
PRESENT: Final = "\x1c"
OF_RESOURCE: Final = ("\x1d", "\x1e")
"""Prefixes of the names that gateways report to each other. No tenant's name contains them."""


class PoolTree:
    """The tree of one pool, with its present tenant nodes and their usage."""

    def __init__(self, terms: Tree | None = None) -> None:
        self._capacity = (inf, inf)
        self._sharers = 1
        self._begin(terms if terms is not None else Tree())

    def _begin(self, terms: Tree) -> None:
        self.terms = terms
        self.is_flat = not terms.groups and not terms.tenants
        """True without groups and terms: each tenant has its configured weight, and events change nothing."""
        self._root = Node(ROOT, None, GroupSettings(), 1.0)
        self._groups: dict[str, Node] = {ROOT: self._root}
        self._elsewhere: set[str] = set()
        """Tenant nodes that are present at other gateways."""
        floors = terms.floors()
        for name, place in terms.groups.items():
            self._groups[name] = Node(f" {name}", self._groups[place.group], place.settings, floors[name])
        own = [self._new(name) for name in terms.tenants]
        self._tenants: dict[str, Node] = {node.name: node for node in own if node.is_limited}
        """Tenants with requests, and tenants with limits."""
        self._limited = {node.name: node for node in (*self._groups.values(), *own) if node.is_limited}
        """Nodes with limits, groups before tenants, and outer groups before inner ones. The name of a group begins with
        a space, which no tenant's name does."""
        self._size()

    # --- questions ---

    def weight(self, leaf: str, weight: float) -> float:
        """Return the present weight of a tenant node. `weight`: the configured one of its key or tenant."""
        if self.is_flat:
            return weight
        line = self._line(leaf)
        if not line.present:
            line.weight = weight
        root = self._root.batch if is_batch(leaf) else self._root.others
        return line.share() * (root.weights or 1.0)

    def configured_weight(self, leaf: str, weight: float) -> float:
        """Return the configured weight of a tenant node; `weight` if the node is not present."""
        line = self._line(leaf)
        return line.weight if line.present else weight

    def numbers(self, leaf: str) -> dict[str, float]:
        """Return the part of the pool in per cent, and the configured weight if the tenant node has requests."""
        line = self._line(leaf)
        return {"part_percent": round(100 * line.share(), 2)} | ({"weight": line.weight} if line.present else {})

    def share(self, leaf: str) -> float:
        """Return the part of the pool that this tenant node is entitled to while it has requests."""
        return self._line(leaf).share()

    def full_for(self, request: Request) -> Node | None:
        """Return the full node that keeps this request from starting, or None.

        If all that is free is kept for others, the node is the request's own tenant.
        """
        found = self._full_resource(request) if self._limited else None
        return None if found is None else found[0]

    def ceiling_in_words(self, request: Request) -> str:
        """Return a sentence on the full group or tenant that keeps this request from starting; "" if there is none."""
        found = self._full_resource(request) if self._limited else None
        if found is None:
            return ""
        node, resource, is_at_ceiling = found
        if not is_at_ceiling:
            return "what is free is kept for tenants and groups with a lending_limit"
        said, capacity = node.ceiling_in_words(resource, self._capacity[resource]), self._capacity[resource]
        needs = f"; this request needs {request.prompt_tokens / capacity:.0%}" if resource == TOKENS else ""
        return said + needs

    def _full_resource(self, request: Request) -> tuple[Node, int, bool] | None:
        """Return the full node, the full resource, and whether the ceiling is reached; None if the request fits."""
        tenant = self._node(payer(request.flow.tenant))
        for resource, amount in ((SEQUENCES, request.sequences), (TOKENS, request.prompt_tokens)):
            if amount <= tenant.available(resource) + ROUNDING:
                continue
            node: Node | None = tenant
            while node is not None:
                if node.used[resource] and amount > node.most[resource] - node.used[resource]:
                    return node, resource, True
                node = node.parent
            return tenant, resource, False
        return None

    def makes_room(self, running: Request, waiting: Request) -> bool:
        """Return whether the end of a running request makes room for a request that a full node keeps from starting.

        A request below the node does if the node is at its ceiling. If the free room is kept for others, a request does
        that runs below no node with a kept part.
        """
        found = self._full_resource(waiting)
        path = self._path(self._node(payer(running.flow.tenant)))
        if found is not None and found[2]:
            return found[0] in path
        return not any([each.kept_share for each in path])

    @staticmethod
    def _path(node: Node | None) -> list[Node]:
        found: list[Node] = []
        while node is not None:
            found.append(node)
            node = node.parent
        return found

    def running(self, name: str) -> int:
        """Return the running sequences of a node at all gateways, by its name; 0 if the node is unknown."""
        node = self._limited.get(name) or self._tenants.get(name)
        return 0 if node is None else int(node.used[SEQUENCES])

    def report(self, rows_max: int) -> list[tuple[str, int]]:
        """Return the rows for other gateways: the usage of each limited node, and the tenant nodes present here."""
        usage = [
            (OF_RESOURCE[resource] + node.name, int(used))
            for node in self._limited.values()
            for resource in RESOURCES
            if (used := node.used[resource] - self._reported_elsewhere(node, resource)) > 0
        ]
        lines = [(leaf, self._line(leaf)) for name in self._tenants for leaf in (name, f"{name}{BATCH}")]
        present = [
            (f"{PRESENT}{leaf}{PRESENT}{line.weight}", 1)
            for leaf, line in lines
            if line.present > (leaf in self._elsewhere)
        ]
        return usage[:rows_max] + present[:rows_max]

    def _reported_elsewhere(self, node: Node, resource: int) -> float:
        found = 0.0
        for other in self._limited.values():
            above: Node | None = other
            while above is not None and above is not node:
                above = above.parent
            found += other.elsewhere[resource] if above is node else 0.0
        return found

    # --- events ---

    def sized(self, slots: float, kv_tokens: float) -> None:
        """Set the capacity of the pool; inf if it is unknown."""
        if (slots, kv_tokens) != self._capacity:
            self._capacity = slots, kv_tokens
            self._size()

    def _size(self) -> None:
        for resource in RESOURCES:
            for node in self._limited.values():
                node.size(resource, self._capacity[resource], self._sharers)
            self._root.kept[resource] = self._capacity[resource]

    def arrived(self, request: Request, weight: float) -> None:
        """Count a request as present. `weight`: the configured one of its key or tenant."""
        if not self.is_flat:
            line = self._line(request.flow.tenant, is_kept=True)
            if not line.present:
                line.weight = weight
            line.add()

    def left(self, request: Request) -> None:
        """Remove a request that waited or ran."""
        if not self.is_flat:
            self._remove(request.flow.tenant)

    def dispatched(self, request: Request, held_tokens: int) -> None:
        """Add the sequences and KV tokens of a dispatched request."""
        self.grew(request, held_tokens, request.sequences)

    def ended(self, request: Request, held_tokens: int) -> None:
        """Subtract the sequences and KV tokens of a request that ran."""
        self.grew(request, -held_tokens, -request.sequences)

    def grew(self, request: Request, tokens: int, sequences: int = 0) -> None:
        """Add to the usage of a running request."""
        if self._limited:
            node = self._tenants[payer(request.flow.tenant)]
            node.use(TOKENS, tokens)
            if sequences:
                node.use(SEQUENCES, sequences)

    def set_elsewhere(self, reported: Mapping[str, int], sharers: int = 1) -> None:
        """Replace the sum of the rows that other gateways report (`report`).

        `sharers`: gateways that each keep to an equal part of every limit; more than 1 while their usage is unknown.
        """
        if self.is_flat:
            return
        present = dict(name[1:].split(PRESENT) for name in reported if name[:1] == PRESENT)
        for leaf in present.keys() - self._elsewhere:
            line = self._line(leaf, is_kept=True)
            if not line.present:
                line.weight = float(present[leaf])
            line.add()
        before, self._elsewhere = self._elsewhere, set(present)
        for leaf in before - present.keys():
            self._remove(leaf)
        for resource in RESOURCES:
            # The usage of a reported node counts there, so it is subtracted from the reported node above.
            own = {node: float(reported.get(OF_RESOURCE[resource] + node.name, 0)) for node in self._limited.values()}
            for node in own:
                outer = node.parent
                while outer is not None and outer not in own:
                    outer = outer.parent
                if outer is not None:
                    own[outer] -= reported.get(OF_RESOURCE[resource] + node.name, 0)
            for node, used in own.items():
                node.use(resource, max(0.0, used) - node.elsewhere[resource])
                node.elsewhere[resource] = max(0.0, used)
        if sharers != self._sharers:
            self._sharers = sharers
            self._size()

    def reweigh(self, weights: Mapping[str, float]) -> None:
        """Replace the weights of these tenant nodes. Nodes that are not remembered are skipped."""
        for leaf, weight in weights.items():
            node = self._tenants.get(payer(leaf))
            if node is not None:
                (node.batch if is_batch(leaf) else node.others).reweigh(weight)

    def regroup(self, terms: Tree, waiting: Iterable[Request], running: Iterable[tuple[Request, int]]) -> None:
        """Replace the terms, and count all waiting and running requests anew. `running`: with the KV tokens held.

        The weights of waiting requests follow the new terms.
        """
        present = [(each, self.configured_weight(each.flow.tenant, each.weight)) for each in waiting]
        held = [(each, self.configured_weight(each.flow.tenant, each.weight), tokens) for each, tokens in running]
        self._begin(terms)
        for request, weight, tokens in held:
            self.arrived(request, weight)
            self.dispatched(request, tokens)
        for request, weight in present:
            self.arrived(request, weight)
        for request, weight in present:
            request.weight = self.weight(request.flow.tenant, weight)

    # --- the nodes ---

    def _node(self, tenant: str) -> Node:
        node = self._tenants.get(tenant)
        return node if node is not None else self._new(tenant)

    def _new(self, tenant: str) -> Node:
        place = self.terms.tenants.get(tenant)
        if place is None:
            return Node(tenant, self._root, GroupSettings(), 0.0)
        return Node(tenant, self._groups[place.group], place.settings, place.settings.guaranteed_share or 0.0)

    def _line(self, leaf: str, *, is_kept: bool = False) -> ClassLine:
        """Return the line of a tenant node. `is_kept`: remember its tenant, if it is new."""
        tenant = payer(leaf)
        node = self._node(tenant)
        if is_kept:
            self._tenants[tenant] = node
        return node.batch if is_batch(leaf) else node.others

    def _remove(self, leaf: str) -> None:
        tenant = payer(leaf)
        node = self._tenants[tenant]
        (node.batch if is_batch(leaf) else node.others).remove()
        if not node.others.present and not node.batch.present and tenant not in self._limited:
            del self._tenants[tenant]
