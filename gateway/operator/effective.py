"""Which configuration is in effect? Every value, where it comes from, and no secret."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import BaseModel, SecretStr

from gateway.config.contradictions import path_of
from gateway.config.model import Config
from gateway.config.provenance import Loc, Provenance
from gateway.config.sections.policy_choice import PolicyConfig, policy_settings

VALUES_MAX: Final = 5000
HIDDEN: Final = "(hidden)"
DEFAULT: Final = Provenance("default")
HASH_CHARACTERS: Final = len("sha256:") + 8

_Value = tuple[Loc, Any, Provenance]
"""Path, value and source."""


def effective(config: Config) -> dict[str, Any]:
    """Every value by its path. Secrets are hidden, and of the hash of a key only the beginning is shown."""
    values = _values(config, config, (), is_set=True)
    rows = [_row(*each) for each in islice(values, VALUES_MAX)]
    return {"file": config.provenance.file or None, "values": rows, "values_left_out": sum(1 for _ in values)}


def _row(loc: Loc, value: Any, provenance: Provenance) -> dict[str, Any]:
    row = {"path": path_of(loc), "value": value, "from": provenance.source}
    if provenance.line:
        row["line"] = provenance.line
    if provenance.variable:
        row["variable"] = provenance.variable
    return row


def _values(config: Config, section: BaseModel, loc: Loc, *, is_set: bool) -> Iterator[_Value]:
    if isinstance(section, PolicyConfig):
        yield from _of_policy(config, section, loc, is_set=is_set)
        return
    for field in type(section).model_fields:
        value, place = getattr(section, field), (*loc, field)
        own = is_set and field in section.model_fields_set
        if isinstance(value, BaseModel):
            yield from _values(config, value, place, is_set=own)
        elif isinstance(value, tuple) and any(isinstance(each, BaseModel) for each in value):
            for number, each in enumerate(value):
                if isinstance(each, BaseModel):
                    yield from _values(config, each, (*place, number), is_set=own)
        elif isinstance(value, dict) and any(isinstance(each, BaseModel) for each in value.values()):
            for name, each in value.items():
                yield from _values(config, each, (*place, name), is_set=own)
        else:
            yield place, _plain(value, field), _provenance(config, place, value, is_set=own)


def _of_policy(config: Config, section: PolicyConfig, loc: Loc, *, is_set: bool) -> Iterator[_Value]:
    """Only what this policy reads, with its own defaults."""
    yield (*loc, "name"), section.name, _provenance(config, (*loc, "name"), section.name, is_set=is_set)
    place = (*loc, "placement")
    yield place, section.placement, _provenance(config, place, (), is_set=section.placement is not None)
    known = section.settings()
    for name, one in policy_settings(section.name, section.placement).items():
        place = (*loc, name)
        yield place, known.get(name, one.default), _provenance(config, place, (), is_set=name in known)


def _provenance(config: Config, loc: Loc, value: Any, *, is_set: bool) -> Provenance:
    if not is_set:
        return DEFAULT
    first = (*loc, 0) if isinstance(value, tuple) and value else loc  # a list stands where its first item does
    return config.provenance.of(first)


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
    """Where it is, without a user and a password."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return parts._replace(netloc=f"{HIDDEN}@{parts.netloc.rpartition('@')[2]}").geturl()
