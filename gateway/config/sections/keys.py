"""Settings of keys and of issuers of JSON Web Tokens (RFC 7519), and a test whether a key can be guessed."""

from __future__ import annotations

import hashlib
import re
import secrets
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from gateway.config.checks import Name, NotEmpty, checked_hash, fault, unique, url_parts
from gateway.config.section import Section, with_class
from gateway.config.sections.limits import ModelQuotasConfig

KEY_CHARACTERS_MIN = 24
KEY_CHARACTERS_DIFFERENT_MIN = 10
LABEL_CHARACTERS_MAX = 100
_ISSUER_URL = "the url that the issuer writes into its tokens, such as https://login.example.com/"
_KEYS_URL = "the http(s) url of the issuer's keys, such as https://login.example.com/jwks.json"
Names = Annotated[tuple[Name, ...], AfterValidator(unique), NotEmpty]


def hash_key(key: str) -> str:
    """Return the hash of a key for the file: "sha256:" and 64 hex digits. Keys cannot be guessed, so no salt is needed.

    Bytes of a header that were not UTF-8 (surrogate escapes) are hashed as they arrived.
    """
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def open_name(digest: bytes) -> str:
    """Return the name of an unnamed key, where any key is accepted."""
    return f"key-{digest.hex()[:12]}"


def new_key() -> str:
    """Return a fresh key of 256 random bits: "fg-" and 43 characters that are safe in URLs and shells."""
    return "fg-" + secrets.token_urlsafe(32)


def weakness(key: str) -> str | None:
    """Return why a key made elsewhere might be guessed, or None for a key that a random generator can have made."""
    if len(key) >= KEY_CHARACTERS_MIN and len(set(key)) >= KEY_CHARACTERS_DIFFERENT_MIN:
        return None
    return (
        f"a key needs at least {KEY_CHARACTERS_MIN} characters, and {KEY_CHARACTERS_DIFFERENT_MIN} different ones "
        "among them, or it can be guessed"
    )


def _expiry(text: str) -> datetime:
    """Return the time that `text` names, a day or a time with zone. A day counts until its end. Raise ValueError."""
    if re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
        return datetime.fromisoformat(text).replace(tzinfo=UTC) + timedelta(days=1)
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError("no time zone")
    return moment


def _checked_expiry(text: str) -> str:
    """Return the time in a spelling without spaces."""
    try:
        _expiry(text).timestamp()
    except (ValueError, OverflowError):
        raise fault("should be a day such as 2027-01-31, or a time with its zone: 2027-01-31T12:00:00Z") from None
    return text.replace(" ", "T")


def _checked_label(text: str) -> str:
    if not 0 < len(text) <= LABEL_CHARACTERS_MAX or not text.isprintable():
        raise fault(f"should be 1 to {LABEL_CHARACTERS_MAX} characters that can be printed, in one line")
    return text


@with_class
class KeyConfig(Section):
    """A key of a tenant, known by its hash only."""

    hash: Annotated[str, AfterValidator(checked_hash)]
    """sha256: and 64 hex digits, as `fairgate keys hash` prints it."""
    apps: Names = Field(default=("default",), strict=False, max_length=1000, json_schema_extra={"minItems": 1})
    """Apps that the key may use; a request that names no app is for the first."""
    expires: Annotated[str, AfterValidator(_checked_expiry)] | None = None
    """Last day of the key by UTC, such as 2027-01-31, or a time with its zone, such as 2027-01-31T12:00:00Z. Default:
    never."""
    models: Names | None = Field(default=None, strict=False, max_length=1000)
    """Models that the key may use; others do not exist for it. Default: all."""
    weight: float | None = Field(default=None, gt=0, le=1000)
    """Weight of the tenant in requests with this key. Default: that of the tenant."""
    quota: ModelQuotasConfig | None = None
    """Limits of requests with this key, beside those of the tenant."""
    counted_as: Annotated[str, AfterValidator(checked_hash)] | None = None
    """Hash of the key whose quota it shares; written by a rotation."""
    label: Annotated[str, AfterValidator(_checked_label)] | None = None
    """Use or holder of the key, in any words; shown in lists, logs, usage and metrics."""
    created: Annotated[str, AfterValidator(_checked_expiry)] | None = None
    """Time of creation, written by `fairgate keys create`."""

    @property
    def digest(self) -> bytes:
        """The hash as bytes."""
        return bytes.fromhex(self.hash.removeprefix("sha256:"))

    @property
    def counts_as(self) -> str:
        """Name under which the key's quota is counted."""
        return (self.counted_as or self.hash).removeprefix("sha256:")

    @property
    def expires_s(self) -> float:
        """Expiry in seconds since the epoch."""
        return float("inf") if self.expires is None else _expiry(self.expires).timestamp()


Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""Algorithms of RFC 7518 and RFC 8037, without shared secrets: whoever can check such a token can make one."""


def _url_that_is(what: str) -> AfterValidator:
    def checked(text: str) -> str:
        url_parts(text, what, credentials_go="no url of an issuer")
        return text

    return AfterValidator(checked)


class IssuerConfig(Section):
    """An issuer of tokens (OpenID Connect). pip install 'fairgate[jwt]'."""

    issuer: Annotated[str, _url_that_is(_ISSUER_URL)]
    """Exact value of `iss` in its tokens."""
    audience: Name
    """Required value in `aud` of its tokens."""
    jwks_url: Annotated[str, _url_that_is(_KEYS_URL)] | None = None
    """URL of its keys (RFC 7517). Default: from its /.well-known/openid-configuration."""
    algorithms: Annotated[tuple[Algorithm, ...], AfterValidator(unique), NotEmpty] = Field(
        default=("RS256", "ES256"), strict=False, json_schema_extra={"minItems": 1}
    )
    """Accepted signature algorithms."""
    tenant_claim: Name = "tenant"
    """Claim with the tenant: the first value that is a tenant counts."""
    group_claim: Name | None = None
    """Claim with groups: only a tenant inside one of the groups counts. Default: any tenant."""
    user_claim: Name = "sub"
    """Claim with the user, if there is one; overrides other names in the request."""
    app_claim: Name | None = None
    """Claim with the apps that the request may name; the first is used if none is named. Default: only `default`."""
    leeway_s: float = Field(default=30, ge=0, le=600)
    """Tolerated difference between the clocks of issuer and gateway."""
