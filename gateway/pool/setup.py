"""Settings and policy of a pool's admission engine, derived from the config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gateway.config.model import Config, PoolConfig
from gateway.config.section import filled
from gateway.pool.shared import Shared
from policies.admission.deciding import Remembered
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.admission.policy import Policy
from policies.admission.takeover import Setup
from policies.capacity.gauges import CapacitySettings
from policies.capacity.overload import OverloadSettings
from policies.limits.throttle import ThrottleSettings
from policies.orders.policy_entries import POLICIES
from policies.placements.placement import Assignment
from policies.placements.placement_entries import PLACEMENTS, USUAL_PLACEMENT
from policies.queue.bounds import QueueLimits


def setup_of(
    gateway: Config, pool: PoolConfig, slots: Mapping[str, int | None], shared: Shared, policy: Policy | None
) -> Setup:
    """Return the engine's settings.

    Args:
        slots: sequences that each engine runs at once; None to learn them.
        policy: the policy that takes over; None keeps the present one.
    """
    return Setup(policy=policy, slots=slots, **_settings(gateway, pool, shared))


def admission_engine(gateway: Config, pool: PoolConfig, shared: Shared) -> AdmissionEngine:
    """Create the admission engine of a pool, without backends."""
    return AdmissionEngine(named_policy(**policy_terms(gateway, pool)), **_settings(gateway, pool, shared))


def _settings(gateway: Config, pool: PoolConfig, shared: Shared) -> dict[str, Any]:
    return {
        "limits": filled(QueueLimits, gateway.limits, queue_bytes_max=gateway.bounds.queue_bytes),
        "capacity": filled(CapacitySettings, pool.capacity),
        "overload": filled(OverloadSettings, gateway.overload),
        "interactions": shared.interactions,
        "quotas": shared.quotas,
        "tree": shared.tree,
        "remembered": Remembered(*[gateway.bounds.of(table) for table in ("decisions", "lengths")]),
    }


PolicyTerms = dict[str, Any]
"""The arguments of `named_policy`: equal terms decide equally."""


def policy_terms(gateway: Config, pool: PoolConfig) -> PolicyTerms:
    """Return the terms of the configured policy, including those in other sections of the config."""
    settings, entry = gateway.policy.settings(), POLICIES[gateway.policy.name]
    known = {one.name for one in fields(entry.params)}
    if "weights" in known:
        settings["weights"] = {app.name: app.normal_service for app in gateway.apps if app.normal_service is not None}
    if "throttle" in known:
        settings["throttle"] = filled(ThrottleSettings, gateway.throttle)
    placement = gateway.policy.placement or entry.placement or USUAL_PLACEMENT
    queues = pool.engines_max(gateway.limits) if issubclass(PLACEMENTS[placement].placement, Assignment) else 1
    flows_max = max(1, gateway.bounds.of("flows") // queues)
    bounds = {"flows_max": flows_max, "blocks_max": gateway.bounds.blocks}
    return {"name": gateway.policy.name, "placement": placement, **bounds, **settings}
