"""The section of the policy and its settings, derived from `POLICIES`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationInfo, create_model, field_validator

from gateway.config.checks import fault
from gateway.config.section import Section, field_of
from policies.orders.policy_entries import POLICIES
from policies.placements.placement_entries import PLACEMENTS
from policies.settings import Setting, settings_of

if TYPE_CHECKING:
    PlacementName = str
    PolicyName = str
else:
    PolicyName = Literal[tuple(POLICIES)]
    PlacementName = Literal[tuple(PLACEMENTS)]


def policy_settings(name: str, placement: str | None = None) -> dict[str, Setting]:
    """Return the settings of a policy with this placement, by name; None is its own placement."""
    entry = POLICIES[name]
    where = placement or entry.placement
    params = PLACEMENTS[where].params if where is not None else None
    return settings_of(entry.params) | (settings_of(params) if params is not None else {})


_OF_POLICY = {name: policy_settings(name) for name in POLICIES}


class _Named(Section):
    """Order of requests. A setting that the policy does not have is a fault."""

    name: PolicyName = Field(
        default="fairserve", description="\n".join(f"{name}: {entry.summary}." for name, entry in POLICIES.items())
    )

    placement: PlacementName | None = Field(
        default=None,
        description="Engine of a request.\n"
        + "\n".join(f"{name}: {entry.summary}." for name, entry in PLACEMENTS.items())
        + "\nDefault: prefix; d2lpm: deficits.",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _has_it(cls, value: Any, info: ValidationInfo) -> Any:
        name, field = info.data.get("name"), info.field_name
        if name is None or field in (None, "name", "placement"):
            return value
        if field not in policy_settings(name, info.data.get("placement")):
            having = ", ".join(one for one, settings in _OF_POLICY.items() if field in settings)
            raise fault(f"is not a setting of {name}, but of {having}")
        return value

    def settings(self) -> dict[str, Any]:
        """Return the settings that are set, by name."""
        return self.model_dump(exclude={"name", "placement"}, exclude_none=True)


def _field(name: str) -> Any:
    """Return one field for all policies with this setting, whose kind and bounds agree; None means unset."""
    having = {policy: settings[name] for policy, settings in _OF_POLICY.items() if name in settings}
    first = next(iter(having.values()))
    defaults = {policy: one.default for policy, one in having.items()}
    lacking = [policy for policy in _OF_POLICY if policy not in having]
    whose = f"All but {', '.join(lacking)}" if len(lacking) < len(having) else ", ".join(having)
    doc, extra = f"{first.doc} {whose}.", {"default": first.default}
    if len(values := list(dict.fromkeys(defaults.values()))) > 1:
        own = (f"{value:g} for {', '.join(one for one in having if defaults[one] == value)}" for value in values)
        doc, extra = f"{first.doc} Default: {'; '.join(own)}.", {}
    kind, field = field_of(first, default=None, description=doc, json_schema_extra=extra)
    return (kind if extra else kind | None, field)


_FIELDS: dict[str, Any] = {name: _field(name) for settings in _OF_POLICY.values() for name in settings}

if TYPE_CHECKING:
    PolicyConfig = _Named
else:
    PolicyConfig = create_model("PolicyConfig", __base__=_Named, __doc__=_Named.__doc__, **_FIELDS)
