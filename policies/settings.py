"""What may be set for a policy? Fields of a struct that carry their bounds and their meaning.

The YAML section, its schema and its messages are derived from these fields (`gateway.config.policy`).
"""

from __future__ import annotations

from dataclasses import MISSING, field, fields
from typing import Any, Final, NamedTuple

__all__ = ["Setting", "setting", "settings_of"]

_KEY: Final = "setting"


class Setting(NamedTuple):
    """One field that an operator may set."""

    kind: type
    default: Any
    doc: str
    least: float | None
    above: float | None
    most: float | None
    choices: tuple[str, ...]


def setting(
    default: Any,
    doc: str,
    *,
    kind: type | None = None,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field with this default. `least` and `most` are allowed values, `above` is not.

    `kind`: the type of a value that may be None.
    """
    known = Setting(kind if kind is not None else type(default), default, doc, least, above, most, choices)
    return field(default=default, metadata={_KEY: known})


def settings_of(struct: type) -> dict[str, Setting]:
    """The fields of a struct that an operator may set, by name."""
    return {one.name: one.metadata[_KEY] for one in fields(struct) if one.default is not MISSING and one.metadata}
