"""Paths that clients may ask for beyond the known ones."""

from __future__ import annotations

import re
from ipaddress import ip_network
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from gateway.config.checks import NotEmpty, fault, unique
from gateway.config.paths import MANAGEMENT
from gateway.config.section import Section


def _checked_path(text: str) -> str:
    if not re.fullmatch(r"(/(?!\.\.?(/|$))([A-Za-z0-9._~:-]+|\*))+", text) or len(text) > 1000:
        raise fault("should be a path such as /v1/images/generations; a * stands for one step: /v1/videos/*")
    if not MANAGEMENT.isdisjoint(text.lower().split("/")):
        raise fault("manages the engine: it is never open to clients; ask the engine itself")
    return text


def _checked_network(text: str) -> str:
    try:
        return str(ip_network(text))
    except ValueError:
        raise fault("should be an address or a network, such as 10.0.0.5, 10.0.0.0/8 or fd00::/8") from None


def _checked_origin(text: str) -> str:
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[a-z0-9._-]+(:[0-9]{1,5})?", text):
        raise fault("should be an origin as browsers write it, in lower case and without a path, or *")
    return text


NetworkName = Annotated[str, AfterValidator(_checked_network)]
Origin = Annotated[str, AfterValidator(_checked_origin)]


class RouteConfig(Section):
    """An additional path for clients."""

    path: Annotated[str, AfterValidator(_checked_path)]
    """Path, such as /v1/images/generations; a * stands for one step: /v1/videos/*."""
    methods: Annotated[
        tuple[Literal["GET", "POST", "PUT", "PATCH", "DELETE"], ...], AfterValidator(unique), NotEmpty
    ] = Field(default=("POST",), strict=False, json_schema_extra={"minItems": 1})
    """Allowed methods. HEAD comes with GET."""
    treatment: Literal["generate", "compute", "pass"]
    """generate: queued, answered token by token; compute: queued, answered in one pass; pass: straight to an engine,
    for requests that cost no engine time."""
