"""What is a group of tenants entitled to? Groups stand in groups: each group and tenant names the one that it is in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from gateway.config.checks import Name
from gateway.config.section import Section, filled, settings_from
from gateway.config.sections.throttling import ModelQuotasConfig
from policies.tree.terms import ROOT, GroupSettings, Placing, Tree

_USUAL: Final = frozenset({"name", "weight", "keys", "quota", "users"})
"""What may be set of a tenant that stands in no group and has no other terms."""
DEPTH_MAX: Final = 8
"""Groups within each other, and the tenant."""


class Grouped(Section):
    """What a group and a tenant have in common: a place in the tree."""

    name: Name
    group: Name | None = None
    """The group that it is in. Default: none, so that it shares each pool with all others that are in none."""
    quota: ModelQuotasConfig | None = None
    if TYPE_CHECKING:
        weight: float = 1.0
        """A setting of `GroupSettings`, as all others here."""


@settings_from(GroupSettings)
class GroupConfig(Grouped):
    """Tenants, or other groups, that share a part of each pool."""

    name: Name
    """What `group` names; unique among groups."""
    quota: ModelQuotasConfig | None = None
    """Limits of all tenants in it together."""


def tree_of(groups: Sequence[Grouped], tenants: Sequence[Grouped]) -> Tree:
    """The tree that these sections describe, which are free of contradictions."""
    by_name = {group.name: group for group in groups}
    placed: dict[str, Placing] = {}
    while len(placed) < len(by_name):
        for name, group in by_name.items():
            if name not in placed and (group.group is None or group.group in placed):
                placed[name] = _place(group)
    return Tree(placed, {one.name: _place(one) for one in tenants if not one.model_fields_set <= _USUAL})


def groups_around(groups: Sequence[Grouped], tenants: Sequence[Grouped]) -> dict[str, tuple[str, ...]]:
    """The groups that each tenant is in, the innermost first."""
    outer = {group.name: group.group for group in groups}
    around: dict[str, tuple[str, ...]] = {}
    for tenant in tenants:
        found, group = list[str](), tenant.group
        while group is not None:
            found.append(group)
            group = outer[group]
        around[tenant.name] = tuple(found)
    return around


def _place(section: Grouped) -> Placing:
    return Placing(section.group or ROOT, filled(GroupSettings, section))
