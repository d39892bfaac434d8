"""The tree of one pool: what part of the pool is each tenant entitled to now, and may its groups run more?

Groups form a tree, and tenant nodes are its leaves: one for a tenant's interactive work, and one for its batch work. A
tenant node is present while a request of it waits or runs. Unused parts go to the siblings, at every level
(`tree.node`). A tenant keeps its part of the contexts while one of its contexts counts.

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

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Final

from policies.request import BATCH, Request, is_batch, payer
from policies.tree.node import (
    BATCH_CONTEXTS,
    CONTEXTS,
    PRESENT,
    RESOURCES,
    RUNNING,
    SEQUENCES,
    TOKENS,
    WEIGHT,
    ClassLine,
    Node,
    NodeUsage,
)  # fmt: skip
from policies.tree.terms import ROOT, GroupSettings, Tree

IDLE_MAX: Final = 1_000
"""Idle tenants kept in memory, beside as many as the tenants in use: most come back, and a new node costs as much as
all other work of the tree for a request."""
ROUNDING: Final = 1e-6
"""Tolerance of comparisons, since parts of a pool are not whole numbers."""


class PoolTree:
    """The tree of one pool, with its present tenant nodes and their usage."""

    def __init__(self, terms: Tree | None = None) -> None:
        self._capacity = (inf, inf)
        self.sharers = 1
        """Gateways that each keep to an equal part of every limit: more than 1 while their usage is unknown."""
        self._build(terms if terms is not None else Tree())

    def _build(self, terms: Tree) -> None:
        """Build the tree of these terms, without tenants in use."""
        self.terms = terms
        self.is_flat = not terms.groups and not terms.tenants
        """True without groups and terms: each tenant has its configured weight."""
        self.pool = Node(ROOT, None, GroupSettings(), 1.0)
        """The root."""
        self.nodes: dict[str, Node] = {ROOT: self.pool}
        """The pool, its groups, and tenants: those in use (`Node.is_in_use`), and some idle ones. The name of a group
        begins with a space, which no tenant's name does."""
        self._nodes_max = IDLE_MAX
        """Number of nodes at which the idle tenants are dropped."""
        self._elsewhere: dict[tuple[str, int], float] = {}
        """Sums of the rows that the other gateways report, by node and resource."""
        floors = terms.floors()
        for name, place in terms.groups.items():
            self.nodes[f" {name}"] = Node(f" {name}", self._group_node(place.group), place.settings, floors[name])
        for node in [self._new_node(name) for name in terms.tenants]:
            if node.is_limited:
                self.nodes[node.name] = node
        self.limited = [node for node in self.nodes.values() if node.is_limited]
        """Nodes with limits, groups before tenants, and outer groups before inner ones."""
        self._set_limits()

    # --- questions ---

    def weight(self, leaf: str, weight: float) -> float:
        """Return the present weight of a tenant node. `weight`: the configured one of its key or tenant."""
        if self.is_flat:
            return weight
        root = self.pool.batch if is_batch(leaf) else self.pool.interactive
        return self._line(leaf).share_at(weight) * (root.weights or 1.0)

    def part(self, request: Request) -> float:
        """Return the part of the pool's contexts that the request's tenant is entitled to, as if it had some."""
        return self._node_of(request).contexts.share_at(request.configured_weight)

    def context_tokens_per_part(self, leaf: str) -> float:
        """Return the tokens of the contexts of a tenant node, divided by the part that its tenant is entitled to."""
        return self.context_tokens(leaf) / self._node(payer(leaf)).contexts.share()

    def alone_and_flooding(self, request: Request) -> tuple[bool, bool]:
        """Return whether a queued request is alone, and whether its tenant node floods the pool.

        Alone: it is all that its tenant has at the pool; never batch work. Flooding: more of the node is queued than
        its part of the sequences that run.
        """
        node: Node = request.progress.node
        line = node.batch if request.is_batch else node.interactive
        is_alone = not request.is_batch and node.used[SEQUENCES] + line.queued <= request.sequences
        return is_alone, line.queued > line.share() * self.pool.used[SEQUENCES] + ROUNDING

    def configured_weight(self, leaf: str, weight: float) -> float:
        """Return the configured weight of a tenant node; `weight` if the node is not present."""
        line = self._line(leaf)
        return line.weight if line.present else weight

    def numbers(self, leaf: str) -> dict[str, float]:
        """Return the part of the pool in per cent, and the configured weight if the tenant node has requests."""
        line = self._line(leaf)
        return {"part_percent": round(100 * line.share(), 2)} | ({"weight": line.weight} if line.present else {})

    def share(self, leaf: str, weight: float) -> float:
        """Return the part of the pool that this tenant node is entitled to while it has requests.

        `weight`: the configured one of its tenant.
        """
        return self._line(leaf).share_at(weight)

    def full_node_for(self, request: Request) -> Node | None:
        """Return the full node that keeps this request from starting, or None.

        If all that is free is kept for others, the node is the request's own tenant.
        """
        found = self._full_resource(request) if self.limited else None
        return None if found is None else found[0]

    def ceiling_in_words(self, request: Request) -> str:
        """Return a sentence on the full group or tenant that keeps this request from starting; "" if there is none."""
        found = self._full_resource(request) if self.limited else None
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
        tenant = self._node_of(request)
        for resource, amount in ((SEQUENCES, request.sequences), (TOKENS, request.prompt_tokens)):
            if amount <= tenant.available(resource) + ROUNDING:
                continue
            for node in self._path(tenant):
                if node.used[resource] and amount > node.most[resource] - node.used[resource]:
                    return node, resource, True
            return tenant, resource, False
        return None

    def makes_room(self, running: Request, waiting: Request) -> bool:
        """Return whether the end of a running request makes room for a request that a full node keeps from starting.

        If the node is at its ceiling, each request below the node makes room. If the free room is kept for others, each
        request makes room that runs below no node with a kept part.
        """
        full = self._full_resource(waiting)
        return full is not None and self._frees(running, full)

    def _frees(self, running: Request, full: tuple[Node, int, bool]) -> bool:
        path = self._path(self._node_of(running))
        return full[0] in path if full[2] else not any([each.kept_share for each in path])

    def fits_without(self, waiting: Request, running: Iterable[tuple[Request, int]]) -> bool:
        """Return whether a request that a full node keeps from starting has room there after the end of others.

        `running`: the others, with the KV tokens held.
        """
        full = self._full_resource(waiting)
        if full is None:
            return True
        node, resource, is_at_ceiling = full
        freed = sum([(one.sequences, tokens)[resource] for one, tokens in running if self._frees(one, full)])
        free = node.most[resource] - node.used[resource] if is_at_ceiling else node.available(resource)
        needed = (waiting.sequences, waiting.prompt_tokens)[resource]
        return needed <= free + freed + ROUNDING or (is_at_ceiling and freed >= node.used[resource])

    @staticmethod
    def _path(node: Node | None) -> list[Node]:
        found: list[Node] = []
        while node is not None:
            found.append(node)
            node = node.parent
        return found

    def running(self, name: str) -> int:
        """Return the running sequences of a node at all gateways, by its name; 0 if the node is unknown."""
        node = self.nodes.get(name)
        return 0 if node is None else int(node.used[SEQUENCES])

    def context_tokens(self, leaf: str) -> float:
        """Return the KV tokens that the tenant node's open interactions count in the working set, at all gateways."""
        node = self.nodes.get(payer(leaf))
        return 0.0 if node is None else node.used[_context_resource(leaf)]

    def context_tokens_here(self) -> dict[str, int]:
        """Return the tokens of the contexts of each tenant node at this gateway."""
        return {leaf: int(tokens) for leaf, node in self._leaves() if (tokens := node.here(_context_resource(leaf)))}

    def report(self, rows_max: int) -> list[NodeUsage]:
        """Return the rows for other gateways: usage, presence, and weights other than 1.

        The `rows_max` tenants with most usage of a resource have rows of their own; the usage of the others is added to
        their groups. At most `rows_max` tenant nodes are reported as present.
        """
        rows: list[NodeUsage] = []
        for resource in RESOURCES:
            amounts: dict[str, float] = {}
            tenants = [(-amount, node.name, node) for node in self._tenants() if (amount := node.here(resource))]
            for place, (less, _, node) in enumerate(sorted(tenants)):
                name = (node if place < rows_max else node.parent or node).name
                amounts[name] = amounts.get(name, 0.0) - less
            rows += [NodeUsage(name, resource, amount) for name, amount in amounts.items()]
        lines = [(leaf, node.line(is_batch=is_batch(leaf))) for leaf, node in self._leaves()]
        present = [one for one in lines if one[1].present > ((one[0], PRESENT) in self._elsewhere)][:rows_max]
        weights = [NodeUsage(leaf, WEIGHT, line.weight) for leaf, line in present if line.weight != 1.0]
        return [*rows, *[NodeUsage(leaf, PRESENT, 1) for leaf, _ in present], *weights]

    # --- events ---

    def sized(self, slots: float, kv_tokens: float) -> None:
        """Set the capacity of the pool; inf if it is unknown."""
        if (slots, kv_tokens) != self._capacity:
            self._capacity = slots, kv_tokens
            self._set_limits()

    def _set_limits(self) -> None:
        """Set the limits of the nodes, which are parts of the capacity."""
        for resource in RUNNING:
            for node in self.limited:
                node.size(resource, self._capacity[resource], self.sharers)
            self.pool.kept[resource] = self._capacity[resource]

    def arrived(self, request: Request, weight: float) -> None:
        """Count a queued request as present. `weight`: the configured one of its key or tenant."""
        tenant, is_batch = request.flow.tenant, request.is_batch
        node = self._remember(payer(tenant) if is_batch else tenant)
        request.progress.node, line = node, node.batch if is_batch else node.interactive
        if line.weight != weight or node.contexts.weight != weight:
            node.reweigh(weight, is_batch=is_batch)
        node.add(is_batch=is_batch)
        line.queued += request.sequences

    def left(self, request: Request) -> None:
        """Remove a queued request, or one that ran and has ended."""
        node: Node = request.progress.node
        request.progress.node = None
        (node.batch if request.is_batch else node.interactive).queued -= request.sequences
        node.remove(is_batch=request.is_batch)

    def run(self, request: Request, sequences: int, tokens: int) -> None:
        """Count sequences and KV tokens of a queued request as running, or as queued again if negative."""
        node: Node = request.progress.node
        (node.batch if request.is_batch else node.interactive).queued -= sequences
        node.use(SEQUENCES, sequences)
        if self.limited:
            node.use(TOKENS, tokens)

    def grew(self, request: Request, tokens: int) -> None:
        """Add to the KV tokens of a running request."""
        if self.limited:
            self._node_of(request).use(TOKENS, tokens)

    def hold(self, leaf: str, tokens: int) -> None:
        """Add to the contexts of a tenant node at this gateway (subtract if negative)."""
        tenant = payer(leaf)
        self._add_usage(self._remember(tenant), CONTEXTS if tenant == leaf else BATCH_CONTEXTS, tokens)

    def set_elsewhere(self, rows: Sequence[NodeUsage], sharers: int = 1) -> None:
        """Replace the sums of the rows that other gateways report (`report`)."""
        self._apply_elsewhere({(row.node, row.resource): row.amount for row in rows})
        if sharers != self.sharers:
            self.sharers = sharers
            self._set_limits()

    def _apply_elsewhere(self, now: dict[tuple[str, int], float]) -> None:
        """Replace the usage and the presence of nodes at other gateways."""
        before, self._elsewhere = self._elsewhere, now
        for of in before | now:
            more, (name, resource) = now.get(of, 0.0) - before.get(of, 0.0), of
            if more and resource in RESOURCES:
                self._add_usage(self._node_of_row(name), resource, more, is_elsewhere=True)
            elif resource == PRESENT and (of in now) != (of in before):
                node, is_of_batch = self._remember(payer(name)), is_batch(name)
                if of in before:
                    node.remove(is_batch=is_of_batch)
                    continue
                if not node.line(is_batch=is_of_batch).present:
                    # The weights that several gateways report are added, too.
                    node.reweigh(now.get((name, WEIGHT), now[of]) / now[of], is_batch=is_of_batch)
                node.add(is_batch=is_of_batch)

    def reweigh(self, weights: Mapping[str, float]) -> None:
        """Replace the weights of these tenant nodes. Nodes that are not remembered are skipped."""
        for leaf, weight in weights.items():
            node = self.nodes.get(payer(leaf))
            if node is not None:
                node.reweigh(weight, is_batch=is_batch(leaf))

    def regroup(self, terms: Tree, waiting: Sequence[Request], running: Iterable[tuple[Request, int]]) -> None:
        """Replace the terms, and count all waiting and running requests anew. `running`: with the KV tokens held.

        A tenant between two calls keeps its configured weight.
        """
        contexts, elsewhere = self.context_tokens_here(), self._elsewhere
        weights = {node.name: node.contexts.weight for node in self._tenants() if node.contexts.present}
        self._build(terms)
        self._apply_elsewhere(elsewhere)
        for leaf, tokens in contexts.items():
            self.hold(leaf, tokens)
        self.reweigh(weights)
        for request, tokens in running:
            self.arrived(request, request.configured_weight)
            self.run(request, request.sequences, tokens)
        for request in waiting:
            self.arrived(request, request.configured_weight)

    # --- the nodes ---

    def _tenants(self) -> list[Node]:
        """Return the nodes of tenants, idle ones too."""
        return [node for node in self.nodes.values() if node.is_tenant]

    def _leaves(self) -> list[tuple[str, Node]]:
        """Return the names of the two leaves of each tenant, interactive and batch, each with the tenant's node."""
        return [(leaf, node) for node in self._tenants() for leaf in (node.name, f"{node.name}{BATCH}")]

    def _group_node(self, name: str) -> Node:
        """Return the node of a group, or the root for no group."""
        return self.nodes[f" {name}" if name else ROOT]

    def _node(self, tenant: str) -> Node:
        """Return the tenant's node, or a new one that is not kept."""
        node = self.nodes.get(tenant)
        return node if node is not None else self._new_node(tenant)

    def _node_of(self, request: Request) -> Node:
        """Return the node of the tenant that pays for a request, which a present request knows."""
        node: Node | None = request.progress.node
        return node if node is not None else self._node(payer(request.flow.tenant))

    def _new_node(self, tenant: str) -> Node:
        """Create the node of a tenant below its group."""
        place = self.terms.tenants.get(tenant)
        if place is None:
            return Node(tenant, self.pool, GroupSettings(), 0.0)
        return Node(tenant, self._group_node(place.group), place.settings, place.settings.guaranteed_share or 0.0)

    def _remember(self, tenant: str) -> Node:
        """Get or create the tenant's node, and keep it in the tree."""
        node = self.nodes.get(tenant)
        if node is None:
            if len(self.nodes) >= self._nodes_max:
                self.nodes = {name: each for name, each in self.nodes.items() if each.is_in_use}
                self._nodes_max = 2 * len(self.nodes) + IDLE_MAX
            node = self.nodes[tenant] = self._new_node(tenant)
        return node

    def _node_of_row(self, name: str) -> Node:
        """Return the node that a row names. Usage of groups that are unknown here counts for the pool."""
        return self.nodes.get(name, self.pool) if name[:1] in ("", " ") else self._remember(name)

    def _line(self, leaf: str) -> ClassLine:
        """Return the line of a tenant node."""
        return self._node(payer(leaf)).line(is_batch=is_batch(leaf))

    def _add_usage(self, node: Node, resource: int, amount: float, *, is_elsewhere: bool = False) -> None:
        """Add to the usage of a node. A tenant with contexts is present among those that share them.

        A group is present by its tenants alone: contexts that other gateways report of the group itself add none.
        """
        had_some = node.used[resource] > 0.0
        node.use(resource, amount, is_elsewhere=is_elsewhere)
        if resource == CONTEXTS and had_some != (node.used[resource] > 0.0) and node.is_tenant:
            if had_some:
                node.contexts.remove()
            else:
                node.contexts.add()


def _context_resource(leaf: str) -> int:
    """Return the resource that counts the context tokens of a tenant node."""
    return BATCH_CONTEXTS if is_batch(leaf) else CONTEXTS
