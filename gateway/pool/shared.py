"""Tables that all pools of one gateway share, and the settings and policy of a pool's admission engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from gateway.config.model import Config, PoolConfig
from gateway.config.section import filled
from gateway.config.sections.limits import ModelQuotasConfig, QuotaConfig
from gateway.request.interaction_claim import ClaimReader
from gateway.usage.calendar import calendar_of
from policies.admission.admission_core import HistoryLimits
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.capacity.gauges import CapacitySettings
from policies.capacity.overload import OverloadSettings
from policies.interactions import Interactions, InteractionSettings
from policies.limits.quotas import GROUP, KEY, Quota, Quotas, user_member
from policies.limits.throttle import ThrottleSettings
from policies.orders.policy_entries import POLICIES
from policies.placements.placement import Assignment
from policies.placements.placement_entries import PLACEMENTS, USUAL_PLACEMENT
from policies.queue.bounds import QueueLimits
from policies.request import Price
from policies.tree.terms import Tree


@dataclass(frozen=True, slots=True)
class CrossPoolState:
    """Tables that several admission engines use; None where the config does not need one."""

    interactions: Interactions | None
    claims: ClaimReader | None
    quotas: Quotas | None
    tree: Tree

    @classmethod
    def from_config(cls, config: Config) -> CrossPoolState:
        knows_interactions = POLICIES[config.policy.name].order.knows_interactions
        quotas = quotas_of(config)
        return cls(
            Interactions(_settings(config)) if knows_interactions else None,
            _claims(config) if knows_interactions else None,
            quotas if config.issues_keys or config.has_replicas or not quotas.is_off else None,
            config.tree,
        )

    def read(self, before: Config, config: Config) -> CrossPoolState:
        """Return the tables of another configuration, for `taken_over`. Safe in any thread, since tenants may be
        many."""
        fresh = CrossPoolState.from_config(config)
        is_kept = (before.interactions, before.apps) == (config.interactions, config.apps)
        return replace(fresh, claims=self.claims) if is_kept and self.claims and fresh.claims else fresh

    def taken_over(self, fresh: CrossPoolState, config: Config) -> CrossPoolState:
        """Return the tables under another configuration, with all counts and open interactions.

        No table is ever removed, since requests may be recorded in it. The first limits of all create counts that start
        with the usage in the database. Where replicas count together, the counts stay.
        """
        if self.interactions is not None:
            self.interactions.set(_settings(config))
        quotas = self.quotas
        if quotas is not None and (config.has_replicas or not quotas.is_off):
            quotas.set(Quotas() if fresh.quotas is None else fresh.quotas)
        elif fresh.quotas is not None and not fresh.quotas.is_off:
            quotas = fresh.quotas
        interactions = fresh.interactions if self.interactions is None else self.interactions
        return replace(fresh, interactions=interactions, quotas=quotas)

    def set_issued_quotas(self, quotas: Mapping[str, ModelQuotasConfig]) -> None:
        """Set the limits of keys issued while the gateway runs, by the name under which each key is counted."""
        if self.quotas is not None:
            self.quotas.set_issued(_with_models({KEY + name: section for name, section in quotas.items()}))


def quotas_of(config: Config) -> Quotas:
    """Return the limits of tenants, of their groups and of their keys."""
    own = _with_models(limited(config))
    for one in config.tenants:
        own |= {user_member(one.name, user.name): filled(Quota, user.quota or QuotaConfig()) for user in one.users}
    names = {tenant: [GROUP + group for group in groups] for tenant, groups in config.around.items()}
    around = {tenant: [name for name in groups if name in own] for tenant, groups in names.items() if groups}
    of_models = {model: filled(Quota, one) for model, one in config.quota.per_model.items()}
    priced = config.usage.prices if config.usage is not None else {}
    prices = {model: Price(each.input, each.of_cached, each.output) for model, each in priced.items()}
    calendar = None if config.calendar is None else calendar_of(config.calendar)
    found = Quotas(
        filled(Quota, config.quota), own, around, of_models,
        prices=prices, calendar=calendar, tenants_max=config.bounds.size("quotas"),
    )  # fmt: skip
    for counts in found.windows:  # the clock of stored usage
        counts.epoch_s = time.time() - time.monotonic()
    return found


def _with_models(sections: Mapping[str, ModelQuotasConfig]) -> dict[str, Quota]:
    """Return limits by name, and by name and model."""
    own = {name: filled(Quota, section) for name, section in sections.items()}
    for name, section in sections.items():
        own |= {f"{name} {model}": filled(Quota, one) for model, one in section.per_model.items()}
    return own


def limited(config: Config) -> dict[str, ModelQuotasConfig]:
    """Return the limits of each limited tenant, group and key, by the name under which it is counted."""
    named = [(GROUP + group.name, group.quota) for group in config.groups]
    for one in config.tenants:
        named += [(one.name, one.quota), *[(KEY + key.counts_as, key.quota) for key in one.keys]]
    return {name: section for name, section in named if section is not None}


def _claims(config: Config) -> ClaimReader:
    own_rules = {app.name: app.interactions for app in config.apps if app.interactions is not None}
    return ClaimReader(config.interactions, own_rules, flows_max=config.bounds.size("texts"))


def _settings(config: Config) -> InteractionSettings:
    bounds = config.bounds
    return filled(
        InteractionSettings, config.interactions, open_max=bounds.size("interactions"), apps_max=bounds.size("paces")
    )


def admission_engine(gateway: Config, pool: PoolConfig, shared: CrossPoolState) -> AdmissionEngine:
    """Create the admission engine of a pool, without backends."""
    return AdmissionEngine(named_policy(**policy_terms(gateway, pool)), **engine_settings(gateway, pool, shared))


def engine_settings(gateway: Config, pool: PoolConfig, shared: CrossPoolState) -> dict[str, Any]:
    """Return the settings that a new admission engine and the `PoolSettings` of one in use share."""
    return {
        "limits": filled(QueueLimits, gateway.limits, queue_bytes_max=gateway.bounds.queue_bytes),
        "capacity": filled(CapacitySettings, pool.capacity),
        "overload": filled(OverloadSettings, gateway.overload),
        "interactions": shared.interactions,
        "quotas": shared.quotas,
        "tree": shared.tree,
        "remembered": HistoryLimits(*[gateway.bounds.size(table) for table in ("decisions", "lengths")]),
    }


def policy_terms(gateway: Config, pool: PoolConfig) -> dict[str, Any]:
    """Return the terms of the configured policy, including those in other sections of the config: the arguments of
    `named_policy`. Equal terms decide equally."""
    settings, entry = gateway.policy.settings(), POLICIES[gateway.policy.name]
    known = {one.name for one in fields(entry.params)}
    if "weights" in known:
        settings["weights"] = {app.name: app.normal_service for app in gateway.apps if app.normal_service is not None}
    if "throttle" in known:
        settings["throttle"] = filled(ThrottleSettings, gateway.throttle)
    placement = gateway.policy.placement or entry.placement or USUAL_PLACEMENT
    queues = pool.engines_max(gateway.limits) if issubclass(PLACEMENTS[placement].placement, Assignment) else 1
    flows_max = max(1, gateway.bounds.size("flows") // queues)
    bounds = {"flows_max": flows_max, "blocks_max": gateway.bounds.blocks}
    return {"name": gateway.policy.name, "placement": placement, **bounds, **settings}
