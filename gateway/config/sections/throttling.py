"""When are the engines overloaded, and who is refused then? And which limits hold at any time?"""

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
    """What one of them may have within the window while a pool is overloaded: numbers, or auto."""


@settings_from(ThrottleSettings)
class ThrottleConfig(Section):
    """Who is refused while a pool is overloaded: new interactions of a user or app beyond a limit. fairserve only."""

    user: CeilingsConfig = CeilingsConfig()
    """Each user of a tenant, over all apps."""
    app_user: CeilingsConfig = CeilingsConfig()
    """Each user of a tenant in one app. At most what the user may have at all."""
    app: CeilingsConfig = CeilingsConfig()
    """Each app of a tenant, over all users. At least what one of them may have in it."""


@settings_from(Quota)
class QuotaConfig(Section):
    """Limits of a tenant that hold at any time, whatever the policy. There are none but those written here."""


class UserConfig(Section):
    """One user of a tenant, by the name that its requests give (`user`, `x-fairgate-user`) or its token."""

    name: Name
    """The name; * for each user that has no entry of its own."""
    blocked: bool = False
    """Nothing is generated for it."""
    quota: QuotaConfig | None = None
    """Its limits, beside those of its tenant."""


class ModelQuotasConfig(QuotaConfig):
    """The same, and the same of single models."""

    per_model: dict[Name, QuotaConfig] = Field(default_factory=dict)
    """Limits of what is asked of one model, by the engines' name of the model."""
