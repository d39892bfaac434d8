"""What does a head say, and which header fields cross the gateway? Fields are lists of (lower-cased name, value).

Fields are dropped if they belong to one connection (RFC 9110, 7.6.1), identify the tenant, or would steer the engine.
"""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime
from typing import Final

from backends.client.recurring_head import RecurringHead

Header = tuple[bytes, bytes]

_HOP_BY_HOP: Final = frozenset({
    b"connection", b"content-length", b"http2-settings", b"keep-alive", b"te", b"trailer", b"transfer-encoding",
    b"upgrade",
})  # fmt: skip

REQUEST_DROPPED: Final = _HOP_BY_HOP | {
    b"accept-encoding",  # the relay reads usage from the answer, so the answer must not be compressed
    b"api-key",
    b"authorization",
    b"cookie",
    b"endpoint-load-metrics-format",
    b"expect",
    b"forwarded",
    b"host",
    b"origin",  # browsers get their answers from Cors
    b"x-api-key",
    b"x-data-parallel-rank",
    b"x-override-priority",
    b"x-real-ip",
    b"x-request-id",  # the engine adopts it as its own id, so a client's value could collide
    b"x-session-id",
    b"x-vllm-priority",
}

# These fields reveal the engine's login, address, software or neighbours, or set rules for our clients' browsers.
# Framing and connection fields are the server's own.
RESPONSE_DROPPED: Final = _HOP_BY_HOP | {
    b"access-control-allow-credentials", b"access-control-allow-headers", b"access-control-allow-methods",
    b"access-control-allow-origin", b"access-control-expose-headers", b"access-control-max-age", b"alt-svc",
    b"authentication-info", b"clear-site-data", b"content-location", b"date", b"endpoint-load-metrics", b"location",
    b"nel", b"refresh", b"report-to", b"reporting-endpoints", b"server", b"set-cookie",
    b"strict-transport-security", b"via", b"www-authenticate", b"x-aspnet-version", b"x-powered-by",
    b"x-request-id", b"x-runtime",
}  # fmt: skip

_DROPPED_PREFIXES: Final = (b"proxy-", b"x-fairgate-", b"x-forwarded-")
RETRY_AFTER_S_MAX: Final = 86_400.0
_P: Final = 0x70
_X: Final = 0x78
_PLAIN_CONNECTION: Final = frozenset({b"close", b"keep-alive", b""})


def bearer_key(headers: list[Header]) -> bytes | None:
    """Return the client's API key from `Authorization: Bearer`, else `x-api-key`, else `api-key`, or None without a
    key."""
    found: bytes | None = None
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer" and key.strip():
                return key.strip()
        elif name == b"x-api-key" or (name == b"api-key" and found is None):
            found = value.strip() or found
    return found


def content_type(headers: list[Header]) -> bytes:
    """Return the content-type in lower case, empty without one."""
    return header_of(headers, b"content-type").lower()


def header_of(headers: list[Header], name: bytes) -> bytes:
    """Return the first value of this field, empty without one."""
    for each, value in headers:
        if each == name:
            return value
    return b""


def retry_after_s(headers: list[Header]) -> float:
    """Return the engine's `retry-after` in seconds, 0.0 if it is missing or not understood."""
    said = header_of(headers, b"retry-after").decode("latin-1").strip()
    try:
        wait_s = float(said) if said[:1].isdigit() else parsedate_to_datetime(said).timestamp() - time.time()
    except (ValueError, OverflowError):
        return 0.0
    return min(max(0.0, wait_s), RETRY_AFTER_S_MAX)


def is_json(kind: bytes) -> bool:
    """Return whether content of this content-type is one JSON value."""
    return kind.partition(b";")[0].rstrip().endswith((b"/json", b"+json"))


def forwarded(headers: list[Header], dropped: frozenset[bytes]) -> list[Header]:
    """Return the fields that are forwarded: neither `dropped` nor named by `connection`."""
    kept = []
    named: list[bytes] = []
    for field in headers:
        name = field[0]
        if name not in dropped:
            initial = name[0]  # the initial first: this runs for every field, and most names have neither of these
            if (initial != _P and initial != _X) or not name.startswith(_DROPPED_PREFIXES):
                kept.append(field)
        elif name == b"connection" and field[1] not in _PLAIN_CONNECTION:
            named += [token.strip() for token in field[1].lower().split(b",")]
    if not named:
        return kept
    return [field for field in kept if field[0] not in named]


def is_text(kind: bytes) -> bool:
    """Return whether an answer of this content-type is text, rather than sound or pictures."""
    return not kind or kind.startswith(b"text/") or b"json" in kind


class Head(RecurringHead):
    """The head of one request. Header names are lower-cased and in order, without `content-length`, which belongs to
    the body.

    Attributes:
        method, target, path, query: as sent.
        version: HTTP version, `1.0` or `1.1`.
        client_id: the client's own id of the request; empty if it is not well-formed.
        digest: hash of the key, once the key's holder is known.
        named: the fields that fairgate reads, by name; None until they are looked up.
    """

    __slots__ = (
        "_forwarded", "_key", "client_id", "digest", "expects_continue", "headers", "keep_alive",
        "method", "named", "path", "query", "target", "version",
    )  # fmt: skip

    def __init__(self, path: str, headers: list[Header]) -> None:
        """Create a head whose other attributes the reader fills in."""
        super().__init__()
        self.method = ""
        self.target = self.query = b""
        self.path = path
        self.version = "1.1"
        self.headers = headers
        self.client_id = ""
        self.keep_alive = self.expects_continue = False
        self.digest = b""
        self.named: dict[bytes, bytes] | None = None
        self._key: list[bytes | None] = []
        self._forwarded = b""

    def key(self) -> bytes | None:
        """Return the API key that the client presents."""
        if not self._key:
            self._key.append(bearer_key(self.headers))
        return self._key[0]

    def forwarded(self) -> bytes:
        """Return the first line and the forwarded fields, which are equal for all engines and for all requests with
        this head."""
        if not self._forwarded:
            self._forwarded = self.lines(forwarded(self.headers, REQUEST_DROPPED))
        return self._forwarded

    def lines(self, fields: list[Header]) -> bytes:
        """Return the first line and these fields."""
        parts = [self.method.encode(), b" ", self.target, b" HTTP/1.1\r\n"]
        for name, value in fields:
            parts += (name, b": ", value, b"\r\n")
        return b"".join(parts)
