"""Who asks? A key names its tenant and the apps that it may claim; nothing that a client writes can add an app.

The digest of a key (SHA-256) is looked up among the keys of the config, the issued keys and the verified tokens. A
revoked digest is never accepted. An unknown key that looks like a signed token is verified. With open access any other
key is a tenant of its own; otherwise it is a wrong key, which counts against its address.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import sha256
from math import inf
from typing import Any, Final, Protocol

from gateway.config.model import TenantConfig
from gateway.config.section import is_of_batch
from gateway.config.sections.groups import GroupConfig
from gateway.config.sections.keys import KeyConfig, hash_key, new_key, open_name
from gateway.config.sections.limits import ModelQuotasConfig
from gateway.http.errors import ApiError, Reason
from policies.limits.leaky_counts import MEMBERS_MAX, LeakyCounts
from policies.limits.quotas import ANYONE

logger = logging.getLogger("fairgate")

DEFAULT_APP: Final = "default"
USES_REMEMBERED_MIN: Final = 10_000
WRONG_KEYS_AT_ONCE_MAX: Final = 20
WRONG_KEYS_PER_S: Final = 0.2
JSON_OBJECT: Final = b"eyJ"
"""First characters of a signed token: `{"` in base64."""
LOGGED_MAX: Final = 100
"""Limit on key events of one kind that have a line each."""
TOKENS_MAX: Final = 10_000
"""Limit on verified tokens that are remembered, so that the next request with one costs no more than one with a key."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Authenticated caller: tenant, weight, permitted apps and models; from a key, a signed token or open access."""

    tenant: str
    weight: float
    apps: tuple[str, ...]
    """Apps that the key may claim; the first is the app of a request that names none."""
    models: frozenset[str] | None = None
    """Models that the key may ask for; None for all."""
    expires_s: float = inf
    """Time from which the key is rejected, in seconds since the epoch."""
    digest: bytes = b""
    """Digest of the key; empty without a key."""
    groups: frozenset[str] | None = None
    """Groups that the signed token names: the tenant must be in one of them. None if it may be in any."""
    user: str = ""
    """User that the signed token names, whatever the request says; empty if the request may name its user."""
    issuer: str = ""
    """Issuer of the token that came instead of a key; empty for a key."""
    is_batch: bool = False
    counts_as: str = ""
    """Name under which the quota of the key is counted."""
    quota: ModelQuotasConfig | None = None
    group: str = ""
    label: str = ""
    twin_digest: bytes = b""
    """Digest of the other spelling of the token; empty if there is none."""

    @classmethod
    def for_key(cls, tenant: TenantConfig, key: KeyConfig) -> Principal:
        models = None if key.models is None else frozenset(key.models)
        weight = tenant.weight if key.weight is None else key.weight
        more: dict[str, Any] = {"is_batch": is_of_batch(key), "counts_as": key.counts_as, "quota": key.quota}
        more |= {"group": tenant.group or "", "label": key.label or ""}
        return cls(tenant.name, weight, key.apps, models, key.expires_s, key.digest, **more)

    def may_ask(self, model: str) -> bool:
        """Return whether the key may ask for this model."""
        return self.models is None or model in self.models

    def app(self, claimed: str | None) -> str:
        """Return the app of a request that claims this one, or none. Raise ApiError if the key may not claim it."""
        if claimed is None:
            return self.apps[0]
        if claimed not in self.apps:
            message = f"this key may not claim the app '{claimed}'; it may claim: {', '.join(self.apps)}"
            raise ApiError(Reason.APP_NOT_ALLOWED, message)
        return claimed


class TokenVerifier(Protocol):
    """A verifier of signed tokens that are accepted beside keys."""

    def knows(self, issuer: str) -> bool:
        """Return whether tokens of this issuer are accepted."""

    def principal(
        self, token: bytes, tenants: Mapping[str, TenantConfig], is_in_groups: Callable[[str, Container[str]], bool]
    ) -> Principal:
        """Return the principal that a token names. Raise ApiError if the token is invalid, has expired, or names no
        tenant, or while the keys of its issuer are not read yet.

        `is_in_groups`: returns whether a tenant is in one of these groups.
        """


@dataclass(frozen=True, slots=True)
class KeyHolders:
    """Tenants and groups by name, and principals by the digests of their keys."""

    tenants: dict[str, TenantConfig]
    groups: dict[str, GroupConfig]
    principals: dict[bytes, Principal]
    minted: dict[str, str]
    """Keys that exist for this run only, by tenants whose config names none."""
    users: dict[str, dict[str, bool]]
    """Whether a user is blocked, by tenant and user."""


