"""What do all pools of one gateway count together? A tenant's limits and interactions do not depend on the model."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.config.model import Config
from gateway.request.interaction_claim import ClaimReader
from policies.interactions import Interactions
from policies.limits.quotas import Quotas
from policies.orders.registry import POLICIES

__all__ = ["Shared"]


@dataclass(frozen=True, slots=True)
class Shared:
    """Tables that several engines use. None: the config does not need them."""

    interactions: Interactions | None
    claims: ClaimReader | None
    quotas: Quotas | None

    @classmethod
    def of(cls, config: Config) -> Shared:
        knows_interactions = POLICIES[config.policy.name].order.knows_interactions
        own_rules = {app.name: app.interactions for app in config.apps if app.interactions is not None}
        own_quotas = {tenant.name: tenant.quota.quota() for tenant in config.tenants if tenant.quota is not None}
        quotas = Quotas(config.quota.quota(), own_quotas)
        return cls(
            Interactions(config.interactions.settings()) if knows_interactions else None,
            ClaimReader(config.interactions, own_rules) if knows_interactions else None,
            None if quotas.is_off else quotas,
        )
