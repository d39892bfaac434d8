"""Creation of a policy by name: its order and its placement, with their settings."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from policies.admission.policy import AssignedPolicy, Policy
from policies.orders.order import Order
from policies.orders.policy_entries import POLICIES
from policies.placements.placement import Assignment
from policies.placements.placement_entries import PLACEMENTS, USUAL_PLACEMENT
from policies.placements.prefix_index import ALL_BLOCKS_MAX, PrefixIndex


def named_policy(
    name: str,
    *,
    placement: str | None = None,
    flows_max: int = 100_000,
    blocks_max: int = ALL_BLOCKS_MAX,
    prefixes: PrefixIndex | None = None,
    **settings: Any,
) -> Policy:
    """Create the policy of this name.

    `placement`: a name; None for the policy's own placement, or else the usual one. `flows_max`: tenants and flows that
    each queue remembers. `blocks_max`: blocks of prompts that the index remembers, over all engines. `prefixes`: an
    existing index to keep. Raise TypeError for a setting that neither order nor placement has, and KeyError for an
    unknown name.
    """
    entry = POLICIES[name]
    place = PLACEMENTS[placement or entry.placement or USUAL_PLACEMENT]
    params = entry.params(**_of(entry.params, settings))
    placement_params = place.params(**_of(place.params, settings)) if place.params is not None else None
    known = {one.name for struct in (entry.params, place.params) if struct is not None for one in fields(struct)}
    if unknown := sorted(settings.keys() - known):
        raise TypeError(f"policy {name} has no setting {', '.join(unknown)}; it has: {', '.join(sorted(known))}")
    prefixes = prefixes if prefixes is not None else PrefixIndex()
    prefixes.set(blocks_max)
    where = place.placement(placement_params, prefixes=prefixes, flows_max=flows_max)
    order: Order
    if entry.order.reads_prefixes:
        order = entry.order(params, flows_max=flows_max, prefixes=prefixes)
    else:
        order = entry.order(params, flows_max=flows_max)
    index = prefixes if order.reads_prefixes or where.reads_prefixes else None
    if isinstance(where, Assignment):
        return AssignedPolicy(order, where, prefixes=index)
    return Policy(order, where, prefixes=index)


def _of(struct: type, settings: dict[str, Any]) -> dict[str, Any]:
    return {one.name: settings[one.name] for one in fields(struct) if one.name in settings}
