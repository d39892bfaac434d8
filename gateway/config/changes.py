"""What differs between two configurations, which of it needs a restart, and are they the same?

A configuration is taken apart into its settings, each by its path. What has a name is found by it, so the order of a
list is no difference: `tenants[alice].weight`, `pools[chat].backends[gpu-1].max_num_seqs`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from pydantic import SecretStr

from gateway.config.model import Config
from gateway.config.section import Section
from policies.placements.registry import usual_placement

__all__ = ["Change", "changes", "config_hash", "needs_restart"]

SHOWN_MAX = 60
NOT_LIVE = ("listen", "admin", "workers", "state", "state_file")
"""Bound, shared or opened once, when the gateway starts."""
PRESENT = "present"
SECRET = "(a secret)"
_NAMES = ("name", "hash", "path")
"""By which a section of a list is found again."""


@dataclass(frozen=True, slots=True)
class Change:
    """One setting or section, before and after; None: it is not there."""

    path: str
    before: str | None
    after: str | None

    @property
    def is_whole(self) -> bool:
        """Is it a section that has come or gone, with all that is in it?"""
        return PRESENT in (self.before, self.after)

    def __str__(self) -> str:
        if self.is_whole:
            return f"{self.path}: {'removed' if self.after is None else 'added'}"
        if SECRET in (self.before, self.after):
            return f"{self.path}: {SECRET}, changed"
        return f"{self.path}: {self.before or 'not set'} -> {self.after or 'not set'}"


def changes(before: Config, after: Config) -> list[Change]:
    """Every setting that differs, by its path. No secret is in it."""
    old, new = _settings(before), _settings(after)
    found: list[Change] = []
    whole: Change | None = None
    for path in sorted(old.keys() | new.keys(), key=_order):
        mine, theirs = old.get(path), new.get(path)
        if mine == theirs or (whole is not None and path.startswith((f"{whole.path}.", f"{whole.path}["))):
            continue
        one = Change(path, _shown(mine), _shown(theirs))
        whole = one if one.is_whole else whole
        found.append(one)
    return found


def _order(path: str) -> list[str]:
    """What is in a section follows it at once."""
    return path.replace("[", ".[").split(".")


def config_hash(config: Config) -> str:
    """The same for configurations that mean the same, on every replica: 16 hex digits."""
    settings = {path: _plain(value) for path, value in sorted(_settings(config).items()) if value is not None}
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


def needs_restart(before: Config, found: list[Change], after: Config) -> dict[str, str]:
    """What of these changes a running gateway cannot take over, by path, with the reason."""
    reasons = {}
    for one in found:
        if one.path.split(".")[0] in NOT_LIVE:
            reasons[one.path] = "is set at the start"
        elif one.path == "tls":
            reasons[one.path] = "connections that are open speak the one or the other"
        elif before.state.redis_url is not None and (why := _of_replicas(before, one, after)) is not None:
            reasons[one.path] = why
    return reasons


def _of_replicas(before: Config, one: Change, after: Config) -> str | None:
    """What replicas count together must be counted alike by all of them."""
    section = one.path.split(".")[0]
    if section in ("policy", "throttle") or one.path.endswith(".normal_service"):
        return "is what replicas count together by: restart all of them"
    if one.path.startswith("pools[") and "." not in one.path:
        return "replicas share a pool from its start on"
    if "quota" in one.path and not _has_quota(before) and _has_quota(after):
        return "is the first limit, and replicas count limits together from the start on"
    pool = one.path.partition(".")[0]
    if ".backends[" in one.path and one.is_whole:
        sizes = [{f"pools[{each.name}]": len(each.backends) for each in config.pools} for config in (before, after)]
        usual = {usual_placement(of[pool]) for of in sizes if pool in of}
        if after.policy.placement is None and len(usual) > 1:
            return "changes the usual placement, which replicas tell each other of: name one, as policy.placement"
    return None


def _has_quota(config: Config) -> bool:
    sections = [config.quota, *[tenant.quota for tenant in config.tenants if tenant.quota is not None]]
    return any(value is not None for section in sections for value in section.model_dump().values())


def _settings(config: Config) -> dict[str, Any]:
    found: dict[str, Any] = {}
    _take_apart(config, "", found)
    return found


def _take_apart(section: Section, path: str, found: dict[str, Any]) -> None:
    for name in type(section).model_fields:
        value = getattr(section, name)
        place = f"{path}.{name}" if path else name
        if isinstance(value, Section):
            found[place] = PRESENT
            _take_apart(value, place, found)
        elif isinstance(value, tuple) and value and isinstance(value[0], Section):
            for one in value:
                item = f"{place}[{_name(one)}]"
                found[item] = PRESENT
                _take_apart(one, item, found)
        else:
            found[place] = value if value != () else None  # an empty list of sections is none of them


def _name(section: Section) -> str:
    return next(str(value) for name in _NAMES if (value := getattr(section, name, None)))


def _plain(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, float) and value.is_integer():
        return int(value)  # 30 and 30.0 are the same setting
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _shown(value: Any) -> str | None:
    """In short, and without a secret; None where there is nothing."""
    if value is None:
        return None
    if isinstance(value, SecretStr):
        return SECRET
    text = json.dumps(_plain(value)) if isinstance(value, tuple | bool) else str(_plain(value))
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."
