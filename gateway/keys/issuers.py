"""Whose token is this? Signed tokens of issuers (RFC 7519, OpenID Connect), checked by the keys that they publish.

PyJWT checks the signature by one of the configured algorithms, which must be the key's own, and `iss`, `aud`, `exp`,
`nbf` and `iat`. This module keeps the keys of each issuer (RFC 7517). They are read at the start, again every few
minutes, and soon after a token has named an unknown key, since issuers change their keys. The keyring remembers a
verified token, so most requests do not come here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any, Final

import aiohttp
import msgspec

from gateway.config.checks import is_name
from gateway.config.model import TenantConfig
from gateway.config.sections.keys import IssuerConfig
from gateway.http.errors import ApiError, Reason
from gateway.keys.identity import DEFAULT_APP, Principal
from gateway.storage.store_errors import StoreRefused
from gateway.telemetry.background import OperationalError, Tasks

try:
    import jwt
    from jwt import PyJWK, PyJWKSet
    from jwt.utils import base64url_decode, base64url_encode
except ModuleNotFoundError as error:
    raise StoreRefused("jwt: needs PyJWT: pip install 'fairgate[jwt]'") from error

REFRESH_S: Final = 300.0
REFRESH_S_MIN: Final = 10.0
"""Minimum time between two reads. A client that invents key ids does not make the gateway read more often."""
LIMIT_S: Final = 10.0
PAGE_BYTES_MAX: Final = 256 * 1024
NAMES_MAX: Final = 1000
DISCOVERY: Final = "/.well-known/openid-configuration"


class Issuer:
    """An issuer of tokens: the claims that the tokens must have, and the keys that sign them."""

    def __init__(self, config: IssuerConfig) -> None:
        self.config = config
        self._keys: dict[str, PyJWK] = {}
        self._read_s = float("-inf")
        """Monotonic time of the last successful read of the keys."""
        self._is_read = False
        self._asked = asyncio.Event()
        """Set when a token has named an unknown key."""

    def principal(
        self, token: str, tenants: Mapping[str, TenantConfig], is_in_groups: Callable[[str, Container[str]], bool]
    ) -> Principal:
        """Return the principal that a token names. Raise PyJWTError for an invalid token, and ApiError: 401 if the
        token names no tenant, 503 while its key may still be read.
        """
        config = self.config
        key = self._key(jwt.get_unverified_header(token).get("kid"))
        claims: dict[str, Any] = jwt.decode(
            token,
            key,
            algorithms=config.algorithms,
            issuer=config.issuer,
            audience=config.audience,
            leeway=config.leeway_s,
            options={"require": ["exp", "iss", "aud"], "enforce_minimum_key_length": True},
        )
        named, groups, where = _values(claims.get(config.tenant_claim)), None, ""
        if config.group_claim is not None:
            groups = frozenset(_values(claims.get(config.group_claim))[:NAMES_MAX])
            where = f" in a group that its claim '{config.group_claim}' names"
        found = [name for name in named if name in tenants and (groups is None or is_in_groups(name, groups))]
        if not found:
            message = f"its claim '{config.tenant_claim}' names no tenant of this gateway{where}"
            raise ApiError(Reason.INVALID_API_KEY, f"this token is not taken: {message}; ask the operator")
        apps: tuple[str, ...] = (DEFAULT_APP,)
        if config.app_claim is not None:
            apps = tuple(filter(is_name, _values(claims.get(config.app_claim))[:NAMES_MAX])) or apps
        user = next(iter(_values(claims.get(config.user_claim))), "")
        expires_s = float(claims["exp"]) + config.leeway_s
        return Principal(
            found[0], tenants[found[0]].weight, apps, expires_s=expires_s, groups=groups, user=user,
            issuer=config.issuer, group=tenants[found[0]].group or "", twin_digest=_twin_digest(token, key),
        )  # fmt: skip

    async def run_once(self, session: aiohttp.ClientSession) -> None:
        """Wait until the keys are due, and read them. If that fails, the known keys stay. Raise OperationalError."""
        if self._is_read:
            await asyncio.sleep(REFRESH_S_MIN)
            try:
                async with asyncio.timeout(REFRESH_S - REFRESH_S_MIN):
                    await self._asked.wait()
            except TimeoutError:
                pass  # no token has named an unknown key
        self._is_read = False
        self._asked.clear()
        self._keys = await self._read(session)
        self._is_read, self._read_s = True, time.monotonic()

    def _key(self, kid: object) -> PyJWK:
        keys = self._keys
        if kid is None and len(keys) == 1:
            return next(iter(keys.values()))
        found = keys.get(kid) if isinstance(kid, str) else None
        if found is not None:
            return found
        if time.monotonic() < self._read_s + REFRESH_S_MIN:
            raise jwt.InvalidKeyError("it is signed by none of the keys of its issuer")
        self._asked.set()
        message = f"the keys of {self.config.issuer} are being read; try again"
        raise ApiError(Reason.ISSUER_UNAVAILABLE, message, retry_after_s=1.0, should_retry=True)

    async def _read(self, session: aiohttp.ClientSession) -> dict[str, PyJWK]:
        config, url = self.config, self.config.jwks_url
        if url is None:
            about = await _page(session, config.issuer.rstrip("/") + DISCOVERY)
            url = about.get("jwks_uri")
            if about.get("issuer") != config.issuer or not isinstance(url, str):
                raise OperationalError(f"{config.issuer}{DISCOVERY} is not of this issuer, or names no jwks_uri")
        try:
            keys = PyJWKSet.from_dict(await _page(session, url)).keys
        except jwt.PyJWTError as error:
            raise OperationalError(f"{url} has no key that can be used: {error}") from None
        return {key.key_id or "": key for key in keys if key.public_key_use in (None, "sig")}


class Issuers:
    """The issuers whose tokens are accepted. The issuers' keys are read in the background."""

    def __init__(self, configs: Sequence[IssuerConfig], session: aiohttp.ClientSession, background: Tasks) -> None:
        self._by_name = {config.issuer: Issuer(config) for config in configs}
        for name, issuer in self._by_name.items():
            background.repeat(partial(issuer.run_once, session), "jwt", name)

    def knows(self, issuer: str) -> bool:
        return issuer in self._by_name

    def principal(
        self, token: bytes, tenants: Mapping[str, TenantConfig], is_in_groups: Callable[[str, Container[str]], bool]
    ) -> Principal:
        """Return the principal that the token names. Raise ApiError."""
        try:
            text = token.decode("ascii")
            for part in text.split("."):
                # Other letters may decode to equal bytes. Such a spelling would have another digest, and escape a
                # revocation.
                if base64url_encode(base64url_decode(part)).decode() != part:
                    raise jwt.DecodeError("its base64 has more than one spelling, and this is not the usual one")
            named = jwt.decode(text, options={"verify_signature": False}).get("iss")
            issuer = self._by_name.get(named) if isinstance(named, str) else None
            if issuer is None:
                raise jwt.InvalidIssuerError("its issuer is not known here")
            return issuer.principal(text, tenants, is_in_groups)
        except jwt.ExpiredSignatureError:
            message = "this token has expired; get a new one from its issuer"
            raise ApiError(Reason.EXPIRED_API_KEY, message) from None
        except (jwt.PyJWTError, ValueError, ArithmeticError, RecursionError) as error:
            raise ApiError(Reason.INVALID_API_KEY, f"this token is not taken: {error}") from None


