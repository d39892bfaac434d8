"""What may be said of one key: its hash, for what it may be used, and until when. And: can it be guessed?

Beside keys: whose JSON Web Tokens (RFC 7519) are taken, and what do their claims say of a request?
"""

from __future__ import annotations

import hashlib
import re
import secrets
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from gateway.config.checks import Name, checked_hash, fault, not_empty, unique, url_parts
from gateway.config.section import Section, with_class
from gateway.config.sections.throttling import ModelQuotasConfig

KEY_CHARACTERS_MIN = 24
KEY_CHARACTERS_DIFFERENT_MIN = 10
LABEL_CHARACTERS_MAX = 100


def hash_key(key: str) -> str:
    """What is written in the file for this key? "sha256:" and 64 hex digits; keys cannot be guessed, so no salt.

    Bytes that were not UTF-8 in a header (surrogate escapes) are hashed as they came.
    """
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def open_name(digest: bytes) -> str:
    """Under which name does a key appear that has none, where any key is taken?"""
    return f"key-{digest.hex()[:12]}"


def new_key() -> str:
    """A fresh key of 256 random bits: "fg-" and 43 characters that are safe in URLs and shells."""
    return "fg-" + secrets.token_urlsafe(32)


def weakness(key: str) -> str | None:
    """Why might somebody guess a key that was made elsewhere? None: nobody will, if it was made by chance."""
    if len(key) >= KEY_CHARACTERS_MIN and len(set(key)) >= KEY_CHARACTERS_DIFFERENT_MIN:
        return None
    return (
        f"a key needs at least {KEY_CHARACTERS_MIN} characters, and {KEY_CHARACTERS_DIFFERENT_MIN} different ones "
        "among them, or it can be guessed"
    )


def _expiry(text: str) -> datetime:
    """From when on is a key not taken? A day counts until its end. ValueError: it is neither a day nor a moment."""
    if re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
        return datetime.fromisoformat(text).replace(tzinfo=UTC) + timedelta(days=1)
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError("no time zone")
    return moment


def _checked_expiry(text: str) -> str:
    """In a spelling without spaces."""
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
    """One key of a tenant, known by its hash only."""

    hash: Annotated[str, AfterValidator(checked_hash)]
    """sha256: and 64 hex digits, as `fairgate keys hash` prints it."""
    apps: Annotated[tuple[Name, ...], AfterValidator(unique), AfterValidator(not_empty)] = Field(
        default=("default",), strict=False, max_length=1000, json_schema_extra={"minItems": 1}
    )
    """Apps the key may act for; the first is what a request is when it names none."""
    expires: Annotated[str, AfterValidator(_checked_expiry)] | None = None
    """The last day on which it is taken, by UTC, such as 2027-01-31; or the time from which it is not, with its zone,
    such as 2027-01-31T12:00:00Z. Default: it does not expire."""
    models: Annotated[tuple[Name, ...], AfterValidator(unique), AfterValidator(not_empty)] | None = Field(
        default=None, strict=False, max_length=1000
    )
    """Models the key may ask for; the others do not exist for it. Default: all."""
    weight: float | None = Field(default=None, gt=0, le=1000)
    """Weight of the tenant while it asks with this key. Default: that of the tenant."""
    quota: ModelQuotasConfig | None = None
    """Limits of what is asked with this key, beside those of the tenant."""
    counted_as: Annotated[str, AfterValidator(checked_hash)] | None = None
    """Hash of the key whose quota it shares; a rotation writes it."""
    label: Annotated[str, AfterValidator(_checked_label)] | None = None
    """What it is for, or who has it, in any words; shown in lists of keys only."""
    created: Annotated[str, AfterValidator(_checked_expiry)] | None = None
    """When it was made, as `fairgate keys create` notes it; shown in lists of keys only."""

    @property
    def counts_as(self) -> str:
        """The name under which its quota is counted."""
        return (self.counted_as or self.hash).removeprefix("sha256:")

    @property
    def expires_s(self) -> float:
        """From when on it is not taken, in seconds since the epoch."""
        return float("inf") if self.expires is None else _expiry(self.expires).timestamp()


Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""Of RFC 7518 and RFC 8037. None with a shared secret: who could check such a token could make one."""
_GO = "no url of an issuer"


def _checked_issuer(text: str) -> str:
    url_parts(
        text, "the url that the issuer writes into its tokens, such as https://login.example.com/", credentials_go=_GO
    )
    return text


def _checked_jwks_url(text: str) -> str:
    url_parts(
        text, "the http(s) url of the issuer's keys, such as https://login.example.com/jwks.json", credentials_go=_GO
    )
    return text


class IssuerConfig(Section):
    """An issuer of tokens (OpenID Connect). pip install 'fairgate[jwt]'."""

    issuer: Annotated[str, AfterValidator(_checked_issuer)]
    """What its tokens have as `iss`, letter for letter."""
    audience: Name
    """What its tokens must have in `aud`: a token that is meant for another service is refused."""
    jwks_url: Annotated[str, AfterValidator(_checked_jwks_url)] | None = None
    """Where its keys are (RFC 7517). Default: where its /.well-known/openid-configuration says."""
    algorithms: Annotated[tuple[Algorithm, ...], AfterValidator(unique), AfterValidator(not_empty)] = Field(
        default=("RS256", "ES256"), strict=False, json_schema_extra={"minItems": 1}
    )
    """By which its tokens may be signed."""
    tenant_claim: Name = "tenant"
    """The claim that names the tenant. Of several values the first one that is a tenant counts."""
    group_claim: Name | None = None
    """The claim that names groups: only a tenant in one of them, directly or further up, counts. Default: any."""
    user_claim: Name = "sub"
    """The claim that names the user, whatever else the request says. A token need not have it."""
    app_claim: Name | None = None
    """The claim that names the apps that the request may be for; the first is what a request is when it names none.
    Default: only the app `default`."""
    leeway_s: float = Field(default=30, ge=0, le=600)
    """By how much the clocks of issuer and gateway may differ."""
