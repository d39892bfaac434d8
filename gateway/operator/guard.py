"""Who may ask the admin listener, and who may change anything there?"""

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
"""Probes have no token, and learn nothing that a request would not show. The page itself asks its reader for the
token."""
CHANGING = ("/reload", "/drain/", "/resume/")


def guard(config: Callable[[], Config]) -> Middleware:
    """Lets pass who sends the token that is configured now, and anybody to what is open.

    Without a token it answers on loopback only to those who call it by an address of this machine. A page in a browser
    may change nothing: it sends the origin that it is from. Where no token is asked for, other machines may look, and
    change nothing.
    """

    @web.middleware
    async def asks(request: web.Request, handler: Handler) -> web.StreamResponse:
        secret = config().admin_token
        token = secret.get_secret_value() if secret is not None else None
        try:
            is_strangers, is_of_other_page = _is_strangers(request), _is_of_other_page(request)
        except ValueError:
            return _refused(400, "its Host or Origin is none: write NAME:PORT, or SCHEME://NAME:PORT")
        if token is None and is_strangers:
            return _refused(
                421, "call it by an IP address or localhost: without an admin_token, no other name is answered to here"
            )
        if token is not None and request.path not in OPEN and not _has_token(request, token):
            error = (
                "send the config's admin_token as 'Authorization: Bearer TOKEN'; `fairgate explain` does with -c FILE"
            )
            return _refused(401, error, {"www-authenticate": "Bearer"})
        if request.method == "POST" and request.path.startswith(CHANGING):
            # Browsers let any page send a POST, and say on whose behalf.
            if is_of_other_page:
                return _refused(
                    403, "this request is from a page of another origin; send it with curl, or with `fairgate`"
                )
            if token is None and not is_loopback(request.remote or ""):
                error = "without an admin_token in the config, nothing is changed from other machines"
                return _refused(403, f"{error}: set one, or use SIGHUP")
        return await handler(request)

    return asks


def _refused(status: int, error: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": error}, status=status, headers=headers)


def _has_token(request: web.Request, token: str) -> bool:
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    sent = value.strip().encode("utf-8", "surrogateescape")
    return scheme.lower() == "bearer" and compare_digest(sent, token.encode())


def _is_of_other_page(request: web.Request) -> bool:
    """Does a browser send it on behalf of a page that is not ours? ValueError: that is not known."""
    origin = request.headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != request.host


def _is_strangers(request: web.Request) -> bool:
    """Has a web page made this request? A browser takes any name of its author's for this machine, if the name server
    says so (DNS rebinding), and lets the page read the answer. Such a page cannot choose an address as its name.
    ValueError: it is called by what is no name.
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
