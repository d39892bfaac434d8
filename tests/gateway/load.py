"""Tenants by their weights, each with a key of its own."""

from __future__ import annotations

from typing import Any

from gateway.config.sections.keys import hash_key


def tenants(**weights: float) -> list[dict[str, Any]]:
    return [
        {"name": name, "weight": weight, "keys": [{"hash": hash_key(f"key-of-{name}"), "apps": ["default"]}]}
        for name, weight in weights.items()
    ]
