"""The store that replicas of a gateway share: none by default, or one Redis."""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Literal
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator, Field, SecretStr

from gateway.config.checks import fault
from gateway.config.section import Section

MEMORY = "memory"
SCHEMES = ("redis", "rediss", "unix")
OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname", "db")
_FORM = "should be memory, redis://HOST:PORT/DATABASE, rediss://... (TLS) or unix:///PATH"
_ESCAPES = "; in a password, # is written %23, / is %2F and % is %25"


def _checked_url(url: SecretStr) -> SecretStr:
    """Check the URL. No message repeats it, since it may hold a password."""
    text = url.get_secret_value()
    scheme = text.partition(":")[0]
    if text == MEMORY:
        return url
    if scheme not in SCHEMES:
        near = difflib.get_close_matches(scheme[:16], [MEMORY, *SCHEMES], n=1)
        raise fault(_FORM + (f" (did you mean '{near[0]}'?)" if near else ""))
    try:
        parts = urlsplit(text)
        host, port, options = parts.hostname, parts.port, parse_qsl(parts.query, keep_blank_values=True)
    except ValueError:
        raise fault(_FORM + _ESCAPES) from None
    if not re.fullmatch(r"[!-~]+", text) or parts.fragment or port == 0:
        raise fault(_FORM + _ESCAPES)
    if scheme == "unix" and (host or len(parts.path) < 2):
        raise fault("should name the file of the socket: unix:///PATH, or unix://USER:PASSWORD@/PATH")
    if scheme != "unix" and not (host and re.fullmatch(r"(/[0-9]{0,5})?", parts.path)):
        raise fault(_FORM + _ESCAPES)
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

    url: Annotated[SecretStr, AfterValidator(_checked_url)] = Field(
        default=SecretStr(MEMORY), json_schema_extra={"default": MEMORY}
    )
    """memory: nothing is shared. redis://HOST:PORT/DATABASE, rediss:// (TLS) or unix:///PATH: a Redis, Valkey or Redis
    Cluster for all replicas; ${NAME}: from the environment."""
    limits_without_redis: Literal["share", "refuse"] = "share"
    """Conduct of a replica without Redis: keep to its share of every limit, or refuse tenants that have a limit."""

    @property
    def redis_url(self) -> str | None:
        """URL with its password, or None where all state is in memory."""
        url = self.url.get_secret_value()
        return None if url == MEMORY else url
