"""The part of each pool that every group and tenant has if all of them ask for more than they get."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gateway.config.model import Config
from gateway.config.section import filled
from gateway.config.sections.groups import GroupConfig, TreeNodeConfig
from policies.limits.quotas import GROUP
from policies.request import Flow, Request
from policies.tree.pool_tree import PoolTree
from policies.tree.terms import GroupSettings


class PoolPart(NamedTuple):
    """Part, floor and ceiling of a group or tenant, as fractions of a whole pool."""

    part: float
    """Part while exactly the tenants of the config have requests waiting."""
    floor: float
    ceiling: float


def parts_of(config: Config) -> dict[str, PoolPart]:
    """Return the parts by the names of tenants, and of groups as limits name them."""
    tree = PoolTree(config.tree)
    for tenant in config.tenants:
        tree.arrived(Request("", Flow(tenant.name), tenant.weight, 1, 1, 0.0), tenant.weight)
    whole = sum([tenant.weight for tenant in config.tenants])
    found = dict.fromkeys([GROUP + group.name for group in config.groups], 0.0)
    around = config.around
    for tenant in config.tenants:
        found[tenant.name] = tenant.weight / whole if tree.is_flat else tree.share(tenant.name, tenant.weight)
        for group in around[tenant.name]:
            found[GROUP + group] += found[tenant.name]
    sections: dict[str, TreeNodeConfig] = {GROUP + group.name: group for group in config.groups}
    sections |= {tenant.name: tenant for tenant in config.tenants}
    terms = {name: filled(GroupSettings, section) for name, section in sections.items()}
    return {
        name: PoolPart(found[name], of.guaranteed_share or 0.0, min(1.0, of.ceiling_share))
        for name, of in terms.items()
    }


def tree_lines(config: Config) -> Iterator[str]:
    """Yield the tree of groups and tenants, one line each, with parts and limits."""
    parts = parts_of(config)
    inside: dict[str, list[TreeNodeConfig]] = {}
    for section in (*config.groups, *config.tenants):
        inside.setdefault(section.group or "", []).append(section)

    def lines(group: str, depth: int) -> Iterator[str]:
        for one in inside.get(group, ()):
            is_group = isinstance(one, GroupConfig)
            part = parts[GROUP + one.name if is_group else one.name]
            words = [f"{part.part:7.1%}", f"weight {one.weight:g}"]
            words += [f"at least {part.floor:.0%}"] if part.floor else []
            words += [f"at most {part.ceiling:.0%}"] if part.ceiling < 1 else []
            yield f"{'  ' * depth}{one.name}{'/' if is_group else ''}".ljust(40) + " " + "  ".join(words)
            if is_group:
                yield from lines(one.name, depth + 1)

    yield "if all ask for more".ljust(40) + "    part"
    yield from lines("", 0)
