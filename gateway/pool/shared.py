"""What do all pools of one gateway count together? A tenant's limits and interactions do not depend on the model."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.config.model import Config
from gateway.request.interaction_claim import ClaimReader
from policies.interactions import Interactions
from policies.limits.quotas import Quota, Quotas
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
        quotas = Quotas(*_quotas(config))
        return cls(
            Interactions(config.interactions.settings()) if knows_interactions else None,
            _claims(config) if knows_interactions else None,
            None if quotas.is_off else quotas,
        )

    def taken_over(self, before: Config, config: Config) -> Shared:
        """The tables under another configuration. What was counted and is open stays in them; none is ever taken away,
        since requests may be noted there."""
        fresh = Shared.of(config)
        if self.interactions is not None:
            self.interactions.set(config.interactions.settings())
        if self.quotas is not None:
            self.quotas.set(*_quotas(config))
        are_rules_the_same = (before.interactions, before.apps) == (config.interactions, config.apps)
        keeps_claims = self.claims is not None and fresh.claims is not None and are_rules_the_same
        return Shared(
            fresh.interactions if self.interactions is None else self.interactions,
            self.claims if keeps_claims else fresh.claims,
            fresh.quotas if self.quotas is None else self.quotas,
        )


def _claims(config: Config) -> ClaimReader:
    own_rules = {app.name: app.interactions for app in config.apps if app.interactions is not None}
    return ClaimReader(config.interactions, own_rules)


def _quotas(config: Config) -> tuple[Quota, dict[str, Quota]]:
    """The limits of every tenant, and those of some."""
    own = {tenant.name: tenant.quota.quota() for tenant in config.tenants if tenant.quota is not None}
    return config.quota.quota(), own
