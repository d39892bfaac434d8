"""How are keys made and taken back by HTTP? /keys of the admin listener; every replica knows within a second."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import ValidationError

from gateway.config.keys import KeyConfig, hash_key, new_key
from gateway.keys.issued import KeyTable, TableFull, nobody_of, read_entry
from gateway.redis.errors import StoreError

if TYPE_CHECKING:
    from gateway.app import Gateway

__all__ = ["key_routes"]

TERMS = ("tenant", "expires", "apps", "models", "weight")


def key_routes(gateway: Gateway) -> list[web.RouteDef]:
    """Only where an admin_token is asked for: whoever makes a key can use the engines."""

    def table() -> KeyTable:
        if gateway.config.admin_token is None:
            raise _error(web.HTTPForbidden, "set admin_token in the config: without one nobody may make keys here")
        if gateway.keys is None:
            raise _error(web.HTTPNotFound, "the config has neither `usage:` nor `state: redis://...` to keep keys in")
        return gateway.keys

    async def listed(request: web.Request) -> web.Response:
        keys = table()
        revoked = {name.decode("utf-8", "replace"): noted == b"" async for name, noted in keys.entries()}
        found = [
            {**_shown(tenant.name, key), "from": "config", "revoked": revoked.get(key.hash, False)}
            for tenant in gateway.config.tenants
            for key in tenant.keys
        ]
        named = {each["hash"] for each in found}
        async for name, noted in keys.entries():
            try:
                tenant, key = read_entry(name, noted)
            except ValueError:
                continue  # whoever follows the table says so in the log
            if key.hash not in named:
                found.append({**_shown(tenant, key), "from": keys.place, "revoked": not tenant})
        return web.json_response({"keys": found})

    async def made(request: web.Request) -> web.Response:
        keys = table()
        tenant, terms = await _terms(request)
        key = new_key()
        try:
            issued = KeyConfig.model_validate({"hash": hash_key(key), **terms})
        except ValidationError as error:
            [found, *_] = error.errors(include_url=False)
            raise _error(web.HTTPBadRequest, f"{'.'.join(map(str, found['loc']))}: {found['msg']}") from None
        if (why := nobody_of(gateway.config, tenant, issued)) is not None:
            raise _error(web.HTTPBadRequest, f"the config {why}")
        await keys.issue(issued, tenant)
        return web.json_response({"key": key, **_shown(tenant, issued)}, status=201)

    async def revoked(request: web.Request) -> web.Response:
        keys, key_hash = table(), request.match_info["hash"].lower()
        named = {key.hash for tenant in gateway.config.tenants for key in tenant.keys}
        if key_hash in named:
            await keys.revoke(key_hash)
        elif await keys.entry(key_hash) is not None:
            await keys.forget(key_hash)
        else:
            raise _error(web.HTTPNotFound, "no such key: give its hash, as GET /keys lists it")
        return web.json_response({"hash": key_hash, "revoked": True})

    return [
        web.get("/keys", _asking(listed)),
        web.post("/keys", _asking(made)),
        web.delete("/keys/{hash}", _asking(revoked)),
    ]


def _asking(handler: Handler) -> Handler:
    """With an answer for a table that cannot be asked."""

    async def asked(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except StoreError as error:
            kind = web.HTTPConflict if isinstance(error, TableFull) else web.HTTPServiceUnavailable
            raise _error(kind, str(error)) from error

    return asked


async def _terms(request: web.Request) -> tuple[str, dict[str, object]]:
    """The tenant, and the terms of its key."""
    try:
        terms = json.loads(await request.read())
    except (ValueError, RecursionError):
        terms = None
    if not isinstance(terms, dict) or not isinstance(terms.get("tenant"), str):
        raise _error(web.HTTPBadRequest, 'send JSON such as {"tenant": "alice", "expires": "2027-01-31"}')
    for name in terms:
        if name not in TERMS:
            raise _error(web.HTTPBadRequest, f"{name[:50]!r} is none of: {', '.join(TERMS)}")
    return terms.pop("tenant"), {name: value for name, value in terms.items() if value is not None}


def _shown(tenant: str, key: KeyConfig) -> dict[str, object]:
    return {"tenant": tenant, **key.model_dump(mode="json", exclude_none=True)}


def _error(kind: type[web.HTTPError], text: str) -> web.HTTPError:
    return kind(text=json.dumps({"error": text}), content_type="application/json")
