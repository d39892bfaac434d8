"""What docker-compose.yml says of its services."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

COMPOSE = Path(__file__).parents[2] / "docker-compose.yml"
_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?::([-+])([^}]*))?\})")


def services(**environment: str) -> dict[str, Any]:
    """Return what the file says of each service, with these variables."""
    found: dict[str, Any] = interpolated(yaml.safe_load(COMPOSE.read_text()), environment)["services"]
    return found


def interpolated(value: Any, environment: Mapping[str, str]) -> Any:
    """Fill in the variables as compose does."""

    def filled(found: re.Match[str]) -> str:
        dollar, name, how, other = found.groups()
        if dollar:
            return "$"
        value = environment.get(name, "")
        return (other if value else "") if how == "+" else value or other or ""

    if isinstance(value, str):
        return _VARIABLE.sub(filled, value)
    if isinstance(value, list):
        return [interpolated(each, environment) for each in value]
    if isinstance(value, dict):
        return {key: interpolated(each, environment) for key, each in value.items()}
    return value
