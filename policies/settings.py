"""The settings that an operator may change: dataclass fields with a default, bounds and a description.

A setting is declared once, in the core. The YAML sections, their schema, their messages, the reference and `/config`
are derived from these fields (`gateway.config.section`).
"""

from __future__ import annotations

from dataclasses import MISSING, field, fields
from typing import Any, Final, NamedTuple

COUNT_MAX: Final = 10**12
"""Largest value to which any count may be set."""
_KEY: Final = "setting"


class Setting(NamedTuple):
    """The description of one field that an operator may set."""

    kind: type
    default: Any
    doc: str
    least: float | None = None
    above: float | None = None
    """Lower bound that is itself not allowed."""
    most: float | None = None
    choices: tuple[str, ...] = ()
    auto: str = ""
    """Meaning of the value `auto`, the default; "" if the setting does not take `auto`."""

    def allows(self, value: float) -> bool:
        """Return whether this number is within the bounds."""
        is_high = (self.least is None or value >= self.least) and (self.above is None or value > self.above)
        return is_high and (self.most is None or value <= self.most)


class SettingError(ValueError):
    """The error that setting `field` is out of its bounds, or contradicts another setting of its struct."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def setting(default: Any, doc: str, *, kind: type | None = None, **more: Any) -> Any:
    """Return a dataclass field with this default. `more` are further attributes of its `Setting`.

    `kind`: the type of a value that may be None.
    """
    return field(default=default, metadata={_KEY: Setting(kind or type(default), default, doc, **more)})


def settings_of(struct: type) -> dict[str, Setting]:
    """Return the settings of a struct by name."""
    return {one.name: one.metadata[_KEY] for one in fields(struct) if one.default is not MISSING and one.metadata}


def check_bounds(struct: Any) -> None:
    """Raise SettingError if a number in this struct is out of its bounds."""
    for name, one in settings_of(type(struct)).items():
        value = getattr(struct, name)
        if value is not None and not one.allows(value):
            raise SettingError(name, f"{name} is {value}, which is out of its bounds")
