"""A policy by its name: its order and its placement, made with their settings."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from policies.admission.assigned import AssignedPolicy
from policies.admission.policy import Policy
from policies.orders.contract import Order
from policies.orders.registry import POLICIES
from policies.placements.contract import Assignment
from policies.placements.prefix_index import PrefixIndex

__all__ = ["named_policy"]


def named_policy(name: str, *, flows_max: int = 100_000, **settings: Any) -> Policy:
    """The policy of this name. TypeError for a setting that it does not have; KeyError for an unknown name."""
    entry = POLICIES[name]
    params = entry.params(**_of(entry.params, settings))
    placement_params = None
    known = {one.name for one in fields(entry.params)}
    if entry.placement_params is not None:
        placement_params = entry.placement_params(**_of(entry.placement_params, settings))
        known |= {one.name for one in fields(entry.placement_params)}
    if unknown := sorted(settings.keys() - known):
        raise TypeError(f"policy {name} has no setting {', '.join(unknown)}; it has: {', '.join(sorted(known))}")
    prefixes = PrefixIndex()
    placement = entry.placement(placement_params, prefixes=prefixes, flows_max=flows_max)
    order: Order
    if entry.order.reads_prefixes:
        order = entry.order(params, flows_max=flows_max, prefixes=prefixes)
    else:
        order = entry.order(params, flows_max=flows_max)
    index = prefixes if order.reads_prefixes or placement.reads_prefixes else None
    if isinstance(placement, Assignment):
        return AssignedPolicy(order, placement, prefixes=index)
    return Policy(order, placement, prefixes=index)


def _of(struct: type, settings: dict[str, Any]) -> dict[str, Any]:
    return {one.name: settings[one.name] for one in fields(struct) if one.name in settings}
