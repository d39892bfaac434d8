"""Services besides the engines: the store of replicas, the database of usage, the collector of spans.

None is needed by default.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Literal
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator, Field, SecretStr

from gateway.config.checks import Name, fault, url_parts
from gateway.config.section import Section

MEMORY = "memory"
SCHEMES = ("redis", "rediss", "unix")
OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname", "db")
_REDIS = "should be memory, redis://HOST:PORT/DATABASE, rediss://... (TLS) or unix:///PATH"
_ESCAPES = "; in a password, # is written %23, / is %2F and % is %25"
SERVERS = ("postgresql", "postgres")
_DATABASE = "should be the path of a file for SQLite, or postgresql://USER:PASSWORD@HOST/DATABASE"
TRACES_PATH = "/v1/traces"


def _checked_redis(url: SecretStr) -> SecretStr:
    """Check the URL. No message repeats it, since it may hold a password."""
    text = url.get_secret_value()
    scheme = text.partition(":")[0]
    if text == MEMORY:
        return url
    if scheme not in SCHEMES:
        near = difflib.get_close_matches(scheme[:16], [MEMORY, *SCHEMES], n=1)
        raise fault(_REDIS + (f" (did you mean '{near[0]}'?)" if near else ""))
    try:
        parts = urlsplit(text)
        host, port, options = parts.hostname, parts.port, parse_qsl(parts.query, keep_blank_values=True)
    except ValueError:
        raise fault(_REDIS + _ESCAPES) from None
    has_server = scheme == "unix" or (host and re.fullmatch(r"(/[0-9]{0,5})?", parts.path))
    if not re.fullmatch(r"[!-~]+", text) or parts.fragment or port == 0 or not has_server:
        raise fault(_REDIS + _ESCAPES)
    if scheme == "unix" and (host or len(parts.path) < 2):
        raise fault("should name the file of the socket: unix:///PATH, or unix://USER:PASSWORD@/PATH")
    for name, value in options:
        _check_option(scheme, name, value)
    return url


def _check_option(scheme: str, name: str, value: str) -> None:
    if name not in OPTIONS:
        near = difflib.get_close_matches(name[:64], OPTIONS, n=1)
        advice = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(OPTIONS)}"
        raise fault(f"has an unknown option after the ? ({advice})")
    if name.startswith("ssl_") and scheme != "rediss":
        raise fault(f"has the option {name}, which is for TLS: write rediss://")
    if name == "db" and not (scheme == "unix" and re.fullmatch(r"[0-9]{1,5}", value)):
        raise fault("has the option db, a number with unix:// only; else write redis://HOST:PORT/DATABASE")


class StateConfig(Section):
    """Store that the replicas of a gateway share."""

    url: Annotated[SecretStr, AfterValidator(_checked_redis)] = Field(
        default=SecretStr(MEMORY), json_schema_extra={"default": MEMORY}
    )
    """memory: shared by the workers only. redis://HOST:PORT/DATABASE, rediss:// (TLS) or unix:///PATH: a Redis, Valkey
    or Redis Cluster for all replicas; ${NAME}: from the environment."""
    limits_without_redis: Literal["share", "refuse"] = "share"
    """Conduct of a replica without Redis: keep to its part of limits over time, or refuse tenants with a limit."""

    @property
    def redis_url(self) -> str | None:
        """URL with its password, or None where all state is in memory."""
        url = self.url.get_secret_value()
        return None if url == MEMORY else url


def _checked_database(url: SecretStr) -> SecretStr:
    """Check the URL. No message repeats it, since it may hold a password."""
    text = url.get_secret_value()
    scheme, is_url, _ = text.partition("://")
    if not text or re.search(r"[\x00-\x1f]", text) or (is_url and scheme not in SERVERS):
        raise fault(_DATABASE)
    if is_url:
        try:
            _ = urlsplit(text).port
        except ValueError:
            raise fault(_DATABASE + _ESCAPES) from None
    return url


class PriceConfig(Section):
    """Price of a million tokens of one model, in any currency."""

    input: float = Field(ge=0, le=1e9)
    """Price of prompt tokens that were not cached."""
    output: float = Field(ge=0, le=1e9)
    """Price of output tokens."""
    cached: float | None = Field(default=None, ge=0, le=1e9)
    """Price of cached prompt tokens. Default: as input."""

    @property
    def of_cached(self) -> float:
        """Price of cached tokens."""
        return self.input if self.cached is None else self.cached


class UsageConfig(Section):
    """Hourly usage of each tenant, app, user and model, in a database that also holds keys."""

    url: Annotated[SecretStr, AfterValidator(_checked_database)]
    """Path of a SQLite file on a local disk, or postgresql://USER:PASSWORD@HOST/DATABASE for several gateways; ${NAME}:
    from the environment."""
    users_max: int = Field(default=100, ge=0, le=100_000)
    """Users of a tenant counted separately in an hour; the rest count as "other"."""
    keep_days: int = Field(default=400, ge=2, le=36_500)
    """Days after which usage is deleted."""
    prices: dict[Name, PriceConfig] = Field(default_factory=dict)
    """Prices by model. The cost of other models is unknown."""

    @property
    def is_server(self) -> bool:
        """Return whether several gateways can share the database."""
        return self.url.get_secret_value().partition("://")[0] in SERVERS


class BatchesConfig(Section):
    """Batches, by /v1/files and /v1/batches. Batches need the database of `usage`, and are offered only with it."""

    lines_max: int = Field(default=50_000, ge=1, le=1_000_000)
    """Lines of one file, whose bytes limits.body_bytes_max bounds."""
    files_max: int = Field(default=1000, ge=1, le=1_000_000)
    """Files of one tenant, results included."""
    stored_bytes_max: int = Field(default=1 << 30, ge=1024, le=1 << 50)
    """Total size of a tenant's files, results included."""
    batches_max: int = Field(default=1000, ge=1, le=1_000_000)
    """Batches of one tenant; beyond this the oldest ended one is deleted."""
    running_max: int = Field(default=64, ge=1, le=10_000)
    """Requests of one batch that wait or run."""
    keep_days: int = Field(default=30, ge=2, le=36_500)
    """Days after which files and batches are deleted."""


def _checked_endpoint(text: str) -> str:
    """Add OTLP's default path to an endpoint without a path."""
    should_be = "the http(s) url of a collector, such as http://collector:4318"
    parts = url_parts(text, should_be, credentials_go="OTEL_EXPORTER_OTLP_HEADERS")
    return text if parts.path not in ("", "/") else f"{parts.scheme}://{parts.netloc}{TRACES_PATH}"


class TracingConfig(Section):
    """Spans of requests, sent by OpenTelemetry's OTLP over HTTP, with the headers of OTEL_EXPORTER_OTLP_HEADERS. pip
    install 'fairgate[opentelemetry]'."""

    endpoint: Annotated[str, AfterValidator(_checked_endpoint)] | None = None
    """URL of a collector; /v1/traces is added to a url without a path. Default: OTEL_EXPORTER_OTLP_ENDPOINT, else
    http://localhost:4318."""
    sample_ratio: float = Field(default=0.01, ge=0, le=1)
    """Recorded part of the traces without a client's `traceparent`, which decides itself."""
