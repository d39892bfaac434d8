"""May a page in a browser call, and read the answer? Only from the configured origins."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from gateway.http.headers import Header, header_of
from gateway.http.http_request import HttpRequest

_MAX_AGE_S: Final = 600
_READABLE: Final = (
    b"x-request-id, retry-after, retry-after-ms, x-should-retry, x-ratelimit-limit-requests, "
    b"x-ratelimit-remaining-requests, x-ratelimit-reset-requests, x-ratelimit-limit-tokens, "
    b"x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
_NAMES: Final = re.compile(rb"[A-Za-z0-9_-]+(?: *, *[A-Za-z0-9_-]+)*")


class Cors:
    """The origins that may call. The browser's own credentials are never accepted, so a page needs a key of its own."""

    def __init__(self, origins: Sequence[str]) -> None:
        self.is_on = bool(origins)
        self._any = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def fields(self, request: HttpRequest) -> bytes:
        """Return the CORS header lines of every answer to this request."""
        origin = header_of(request.headers, b"origin")
        if not origin or not (self._any or origin in self._origins):
            return b"" if self._any else b"vary: origin\r\n"
        whom = b"access-control-allow-origin: *\r\n"
        if not self._any:
            whom = b"access-control-allow-origin: " + origin + b"\r\nvary: origin\r\n"
        return whom + b"access-control-expose-headers: " + _READABLE + b"\r\n"

    def preflight(self, request: HttpRequest, methods: str) -> list[Header]:
        """Return the header fields of the answer to a preflight request, by which a browser asks for permission to
        send."""
        if not request.answer_fields.startswith(b"access-control-"):
            return []
        found = [(b"access-control-allow-methods", methods.encode()), (b"access-control-max-age", b"%d" % _MAX_AGE_S)]
        names = header_of(request.headers, b"access-control-request-headers")
        if len(names) <= 4096 and _NAMES.fullmatch(names) is not None:
            found.append((b"access-control-allow-headers", names))
        return found
