"""Routes that issue, rotate and revoke keys: /keys of the admin listener. Every replica knows within a second."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from gateway.config.sections.keys import hash_key, new_key
from gateway.keys.issuance import KeyRefused, as_json, issue, list_keys, make_keys, revoke, rotate, seconds_of
from gateway.keys.issued import KeyTable, TableFull
from gateway.operator.operated import OperatedGateway
from gateway.storage.store_errors import StoreError

TERMS = ("tenant", "expires", "apps", "models", "weight", "label", "class", "quota")
ROTATION_TERMS = ("grace", "expires")


def key_routes(gateway: OperatedGateway) -> list[web.RouteDef]:
    """Return the routes, which need an `admin_token`: a client that issues a key can use the engines."""

    def table() -> KeyTable:
        if gateway.config.admin_token is None:
            raise _error(web.HTTPForbidden, "set admin_token in the config: without one nobody may make keys here")
        if gateway.keys is None:
            raise _error(web.HTTPNotFound, "the config has neither `usage:` nor `state: redis://...` to keep keys in")
        return gateway.keys

    async def all_keys(request: web.Request) -> web.Response:
        return web.json_response({"keys": await list_keys(table(), gateway.config)})

    async def created(request: web.Request) -> web.Response:
        keys = table()
        terms = await _terms(request, TERMS, 'send JSON such as {"tenant": "alice", "expires": "2027-01-31"}')
        made = make_keys(gateway.config, [terms.pop("tenant")], terms, _served(gateway))
        await issue(keys, made)
        [(tenant, text, key)] = made
        return web.json_response({"key": text, **as_json(tenant, key)}, status=201)

    async def rotated(request: web.Request) -> web.Response:
        keys, text = table(), new_key()
        terms = await _terms(request, ROTATION_TERMS, 'send JSON such as {"grace": "24h"}, or {}')
        tenant, key = await rotate(
            keys, gateway.config, request.match_info["hash"].lower(), hash_key(text), unix_s=time.time(),
            grace_s=seconds_of(str(terms.get("grace", "0s"))), expires=terms.get("expires"),
        )  # fmt: skip
        return web.json_response({"key": text, **as_json(tenant, key)}, status=201)

    async def revoked(request: web.Request) -> web.Response:
        keys, key_hash = table(), request.match_info["hash"].lower()
        try:
            await revoke(keys, gateway.config, key_hash)
        except KeyRefused as error:
            raise _error(web.HTTPNotFound, str(error)) from None
        return web.json_response({"hash": key_hash, "revoked": True})

    return [
        web.get("/keys", _asking(all_keys)),
        web.post("/keys", _asking(created)),
        web.post("/keys/{hash}/rotate", _asking(rotated)),
        web.delete("/keys/{hash}", _asking(revoked)),
    ]


def _asking(handler: Handler) -> Handler:
    """Wrap a handler so that it answers a refused key with 400, a full table with 409, another StoreError with 503."""

    async def asked(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except KeyRefused as error:
            raise _error(web.HTTPBadRequest, str(error)) from None
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


def _served(gateway: OperatedGateway) -> list[str] | None:
    """Return the models that clients may ask for now, adapters included; None if any pool does not know its models."""
    served = [list(pool.models()) for pool in gateway.pools]
    return [*(model for models in served for model in models), *gateway.config.aliases] if all(served) else None


def _error(kind: type[web.HTTPError], text: str) -> web.HTTPError:
    return kind(text=json.dumps({"error": text}), content_type="application/json")