class Keyring:
    """The principals by the hashes of their keys. The keys themselves are not kept, but for minted ones."""

    def __init__(
        self,
        tenants: Sequence[TenantConfig],
        groups: Sequence[GroupConfig] = (),
        *,
        open_access: bool,
        mints: bool = True,
        guessers_max: int = MEMBERS_MAX,
    ) -> None:
        """Take over the config. `mints`: mint missing keys. `guessers_max`: addresses whose wrong keys count."""
        self._mints = mints
        self._open_access = open_access
        self.held = KeyHolders({}, {}, {}, {}, {})
        """Holders of the keys of the config."""
        self._issued: Mapping[bytes, Principal] = {}
        self._revoked: Set[bytes] = frozenset()
        self._failed = LeakyCounts(WRONG_KEYS_PER_S, WRONG_KEYS_AT_ONCE_MAX, members_max=guessers_max)
        """Wrong keys by the address that sent them."""
        self._used_from: dict[bytes, str] = {}
        """Address of each key's last use."""
        self.tokens: TokenVerifier | None = None
        """Verifier of signed tokens; None if only keys are accepted."""
        self._verified: OrderedDict[bytes, Principal] = OrderedDict()
        """Principals of verified tokens, by the digests of the tokens."""
        self.on_learned: Callable[[Mapping[str, ModelQuotasConfig]], None] = lambda quotas: None
        """Callback after each `learn`: gets the quotas of issued keys by the names under which they are counted."""
        self.revision = 0
        """Number of configs taken over."""
        self.take_over(self.read(tenants, groups), open_access=open_access)

    def read(self, tenants: Sequence[TenantConfig], groups: Sequence[GroupConfig] = ()) -> KeyHolders:
        """Read from the config who holds which key, for `take_over`. Works in any thread, since there may be many keys.

        A tenant keeps its minted key until the config names one.
        """
        users = {one.name: {user.name: user.blocked for user in one.users} for one in tenants if one.users}
        read = KeyHolders({one.name: one for one in tenants}, {one.name: one for one in groups}, {}, {}, users)
        for tenant in tenants:
            keys = tenant.keys
            if not keys and self._mints:
                minted = read.minted[tenant.name] = self.held.minted.get(tenant.name) or new_key()
                keys = (KeyConfig(hash=hash_key(minted)),)
            for key in keys:
                read.principals[key.digest] = Principal.for_key(tenant, key)
        return read

    def take_over(self, read: KeyHolders, *, open_access: bool) -> None:
        """Replace the tenants and their keys. The `revision` changes, so `KeyReader` reads all issued keys again."""
        self._open_access = open_access
        if gone := self.held.tenants.keys() - read.tenants.keys():
            self._issued = {digest: one for digest, one in self._issued.items() if one.tenant not in gone}
        self.held = read
        self._verified.clear()
        self.revision += 1

    def holder(self, tenant: str, key: KeyConfig) -> Principal | None:
        """Return the holder of a key issued to this tenant; None if neither the config nor the key gives its weight."""
        found = self.held.tenants.get(tenant)
        if found is None and key.weight is not None:
            found = TenantConfig(name=tenant, weight=key.weight)
        return None if found is None else Principal.for_key(found, key)

    def learn(self, issued: Mapping[bytes, Principal], revoked: Set[bytes], *, logs: bool = False) -> None:
        """Replace the issued keys, by their digests, and the digests of revoked keys.

        Keys of the config may be revoked, too. `logs`: log the changes, which is not wanted at the start.
        """
        if logs:
            known = {**self.held.principals, **self._issued}
            _log("is made", [one for digest, one in issued.items() if digest not in known])
            gone = [one for digest, one in self._issued.items() if digest not in issued]
            _log("is revoked", gone + [known[digest] for digest in revoked - self._revoked if digest in known])
            renewed = [one for digest, one in issued.items() if digest in known and one != known[digest]]
            _log("has other terms", renewed)
        self._issued, self._revoked = issued, revoked
        self.on_learned({one.counts_as: one.quota for one in issued.values() if one.quota is not None})

    def takes(self, principal: Principal) -> bool:
        """Return whether the key of a request is still accepted, since it may be revoked while the request waits."""
        digest = principal.digest
        if digest in self._revoked or principal.twin_digest in self._revoked:
            return False
        if principal.issuer:
            if self.tokens is None or not self.tokens.knows(principal.issuer):
                return False
            tenant, groups = principal.tenant, principal.groups
            return tenant in self.held.tenants and (groups is None or self._is_within(tenant, groups))
        return self._open_access or digest in self.held.principals or digest in self._issued

    def present(self, principal: Principal) -> Principal:
        """Return the principal with the present terms of its key, if the key is still known."""
        return self.held.principals.get(principal.digest) or self._issued.get(principal.digest) or principal

    def check_user(self, tenant: str, user: str) -> None:
        """Raise ApiError if this user of the tenant is blocked."""
        users = self.held.users.get(tenant)
        if users is not None and user and users.get(user, users.get(ANYONE, False)):
            raise ApiError(Reason.USER_BLOCKED, "this user is blocked here; ask the operator of this gateway")

    def principal(self, key: bytes | None, address: str, unix_s: float, digest: bytes = b"") -> Principal:
        """Return the holder of the key that comes from this address at this time (in seconds since the epoch).

        Raise ApiError: 401, or 429 after too many wrong keys. `digest`: of the key, if it is known.
        """
        # A lookup by hash tells a guesser nothing by its timing: equal prefixes of keys have unrelated hashes.
        if key is not None and not digest:
            digest = sha256(key).digest()
        principal = self.held.principals.get(digest) or self._issued.get(digest) or self._verified.get(digest)
        is_revoked = digest in self._revoked or (principal is not None and principal.twin_digest in self._revoked)
        if principal is not None and not is_revoked:
            if self._used_from.get(digest) != address:
                self._moved(digest, address)
            if (error := expired(principal, unix_s)) is not None:
                raise error
            return principal
        if self.tokens is not None and key is not None and key.startswith(JSON_OBJECT) and not is_revoked:
            return self._of_token(self.tokens, key, digest, address)
        if self._open_access and not is_revoked:
            return _stranger(digest)
        if key is None:
            message = "no API key: send it as 'Authorization: Bearer KEY' (or 'x-api-key')"
            raise ApiError(Reason.INVALID_API_KEY, message)
        _refuse_guesser(self._failed.take(address, time.monotonic()))
        message = "this API key is not known here; ask the operator of this gateway for one"
        raise ApiError(Reason.INVALID_API_KEY, message)

    def _of_token(self, tokens: TokenVerifier, token: bytes, digest: bytes, address: str) -> Principal:
        """Return the holder of a new token, or raise ApiError. A wrong one counts as a wrong key: checks cost time."""
        if self._failed:
            _refuse_guesser(self._failed.wait_s(address, time.monotonic()))
        try:
            found = tokens.principal(token, self.held.tenants, self._is_within)
        except ApiError as error:
            if error.code is Reason.INVALID_API_KEY:
                _refuse_guesser(self._failed.take(address, time.monotonic()))
            raise
        if found.twin_digest in self._revoked:
            raise ApiError(Reason.INVALID_API_KEY, "this token is revoked; ask the operator")
        principal = self._verified[digest] = replace(found, digest=digest)
        if len(self._verified) > TOKENS_MAX:
            self._verified.popitem(last=False)
        return principal

    def _is_within(self, tenant: str, groups: Container[str]) -> bool:
        """Return whether this tenant is in one of these groups, or in a group inside one of them."""
        group = self.held.tenants[tenant].group
        while group is not None and group not in groups:
            group = self.held.groups[group].group
        return group is not None

    def _moved(self, digest: bytes, address: str) -> None:
        """Note that a key is used from a new address. Raise ApiError if that address sent too many wrong keys."""
        if self._failed:
            _refuse_guesser(self._failed.wait_s(address, time.monotonic()))  # a right guess must look like a wrong one
        if len(self._used_from) > USES_REMEMBERED_MIN + 2 * (len(self.held.principals) + len(self._issued)):
            self._used_from.clear()  # most entries are of keys that are gone
        self._used_from[digest] = address


