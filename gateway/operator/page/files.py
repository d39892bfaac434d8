"""The page at the root of the admin listener: static files.

They hold no secret, so they are served without the token. The page sends the token when it asks for data.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
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
    return [web.get(path, partial(_file, *found)) for path, found in contents(_FILES).items()]


def contents(files: Mapping[str, Path]) -> dict[str, tuple[dict[str, str], bytes]]:
    """Return the header fields and the body of each file, by its path in URLs."""
    return {path: ({"content-type": TYPES[file.suffix], **HEADERS}, file.read_bytes()) for path, file in files.items()}


async def _file(headers: dict[str, str], body: bytes, request: web.Request) -> web.Response:
    return web.Response(body=body, headers=headers)
