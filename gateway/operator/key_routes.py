"""Routes that issue, rotate and revoke keys: /keys of the admin listener. Every replica knows within a second."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import ValidationError

from gateway.config.sections.keys import KeyConfig, hash_key, new_key
from gateway.keys.issued import KeyTable, TableFull, nobody_of, read_entry, take_back, unfit
from gateway.keys.rotation import CannotRotate, moment, rotate, seconds_of
from gateway.operator.operated import Operated
from gateway.storage.store_errors import StoreError

if TYPE_CHECKING:
    from gateway.config.model import Config

TERMS = ("tenant", "expires", "apps", "models", "weight", "label", "class", "quota")
ROTATION_TERMS = ("grace", "expires")


def key_routes(gateway: Operated) -> list[web.RouteDef]:
    """Return the routes, which need an `admin_token`: a client that issues a key can use the engines."""

    def table() -> KeyTable:
        if gateway.config.admin_token is None:
            raise _error(web.HTTPForbidden, "set admin_token in the config: without one nobody may make keys here")
        if gateway.keys is None:
            raise _error(web.HTTPNotFound, "the config has neither `usage:` nor `state: redis://...` to keep keys in")
        return gateway.keys

    async def listed(request: web.Request) -> web.Response:
        return web.json_response({"keys": await _listed(gateway.config, table())})

    async def made(request: web.Request) -> web.Response:
        keys = table()
        terms = await _terms(request, TERMS, 'send JSON such as {"tenant": "alice", "expires": "2027-01-31"}')
        tenant = str(terms.pop("tenant"))
        key = new_key()
        try:
            issued = KeyConfig.model_validate({"hash": hash_key(key), "created": moment(time.time()), **terms})
        except ValidationError as error:
            [found, *_] = error.errors(include_url=False)
            raise _error(web.HTTPBadRequest, f"{'.'.join(map(str, found['loc']))}: {found['msg']}") from None
        if (why := nobody_of(gateway.config, tenant, issued)) is not None:
            raise _error(web.HTTPBadRequest, f"the config {why}")
        if (unfit_term := unfit(gateway.config, issued, time.time(), _served(gateway))) is not None:
            raise _error(web.HTTPBadRequest, f"{unfit_term[0]}: {unfit_term[1]}")
        await keys.issue(issued, tenant)
        return web.json_response({"key": key, **_as_json(tenant, issued)}, status=201)

    async def rotated(request: web.Request) -> web.Response:
        keys = table()
        terms = await _terms(request, ROTATION_TERMS, 'send JSON such as {"grace": "24h"}, or {}')
        key = new_key()
        try:
            tenant, issued = await rotate(
                keys, gateway.config, request.match_info["hash"].lower(), hash_key(key), unix_s=time.time(),
                grace_s=seconds_of(str(terms.get("grace", "0s"))), expires=terms.get("expires"),
            )  # fmt: skip
        except CannotRotate as error:
            raise _error(web.HTTPBadRequest, str(error)) from None
        return web.json_response({"key": key, **_as_json(tenant, issued)}, status=201)

    async def revoked(request: web.Request) -> web.Response:
        keys, key_hash = table(), request.match_info["hash"].lower()
        named = {key.hash for tenant in gateway.config.tenants for key in tenant.keys}
        if not await take_back(keys, key_hash, is_named=key_hash in named):
            raise _error(web.HTTPNotFound, "no such key: give its hash, as GET /keys lists it")
        return web.json_response({"hash": key_hash, "revoked": True})

    return [
        web.get("/keys", _asking(listed)),
        web.post("/keys", _asking(made)),
        web.post("/keys/{hash}/rotate", _asking(rotated)),
        web.delete("/keys/{hash}", _asking(revoked)),
    ]


async def _listed(config: Config, keys: KeyTable) -> list[dict[str, object]]:
    """Return all keys, those of the config first."""
    revoked = {name.decode("utf-8", "replace"): noted == b"" async for name, noted in keys.entries()}
    uses = await keys.uses()

    def described(tenant: str, key: KeyConfig) -> dict[str, object]:
        used = {"used": moment(uses[key.hash])} if key.hash in uses else {}
        return {**_as_json(tenant, key), **used}

    found = [
        {**described(tenant.name, key), "from": "config", "revoked": revoked.get(key.hash, False)}
        for tenant in config.tenants
        for key in tenant.keys
    ]
    named = {each["hash"] for each in found}
    async for name, noted in keys.entries():
        try:
            tenant, key = read_entry(name, noted)
        except ValueError:
            continue  # the follower of the table says so in the log
        if key.hash not in named:
            found.append({**described(tenant, key), "from": keys.place, "revoked": not tenant})
    return found


def _asking(handler: Handler) -> Handler:
    """Wrap a handler so that it answers a StoreError with 409 if the table is full, else with 503."""

    async def asked(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except StoreError as error:
            kind = web.HTTPConflict if isinstance(error, TableFull) else web.HTTPServiceUnavailable
            raise _error(kind, str(error)) from error

    return asked


async def _terms(request: web.Request, known: Sequence[str], form: str) -> dict[str, Any]:
    """Return the JSON object of the request without nulls.

    Raise HTTPBadRequest if it has an unknown name, or if `known` has a tenant and the object has none.
    """
    try:
        terms = msgspec.json.decode(await request.read() or b"{}")  # strict: no half of a surrogate pair, no NaN
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        terms = None
    if not isinstance(terms, dict) or ("tenant" in known and not isinstance(terms.get("tenant"), str)):
        raise _error(web.HTTPBadRequest, form)
    for name in terms:
        if name not in known:
            raise _error(web.HTTPBadRequest, f"{name[:50]!r} is none of: {', '.join(known)}")
    return {name: value for name, value in terms.items() if value is not None}


def _served(gateway: Operated) -> list[str] | None:
    """Return the models that clients may ask for now, adapters included; None if any pool does not know its models."""
    served = [list(pool.models()) for pool in gateway.pools]
    return [*(model for models in served for model in models), *gateway.config.aliases] if all(served) else None


def _as_json(tenant: str, key: KeyConfig) -> dict[str, object]:
    return {"tenant": tenant, **key.model_dump(mode="json", exclude_none=True)}


def _error(kind: type[web.HTTPError], text: str) -> web.HTTPError:
    return kind(text=json.dumps({"error": text}), content_type="application/json")
