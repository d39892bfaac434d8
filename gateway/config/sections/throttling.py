"""Overload of the engines, refusals during overload, and limits that always hold."""

from __future__ import annotations

from pydantic import Field

from gateway.config.checks import Name
from gateway.config.section import Section, settings_from
from policies.capacity.overload import OverloadSettings
from policies.limits.quotas import Quota
from policies.limits.throttle import Ceilings, ThrottleSettings


@settings_from(OverloadSettings)
class OverloadConfig(Section):
    """When a pool counts as overloaded: a state of its KV caches, never a rate of requests. fairserve only."""


@settings_from(Ceilings)
class CeilingsConfig(Section):
    """Allowance of one of them within the window while a pool is overloaded: numbers, or auto."""


@settings_from(ThrottleSettings)
class ThrottleConfig(Section):
    """Refusals while a pool is overloaded: new interactions of a user or app beyond a limit. fairserve only."""

    user: CeilingsConfig = CeilingsConfig()
    """Each user of a tenant, over all apps."""
    app_user: CeilingsConfig = CeilingsConfig()
    """Each user of a tenant in one app. At most the user's total."""
    app: CeilingsConfig = CeilingsConfig()
    """Each app of a tenant, over all users. At least the limit of one user in it."""


@settings_from(Quota)
class QuotaConfig(Section):
    """Limits of a tenant that hold at any time, under any policy. None by default."""


class UserConfig(Section):
    """A user of a tenant, by the name that its requests give (`user`, `x-fairgate-user`) or its token."""

    name: Name
    """Name of the user; * for each user without an entry."""
    blocked: bool = False
    """Refuse the user's requests for generation."""
    quota: QuotaConfig | None = None
    """Its limits, beside those of its tenant."""


class ModelQuotasConfig(QuotaConfig):
    """Limits of a tenant, and its limits on single models."""

    per_model: dict[Name, QuotaConfig] = Field(default_factory=dict)
    """Limits on one model, by the engines' name of the model."""
