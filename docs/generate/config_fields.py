"""Which fields does the configuration have, each with default, unit, bounds and an example? From the model's schema."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from gateway.config.model import Config

EXAMPLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("examples.yaml").read_text(encoding="utf-8"))

UNITS = {
    "_s": "seconds", "_s_max": "seconds", "_s_max_inside": "seconds", "_bytes_max": "bytes", "_bytes_per_s": "bytes/s",
    "_days": "days", "requests_max": "requests", "requests_per_minute": "requests/min",
    "tokens_per_minute": "tokens/min", "tokens_per_day": "tokens/day", "requests_per_day": "requests/day",
    "engine_seconds_per_minute": "seconds/min", "engine_seconds_per_day": "seconds/day",
    "engine_seconds_per_month": "seconds/30 days", "cost_per_month": "money/30 days",
    "tokens_per_month": "tokens/30 days", "requests_per_month": "requests/30 days",
    "unqueued_per_s": "requests/s", "connections_max": "connections", "calls_max": "calls", "tokens_max": "tokens",
    "window_tokens": "tokens", "window_calls": "calls",
    "attempts_max": "failures", "users_max": "users", "workers": "processes", "quantum": "service",
    "max_num_seqs": "requests", "waiting_target": "requests", "max_concurrency": "requests", "concurrent": "requests",
    "unqueued_max": "requests", "kv_ceiling": "part of 1", "enter": "part of 1",
    "leave": "part of 1", "sample_ratio": "part of 1", "starts": "interactions", "requests": "requests",
    "tokens": "tokens", "addresses_max": "engines", "memory_max": "bytes", "lines_max": "lines",
    "guaranteed_share": "part of 1", "max_share": "part of 1", "lending_limit": "part of 1",
    "borrowing_limit": "part of 1", "max_running": "sequences",
    "files_max": "files", "batches_max": "batches", "running_max": "requests",
    "normal_service": "service", "input": "per million tokens", "output": "per million tokens",
    "cached": "per million tokens", "body_bytes_max": "bytes",
    "json_bytes_max": "bytes", "weight": "factor", "alpha": "factor", "beta": "factor",
    "gamma": "factor", "input_weight": "service/token", "output_weight": "service/token",
    "cached_weight": "service/token",
}  # fmt: skip
"""By the end of a field's name, the longest that fits; numbers only."""


TYPO_MIN = 86_400
"""Upper bounds from here on only catch slips of the pen; the schema has them."""


class ConfigField(NamedTuple):
    """One field, as an operator looks it up."""

    path: str
    """pools[].backends[].url"""
    meaning: str
    default: str
    """As YAML; "required" where there is none."""
    unit: str
    bounds: str
    example: str
    """As YAML."""

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]


def fields() -> Iterator[ConfigField]:
    """All fields, in the order of the model."""
    schema = Config.model_json_schema()
    yield from _fields(schema, schema["$defs"], "")


def _fields(section: dict[str, Any], known: dict[str, Any], before: str) -> Iterator[ConfigField]:
    required = set(section.get("required", ()))
    inside: list[tuple[str, dict[str, Any]]] = []
    for name, written in section["properties"].items():
        path = before + name
        ways = [_resolved(way, known) for way in written.get("anyOf", [written])]
        sections = [*_sections(ways, known)]
        for suffix, one in sections:
            inside.append((f"{path}{suffix}.", one))
        if not any(suffix == "" for suffix, _ in sections) or any(
            "properties" not in way for way in ways if _says(way)
        ):
            yield _field(path, written, ways, is_required=name in required)
    for path, one in inside:
        if not path.endswith(".per_model.*."):  # the fields of `quota` once more
            yield from _fields(one, known, path)


def _says(way: dict[str, Any]) -> bool:
    """Is it something that can be written, beside null and beside sections?"""
    return way.get("type") not in ("null", "object") and "enum" not in way


def _resolved(way: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    return known[way["$ref"].rpartition("/")[2]] if "$ref" in way else way


def _sections(ways: list[dict[str, Any]], known: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What stands below a field, and how its path goes on."""
    for way in ways:
        if "properties" in way:
            yield "", way
        elif way.get("type") == "array":
            for item in way["items"].get("anyOf", [way["items"]]) if isinstance(way.get("items"), dict) else ():
                if "properties" in _resolved(item, known):
                    yield "[]", _resolved(item, known)
        elif isinstance(way.get("additionalProperties"), dict):
            value = _resolved(way["additionalProperties"], known)
            if "properties" in value:
                yield ".*", value


def _field(path: str, written: dict[str, Any], ways: list[dict[str, Any]], *, is_required: bool) -> ConfigField:
    name = path.rpartition(".")[2]
    default = "required" if is_required else _yaml(written.get("default"))
    meaning = written.get("description", "")
    return ConfigField(path, meaning, default, _unit(name, ways), _bounds(ways), _example(path, written))


def _example(path: str, written: dict[str, Any]) -> str:
    """From examples.yaml, or else the default if that says anything; empty: there is none."""
    common = EXAMPLES.get(f"quota.{path.rpartition('.quota.')[2]}", written.get("default"))
    value = EXAMPLES.get(path, common)
    return "" if value in (None, [], {}, "") else f"{path.rpartition('.')[2].rstrip('[]')}: {_yaml(value)}"


def _yaml(value: Any) -> str:
    if isinstance(value, dict) and not value:
        return "{}"
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).strip()
    return text.removesuffix("\n...").removesuffix("...").strip()


def _unit(name: str, ways: list[dict[str, Any]]) -> str:
    if not any(way.get("type") in ("integer", "number") for way in ways):
        return ""
    fitting = [end for end in UNITS if name.endswith(end)]
    return UNITS[max(fitting, key=len)] if fitting else ""


def _bounds(ways: list[dict[str, Any]]) -> str:
    said = []
    for way in ways:
        if "enum" in way:
            said.append(", ".join(str(one) for one in way["enum"]))
        elif "const" in way:
            said.append(str(way["const"]))
        elif way.get("type") in ("integer", "number"):
            said.append(_range(way))
        elif way.get("type") == "boolean":
            said.append("true, false")
    return " or ".join(one for one in said if one)


def _range(way: dict[str, Any]) -> str:
    least, above = way.get("minimum"), way.get("exclusiveMinimum")
    most, below = way.get("maximum"), way.get("exclusiveMaximum")
    low = f"from {_number(least)}" if least is not None else f"above {_number(above)}" if above is not None else ""
    high = (
        f"to {_number(most)}"
        if most is not None and most < TYPO_MIN
        else f"below {_number(below)}"
        if below is not None
        else ""
    )
    return " ".join(one for one in (low, high) if one)


def _number(value: float) -> str:
    return f"{value:,.10g}"
