"""The page at the root of the admin listener: static files.

They hold no secret, so they are served without the token. The page sends the token when it asks for data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from aiohttp import web

FOLDER: Final = Path(__file__).parent
TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
_FILES: Final = {
    "/" if path.name == "index.html" else f"/page/{path.name}": path
    for path in sorted(FOLDER.iterdir())
    if path.suffix in TYPES
}
PAGE_PATHS: Final = frozenset(_FILES)


def page() -> list[web.RouteDef]:
    """Return one route for each file."""
    return [_route(path, file.read_bytes(), TYPES[file.suffix]) for path, file in _FILES.items()]


def _route(path: str, body: bytes, content_type: str) -> web.RouteDef:
    async def file(request: web.Request) -> web.Response:
        return web.Response(body=body, headers={"content-type": content_type, **HEADERS})

    return web.get(path, file)
