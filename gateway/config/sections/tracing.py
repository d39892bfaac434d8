"""Tracing: destination and number of spans; none by default."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr

from gateway.config.checks import checked_api_key, fault, url_parts
from gateway.config.section import Section

TRACES_PATH = "/v1/traces"


def _checked_endpoint(text: str) -> str:
    """Add OTLP's default path to an endpoint without a path."""
    should_be = "the http(s) url of a collector, such as http://collector:4318"
    parts = url_parts(text, should_be, credentials_go="headers")
    return text if parts.path not in ("", "/") else f"{parts.scheme}://{parts.netloc}{TRACES_PATH}"


def _checked_header(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,128}", name):
        raise fault("is not the name of a header field")
    return name


class TracingConfig(Section):
    """Spans of requests, sent by OpenTelemetry's OTLP over HTTP. pip install 'fairgate[opentelemetry]'."""

    endpoint: Annotated[str, AfterValidator(_checked_endpoint)] | None = None
    """URL of a collector; /v1/traces is added to a url without a path. Default: OTEL_EXPORTER_OTLP_ENDPOINT, else
    http://localhost:4318."""
    sample_ratio: float = Field(default=0.01, ge=0, le=1)
    """Recorded part of the traces without a client's `traceparent`, which decides itself."""
    headers: dict[
        Annotated[str, AfterValidator(_checked_header)], Annotated[SecretStr, AfterValidator(checked_api_key)]
    ] = Field(default_factory=dict)
    """Headers for the collector; ${NAME}: from the environment. Default: OTEL_EXPORTER_OTLP_HEADERS."""