def _twin_digest(token: str, key: PyJWK) -> bytes:
    """Return the digest of the other valid spelling of an ECDSA token, b"" for other tokens.

    If (r, s) is a signature, (r, n - s) is one, too, so anybody can write the other spelling.
    """
    if key.key_type != "EC":
        return b""
    signed, _, signature = token.rpartition(".")
    raw = base64url_decode(signature)
    half = len(raw) // 2
    twin = raw[:half] + (key.key.curve.group_order - int.from_bytes(raw[half:])).to_bytes(half)
    return sha256(f"{signed}.{base64url_encode(twin).decode()}".encode()).digest()


def _values(claim: object) -> list[str]:
    """Return a claim as a list of names: one name, or several."""
    values = claim if isinstance(claim, list) else [claim]
    return [value for value in values if isinstance(value, str) and value]


async def _page(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Fetch a JSON object. Raise OperationalError if there is none."""
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=LIMIT_S), allow_redirects=False) as answer:
            page = await answer.content.read(PAGE_BYTES_MAX + 1)
            while len(page) <= PAGE_BYTES_MAX and (more := await answer.content.read(PAGE_BYTES_MAX)):
                page += more
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise OperationalError(f"{url} cannot be read: {error or type(error).__name__}") from None
    if answer.status != 200 or len(page) > PAGE_BYTES_MAX:
        raise OperationalError(f"{url} answers {answer.status} with {len(page)} bytes; 200 with less was expected")
    try:
        return msgspec.json.decode(page, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise OperationalError(f"{url} answers what is no JSON object: {error}") from None
