"""When are the engines overloaded, and who is refused then? And which limits hold at any time?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from gateway.config.fields import fault
from gateway.config.section import Section
from policies.capacity.overload import OverloadSettings
from policies.limits.quotas import Quota
from policies.limits.sliding_counts import MEASURES
from policies.limits.throttle import Ceilings, ThrottleSettings

__all__ = ["CeilingsConfig", "OverloadConfig", "QuotaConfig", "ThrottleConfig"]

COUNT_MAX = 10**12
_OVERLOAD = OverloadSettings()
_THROTTLE = ThrottleSettings()


class OverloadConfig(Section):
    """When a pool counts as overloaded: a state of its KV caches, never a rate of requests. fairserve only."""

    enter: float = Field(default=_OVERLOAD.enter, gt=0, le=1)
    """Share of the KV cache, in use or expected to be, from which the pool is overloaded."""
    leave: float = Field(default=_OVERLOAD.leave, gt=0, le=1, validate_default=True)
    """Share below which it no longer is. At most `enter`."""
    dwell_s: float = Field(default=_OVERLOAD.dwell_s, ge=0, le=3600)
    """Shortest time in either state."""

    @field_validator("leave")
    @classmethod
    def _below(cls, leave: float, info: ValidationInfo) -> float:
        if leave > info.data.get("enter", 1.0):
            raise fault(f"{leave:g} is more than enter ({info.data['enter']:g}): overload would end before it begins")
        return leave

    def settings(self) -> OverloadSettings:
        return OverloadSettings(self.enter, self.leave, self.dwell_s)


def _checked_ceiling(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 1 <= value <= COUNT_MAX):
        return value
    raise fault("should be a whole number from 1, or auto (no number: starts wait for the working set)")


CeilingConfig = Annotated[
    Annotated[int, Field(ge=1, le=COUNT_MAX)] | Literal["auto"], BeforeValidator(_checked_ceiling)
]


class CeilingsConfig(Section):
    """What one of them may have within the window while a pool is overloaded: numbers, or auto."""

    starts: CeilingConfig = "auto"
    """Interactions begun. auto, here and below, sets no number: starts wait for the working set instead of being
    refused (docs/working-sets.md)."""
    requests: CeilingConfig = Field(default="auto", validate_default=True)
    """Calls, those inside interactions included. At least `starts`."""
    tokens: CeilingConfig = "auto"
    """Tokens received, prompt and output."""

    @field_validator("requests")
    @classmethod
    def _room_for_starts(cls, requests: int | str, info: ValidationInfo) -> int | str:
        starts = info.data.get("starts")
        if isinstance(requests, int) and isinstance(starts, int) and requests < starts:
            raise fault(f"{requests} is less than starts ({starts}), each of which is a request")
        return requests

    def ceilings(self) -> Ceilings:
        """The numbers of them."""
        written = [getattr(self, name) for name in MEASURES]
        return Ceilings(*(None if one == "auto" else one for one in written))


class ThrottleConfig(Section):
    """Who is refused while a pool is overloaded: new interactions of a user or app beyond a limit. fairserve only."""

    window_s: float = Field(default=_THROTTLE.window_s, ge=1, le=86_400)
    """The time over which is counted."""
    user: CeilingsConfig = CeilingsConfig()
    """Each user of a tenant, over all apps."""
    app_user: CeilingsConfig = CeilingsConfig()
    """Each user of a tenant in one app. At most what the user may have at all."""
    app: CeilingsConfig = CeilingsConfig()
    """Each app of a tenant, over all users. At least what one of them may have in it."""

    @field_validator("app_user")
    @classmethod
    def _within_the_users(cls, app_user: CeilingsConfig, info: ValidationInfo) -> CeilingsConfig:
        for name, part, whole in _numbers(app_user, info.data.get("user")):
            if part > whole:
                raise fault(f"{part} {name} are more than the {whole} that a user may have over all apps (user.{name})")
        return app_user

    @field_validator("app")
    @classmethod
    def _room_for_one_user(cls, app: CeilingsConfig, info: ValidationInfo) -> CeilingsConfig:
        for name, whole, part in _numbers(app, info.data.get("app_user")):
            if part > whole:
                raise fault(f"{whole} {name} are fewer than the {part} that one user may have in it (app_user.{name})")
        return app

    def settings(self) -> ThrottleSettings:
        return ThrottleSettings(self.window_s, self.user.ceilings(), self.app_user.ceilings(), self.app.ceilings())


def _numbers(one: CeilingsConfig, other: CeilingsConfig | None) -> Iterator[tuple[str, int, int]]:
    """Measures for which both have a number."""
    for name in MEASURES:
        first, second = getattr(one, name), getattr(other, name, None)
        if isinstance(first, int) and isinstance(second, int):
            yield name, first, second


class QuotaConfig(Section):
    """Limits of a tenant that hold at any time, whatever the policy. There are none but those written here."""

    requests_per_minute: int | None = Field(default=None, ge=1, le=COUNT_MAX)
    """Requests in any 60 seconds."""
    tokens_per_minute: int | None = Field(default=None, ge=1, le=COUNT_MAX)
    """Tokens in any 60 seconds, prompt and output."""
    concurrent: int | None = Field(default=None, ge=1, le=COUNT_MAX)
    """Requests queued or running at once."""
    tokens_per_day: int | None = Field(default=None, ge=1, le=COUNT_MAX)
    """Tokens in any 24 hours, prompt and output. At least tokens_per_minute."""

    @field_validator("tokens_per_day")
    @classmethod
    def _room_for_a_minute(cls, tokens_per_day: int | None, info: ValidationInfo) -> int | None:
        tokens_per_minute = info.data.get("tokens_per_minute")
        if tokens_per_day is not None and tokens_per_minute is not None and tokens_per_day < tokens_per_minute:
            raise fault(f"{tokens_per_day} is less than tokens_per_minute ({tokens_per_minute}): never reached")
        return tokens_per_day

    def quota(self) -> Quota:
        return Quota(self.requests_per_minute, self.tokens_per_minute, self.concurrent, self.tokens_per_day)
