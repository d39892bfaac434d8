"""The configuration in effect: every value, and whether it is set or a default. Secrets are hidden."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import SecretStr

from gateway.config.changes import values_of
from gateway.config.model import Config
from gateway.config.section import Section
from gateway.config.sections.policy_choice import policy_settings

VALUES_MAX: Final = 5000
HIDDEN: Final = "(hidden)"
_HASH: Final = re.compile("(sha256:[0-9a-f]{8})[0-9a-f]+")


def effective(config: Config) -> dict[str, Any]:
    """Return every value with its path. Secrets are hidden, and the hash of a key is shortened."""
    rows = _rows(config)
    return {"values": list(islice(rows, VALUES_MAX)), "values_left_out": sum(1 for _ in rows)}


def _rows(config: Config) -> Iterator[dict[str, Any]]:
    policy = policy_settings(config.policy.name, config.policy.placement)
    for path, value, is_set in values_of(config):
        section, _, name = path.rpartition(".")
        if section == "policy" and name not in ("name", "placement"):
            if name not in policy:
                continue
            value = policy[name].default if value is None else value
        if not isinstance(value, Section):
            shown = _plain(value, name)
            yield {"path": _HASH.sub(r"\1...", path), "value": shown, "from": "config" if is_set else "default"}


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, SecretStr):
        return _hidden_url(value.get_secret_value()) if name == "url" else HIDDEN
    return _HASH.sub(r"\1...", value) if isinstance(value, str) else value


def _hidden_url(url: str) -> str:
    """Return the URL without user and password."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return parts._replace(netloc=f"{HIDDEN}@{parts.netloc.rpartition('@')[2]}").geturl()
