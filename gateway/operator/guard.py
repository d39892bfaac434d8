"""Who may use the admin listener, and who may change anything there?"""

from __future__ import annotations

from collections.abc import Callable
from hmac import compare_digest
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gateway.config.checks import is_loopback
from gateway.config.model import Config
from gateway.operator.page.files import PAGE_PATHS

OPEN = frozenset(("/health", "/ready")) | PAGE_PATHS
"""Paths that need no token: probes learn nothing that a request would not show, and the page asks for the token."""


def guard(config: Callable[[], Config]) -> Middleware:
    """Return middleware that admits requests with the token of the current config, and any request to an open path.

    Without a configured token a loopback listener answers only requests whose Host is an IP address or localhost, and
    only loopback clients may change anything. A page of another origin may change nothing: its browser sends that
    origin.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Reject a request without the token, or from another origin; pass all others to the handler."""
        secret = config().admin_token
        token = secret.get_secret_value() if secret is not None else None
        try:
            has_foreign_host, is_cross_origin = _has_foreign_host(request), _is_cross_origin(request)
        except ValueError:
            return _rejection(400, "the Host or Origin header is malformed: write NAME:PORT, or SCHEME://NAME:PORT")
        if token is None and has_foreign_host:
            return _rejection(
                421, "call it by an IP address or localhost: without an admin_token, no other name is answered to here"
            )
        if token is not None and request.path not in OPEN and not _has_token(request, token):
            error = (
                "send the config's admin_token as 'Authorization: Bearer TOKEN'; `fairgate explain` does with -c FILE"
            )
            return _rejection(401, error, {"www-authenticate": "Bearer"})
        if request.method == "POST":  # All of them change something.
            # Browsers let any page send a POST, but they name the page's origin.
            if is_cross_origin:
                return _rejection(
                    403, "this request is from a page of another origin; send it with curl, or with `fairgate`"
                )
            if token is None and not is_loopback(request.remote or ""):
                error = "without an admin_token in the config, nothing is changed from other machines"
                return _rejection(403, f"{error}: set one, or use SIGHUP")
        return await handler(request)

    return check


def _rejection(status: int, error: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": error}, status=status, headers=headers)


def _has_token(request: web.Request, token: str) -> bool:
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    sent = value.strip().encode("utf-8", "surrogateescape")
    return scheme.lower() == "bearer" and compare_digest(sent, token.encode())


def _is_cross_origin(request: web.Request) -> bool:
    """Return whether a browser sends this for a page of another origin. Raise ValueError if Origin is malformed."""
    origin = request.headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != request.host


def _has_foreign_host(request: web.Request) -> bool:
    """Return whether a loopback listener was called by a name that is no IP address and not localhost.

    A foreign page can make a browser resolve the page's own host name to this machine (DNS rebinding), and then read
    the answers. Such a page cannot use an IP address as its host name. Raise ValueError if Host is malformed.
    """
    own = request.transport.get_extra_info("sockname") if request.transport is not None else None
    name = request.url.host or ""
    if not own or not is_loopback(own[0]) or is_loopback(name) or name.endswith(".localhost"):
        return False
    try:
        ip_address(name)
    except ValueError:
        return True
    return False
