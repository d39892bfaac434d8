"""Differences between two configurations, and those that need a restart.

A configuration consists of settings, each with a path. A named item of a list is found by its name, so order makes no
difference: `tenants[alice].weight`, `pools[chat].backends[gpu-1].max_num_seqs`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import SecretStr

from gateway.config.model import Config
from gateway.config.section import Section

CHARACTERS_MAX = 60
LIVE = {
    "access_log", "admin_token", "aliases", "apps", "cors_origins", "drain_s", "groups", "interactions", "limits",
    "log_level", "open_access", "overload", "policy", "pools", "quota", "routes", "tenants", "throttle", "tls",
    "trusted_proxies",
}  # fmt: skip
"""Settings that `Gateway.take_over` applies. All others are bound, shared or opened once, at the start."""
PRESENT = "present"
SECRET = "(a secret)"
_NAMES = ("name", "hash", "path", "issuer")
"""Fields by which an item of a list is identified."""


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting or section before and after; None where it is absent."""

    path: str
    before: str | None
    after: str | None

    @property
    def is_whole(self) -> bool:
        """Return whether a whole section was added or removed."""
        return PRESENT in (self.before, self.after)

    def __str__(self) -> str:
        if self.is_whole:
            return f"{self.path}: {'removed' if self.after is None else 'added'}"
        if SECRET in (self.before, self.after):
            return f"{self.path}: {SECRET}, changed"
        return f"{self.path}: {self.before or 'not set'} -> {self.after or 'not set'}"


def _values(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield each setting in a value by its path, and each section before its own settings."""
    if isinstance(value, tuple) and value and isinstance(value[0], Section):
        value = {_name(one): one for one in value}
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _values(one, f"{path}[{name}]")
    elif isinstance(value, Section):
        yield path, PRESENT
        for name, one in value:
            yield from _values(one, f"{path}.{name}" if path else name)
    elif value is not None and value != ():
        yield path, _plain(value)


def _present(config: Config) -> dict[str, Any]:
    """Return all settings and sections that are there, by their paths."""
    return dict(_values(config, ""))


def changes(before: Config, after: Config) -> list[SettingChange]:
    """Return every setting that differs, by its path, without secrets. A section that came or went is one change."""
    mine, theirs = _present(before), _present(after)
    found, inside = list[SettingChange](), tuple[str, ...]()
    for path in sorted(mine.keys() | theirs.keys()):
        if mine.get(path) != theirs.get(path) and not path.startswith(inside):
            found.append(SettingChange(path, _format_value(mine.get(path)), _format_value(theirs.get(path))))
            if found[-1].is_whole:
                inside = (f"{path}.", f"{path}[")
    return found


def weights_that_differ(before: Config, config: Config) -> dict[str, tuple[float | None, float]]:
    """Return the weights, before and after, of tenants that are new or whose weight changed."""
    known = {tenant.name: tenant.weight for tenant in before.tenants}
    return {
        tenant.name: (known.get(tenant.name), tenant.weight)
        for tenant in config.tenants
        if tenant.weight != known.get(tenant.name)
    }


def config_hash(config: Config) -> str:
    """Return a hash of 16 hex digits, equal on all replicas for configurations of equal meaning."""
    digest = hashlib.sha256()
    for path, value in sorted(_present(config).items()):  # in small pieces, so that other threads get their turns
        digest.update(json.dumps([path, value], default=SecretStr.get_secret_value).encode())
    return digest.hexdigest()[:16]


def needs_restart(before: Config, found: list[SettingChange], after: Config) -> dict[str, str]:
    """Return the changes that a running gateway cannot apply: path and reason."""
    of_replicas = _of_replicas(before, after) if before.has_replicas else {}
    reasons = {}
    for one in found:
        if re.split(r"[.\[]", one.path)[0] not in LIVE:
            reasons[one.path] = "is set at the start"
        elif one.path == "tls":
            reasons[one.path] = "is spoken or not by every connection"
        elif why := next((why for begins, why in of_replicas.items() if one.path.startswith(begins)), ""):
            reasons[one.path] = why
    return reasons


def _of_replicas(before: Config, after: Config) -> dict[str, str]:
    """Return path prefixes of settings on which all replicas must agree, because they count together."""
    common = "is what replicas count together by: restart all of them"
    reasons = {"policy": common, "throttle": common}
    if _normal_service(before) != _normal_service(after):
        reasons["apps["] = common
    for name in {pool.name for pool in before.pools} ^ {pool.name for pool in after.pools}:
        reasons[f"pools[{name}]"] = "replicas share a pool from its start on"
    return reasons


def _normal_service(config: Config) -> dict[str, object]:
    return {app.name: app.normal_service for app in config.apps if app.normal_service is not None}


def _name(section: Section) -> str:
    return next(str(value) for name in _NAMES if (value := getattr(section, name, None)))


def _plain(value: Any) -> Any:
    """Return a value that can be compared; a secret stays hidden."""
    if isinstance(value, float) and value.is_integer():
        return int(value)  # 30 and 30.0 are equal
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def _format_value(value: Any) -> str | None:
    """Return a short text without secrets, or None for an absent value."""
    if value is None:
        return None
    if isinstance(value, SecretStr):
        return SECRET
    text = json.dumps(value) if isinstance(value, tuple | bool) else str(value)
    return text if len(text) <= CHARACTERS_MAX else f"{text[:CHARACTERS_MAX]}..."
