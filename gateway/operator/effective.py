"""The configuration in effect: every value, and whether it is set or a default. Secrets are hidden."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import BaseModel, SecretStr

from gateway.config.contradictions import Loc, path_of
from gateway.config.model import Config
from gateway.config.sections.policy_choice import PolicyConfig, policy_settings

VALUES_MAX: Final = 5000
HIDDEN: Final = "(hidden)"
HASH_CHARACTERS: Final = len("sha256:") + 8

_Value = tuple[Loc, Any, bool]
"""Path, value, and whether the config sets the value."""


def effective(config: Config) -> dict[str, Any]:
    """Return every value with its path. Secrets are hidden, and the hash of a key is shortened."""
    values = _values(config, (), is_set=True)
    rows = [
        {"path": path_of(loc), "value": value, "from": "config" if is_set else "default"}
        for loc, value, is_set in islice(values, VALUES_MAX)
    ]
    return {"values": rows, "values_left_out": sum(1 for _ in values)}


def _values(section: BaseModel, loc: Loc, *, is_set: bool) -> Iterator[_Value]:
    if isinstance(section, PolicyConfig):
        yield from _of_policy(section, loc, is_set=is_set)
        return
    for field in type(section).model_fields:
        value, place = getattr(section, field), (*loc, field)
        own = is_set and field in section.model_fields_set
        if isinstance(value, BaseModel):
            yield from _values(value, place, is_set=own)
        elif isinstance(value, tuple) and any(isinstance(each, BaseModel) for each in value):
            for number, each in enumerate(value):
                if isinstance(each, BaseModel):
                    yield from _values(each, (*place, number), is_set=own)
        elif isinstance(value, dict) and any(isinstance(each, BaseModel) for each in value.values()):
            for name, each in value.items():
                yield from _values(each, (*place, name), is_set=own)
        else:
            yield place, _plain(value, field), own


def _of_policy(section: PolicyConfig, loc: Loc, *, is_set: bool) -> Iterator[_Value]:
    """Yield the settings that this policy reads, with its own defaults."""
    yield (*loc, "name"), section.name, is_set
    yield (*loc, "placement"), section.placement, section.placement is not None
    known = section.settings()
    for name, one in policy_settings(section.name, section.placement).items():
        yield (*loc, name), known.get(name, one.default), name in known


def _plain(value: Any, field: str) -> Any:
    if isinstance(value, SecretStr):
        return _hidden_url(value.get_secret_value()) if field == "url" else HIDDEN
    if isinstance(value, tuple):
        return [_plain(each, field) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each, field) for name, each in value.items()}
    if field == "hash":
        return f"{value[:HASH_CHARACTERS]}..."
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _hidden_url(url: str) -> str:
    """Return the URL without user and password."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return parts._replace(netloc=f"{HIDDEN}@{parts.netloc.rpartition('@')[2]}").geturl()
