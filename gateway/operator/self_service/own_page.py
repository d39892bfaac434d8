"""The page of /fairgate/me: static files without data of any tenant. The page asks its reader for the key."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gateway.operator.page.files import FOLDER, HEADERS, TYPES

PATH: Final = "/fairgate/me/page"
_OWN: Final = Path(__file__).parent / "page"
_OF_OPERATOR: Final = ("page.css", "stream.js", "words.js", "requests.js", "usage.js", "icon.svg")
"""Files of the operator's page that this page uses too."""


def own_page() -> dict[str, tuple[list[tuple[bytes, bytes]], bytes]]:
    """Return the fields and the body of each file by its path."""
    files = {PATH: _OWN / "me.html", f"{PATH}/me.js": _OWN / "me.js"}
    files |= {f"{PATH}/{name}": FOLDER / name for name in _OF_OPERATOR}
    return {path: (_fields(TYPES[file.suffix]), file.read_bytes()) for path, file in files.items()}


def _fields(content_type: str) -> list[tuple[bytes, bytes]]:
    fields = {"content-type": content_type, **HEADERS}
    return [(name.encode(), value.encode()) for name, value in fields.items()]