@lru_cache(maxsize=TOKENS_MAX)
def _stranger(digest: bytes) -> Principal:
    """Return the tenant that a key names where access is open; `digest` is empty without a key."""
    return Principal(open_name(digest) if digest else "anonymous", 1.0, (DEFAULT_APP,), digest=digest)


def expired(principal: Principal, unix_s: float) -> ApiError | None:
    """Return the error for a key or token that has expired at this time, in seconds since the epoch, or None."""
    if unix_s < principal.expires_s:
        return None
    what, of = ("token", "its issuer") if principal.issuer else ("API key", "the operator")
    message = f"this {what} expired at {_in_utc(principal.expires_s)}; ask {of} for a new one"
    return ApiError(Reason.EXPIRED_API_KEY, message)


def _in_utc(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _log(what: str, keys: Sequence[Principal]) -> None:
    """Log a key event for each of these keys."""
    for one in keys[:LOGGED_MAX]:
        label = f" ({one.label})" if one.label else ""
        until = f", until {_in_utc(one.expires_s)}" if one.expires_s < inf else ""
        logger.info("key sha256:%s of %s%s %s%s", one.digest.hex(), one.tenant, label, what, until)
    if len(keys) > LOGGED_MAX:
        logger.info("keys that are not listed: %d; each %s", len(keys) - LOGGED_MAX, what)


def _refuse_guesser(wait_s: float) -> None:
    if wait_s:
        message = "too many wrong API keys came from your address; no other key is looked at for a while"
        raise ApiError(Reason.TOO_MANY_FAILED_KEYS, message, retry_after_s=wait_s)
