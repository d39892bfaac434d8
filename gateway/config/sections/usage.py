"""The database of usage and batches, and prices; none by default."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr

from gateway.config.checks import Name, fault
from gateway.config.section import Section

SERVERS = ("postgresql", "postgres")
_FORM = "should be the path of a file for SQLite, or postgresql://USER:PASSWORD@HOST/DATABASE"


def _checked_url(url: SecretStr) -> SecretStr:
    """Check the URL. No message repeats it, since it may hold a password."""
    text = url.get_secret_value()
    scheme, is_url, _ = text.partition("://")
    if not text or re.search(r"[\x00-\x1f]", text) or (is_url and scheme not in SERVERS):
        raise fault(_FORM)
    if is_url:
        try:
            _ = urlsplit(text).port
        except ValueError:
            raise fault(_FORM + "; in a password, # is written %23, / is %2F and % is %25") from None
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

    url: Annotated[SecretStr, AfterValidator(_checked_url)]
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
    """Batches, by /v1/files and /v1/batches. They need the database of `usage`, and are offered only with it."""

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
