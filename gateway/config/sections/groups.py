"""Groups of tenants and their entitlements. Groups nest: each group and tenant names the group around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from gateway.config.checks import Name
from gateway.config.section import Section, filled, settings_from
from gateway.config.sections.limits import ModelQuotasConfig
from policies.tree.terms import ROOT, GroupSettings, Tree, TreePlace

_USUAL: Final = frozenset({"name", "weight", "keys", "quota", "users"})
"""Fields that may be set on a tenant whose node in the tree has the defaults."""
DEPTH_MAX: Final = 8
"""Most levels of groups, the tenant included."""


class TreeNodeConfig(Section):
    """A group or tenant: a place in the tree."""

    name: Name
    group: Name | None = None
    """The group around it. Default: none; it shares each pool with all others outside groups."""
    quota: ModelQuotasConfig | None = None
    if TYPE_CHECKING:
        # Settings of `GroupSettings`, which `settings_from` adds to each subclass.
        weight: float = 1.0
        guaranteed_share: float | None = None


@settings_from(GroupSettings)
class GroupConfig(TreeNodeConfig):
    """Tenants, or other groups, that share a part of each pool."""

    name: Name
    """Name used by `group`; unique among groups."""
    quota: ModelQuotasConfig | None = None
    """Limits of all the group's tenants together."""


def tree_of(groups: Sequence[TreeNodeConfig], tenants: Sequence[TreeNodeConfig]) -> Tree:
    """Return the tree that these sections, free of contradictions, describe."""
    around = groups_around(groups, groups)
    outermost_first = sorted(groups, key=lambda group: len(around[group.name]))
    placed = {group.name: _place(group) for group in outermost_first}
    return Tree(placed, {one.name: _place(one) for one in tenants if not one.model_fields_set <= _USUAL})


def groups_around(groups: Sequence[TreeNodeConfig], tenants: Sequence[TreeNodeConfig]) -> dict[str, tuple[str, ...]]:
    """Return the groups around each tenant, innermost first."""
    outer = {group.name: group.group for group in groups}
    around: dict[str, tuple[str, ...]] = {}
    for tenant in tenants:
        found, group = list[str](), tenant.group
        while group is not None:
            found.append(group)
            group = outer[group]
        around[tenant.name] = tuple(found)
    return around


def _place(section: TreeNodeConfig) -> TreePlace:
    return TreePlace(section.group or ROOT, filled(GroupSettings, section))
