"""Where is durably counted what was used, and what does it cost? In no place by default."""

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
    """No message repeats it: it may hold a password."""
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
    """What a million tokens of one model cost, in any currency."""

    input: float = Field(ge=0, le=1e9)
    """Prompt tokens that were not cached."""
    output: float = Field(ge=0, le=1e9)
    """Tokens of the answer."""
    cached: float | None = Field(default=None, ge=0, le=1e9)
    """Prompt tokens that the engine had cached. Default: as input."""


class UsageConfig(Section):
    """What each tenant, app, user and model used in every hour, kept in a database, which also holds keys."""

    url: Annotated[SecretStr, AfterValidator(_checked_url)]
    """The path of a file for SQLite, on a disk of this machine; or postgresql://USER:PASSWORD@HOST/DATABASE for several
    gateways. Write ${NAME} to take the password from the environment."""
    users_max: int = Field(default=100, ge=0, le=100_000)
    """Users of one tenant that each gateway counts one by one in an hour; the rest are counted together as "other"."""
    keep_days: int = Field(default=400, ge=2, le=36_500)
    """Days after which an hour is forgotten."""
    prices: dict[Name, PriceConfig] = Field(default_factory=dict)
    """By model; what others cost is not known."""

    @property
    def is_server(self) -> bool:
        """Is it a database that several gateways may share?"""
        return self.url.get_secret_value().partition("://")[0] in SERVERS
