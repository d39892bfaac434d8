"""A strict reader of HTTP/1.1 requests, without I/O: what does a client ask, and where does its request end?

llhttp (through httptools) parses. It never gets a byte beyond the request that it reads, so nothing after a request is
interpreted before that request is answered. Ambiguities that llhttp tolerates are refused here. Every refusal ends the
connection: after a doubt about framing no later byte can be trusted.
"""

from __future__ import annotations

import re
from io import BytesIO
from typing import Final

import httptools

from gateway.http.accounts import ServerLimits
from gateway.http.errors import ApiError, Reason
from gateway.http.headers import Head, Header
from gateway.telemetry.record import RequestRecord


class HttpRequest(RequestRecord):
    """An HTTP request. The body is counted for the tenant that the head hook found.

    Attributes:
        head: the head, which other requests of the connection may share.
        peer: address of the connection's other end, which is a client or a proxy.
        body_follows: whether a body follows, known before it is read.
        answer_fields: header lines that the head hook adds to any answer.
    """

    body: bytes = b""
    body_follows: bool = False
    answer_fields: bytes = b""

    def __init__(self, peer: str, head: Head) -> None:
        """Create a request. An unreadable head leaves most attributes empty."""
        self.head = head
        self.method = head.method
        self.path = head.path
        self.headers = head.headers
        self.client_id = head.client_id
        self.peer = peer
        self.client = peer


_END_OF_HEAD: Final = b"\r\n\r\n"
_CR: Final = 0x0D
_SPACE: Final = 0x20
_SLASH: Final = 0x2F
_REQUEST_LINE: Final = re.compile(rb"([A-Z][A-Z-]*) (/[!\"$-~]*|\*|https?://[!\"$-~]+) HTTP/1\.([01])\r\n")
_ABSOLUTE: Final = re.compile(rb"https?://([^/?]+)(.*)")
_OTHER_VERSION: Final = re.compile(rb"[^\r\n]* HTTP/(?!1\.[01]\r\n)[0-9](?:\.[0-9])?\r\n")
_REQUEST_LINE_EXTRA_BYTES: Final = 40  # method, spaces and version around a target
_HOPELESS: Final = re.compile(rb"(?<!\r)\n|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_HOST_BYTES: Final = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~%!$&'()*+;=:[]"
_READ_HERE: Final = frozenset({
    b"host", b"content-length", b"transfer-encoding", b"connection", b"expect", b"x-request-id",
    b"content-encoding",
})  # fmt: skip
_UPGRADE: Final = re.compile(rb"\r\nupgrade:[^\r]*", re.IGNORECASE)
_LENGTH_DIGITS_MAX: Final = 32
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:+/=-]{1,128}")
_CHUNK_HEAD: Final = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[^\r\n]*)?\r\n")
_CHUNK_LINE_BYTES_MAX: Final = 16384
_CHUNK_OVERHEAD_BYTES: Final = 16384
_CHUNK_OVERHEAD_RATIO: Final = 8
"""Most bytes of a chunked body on the wire per byte of content (one-byte chunks take 6), beyond the bytes above."""


def _malformed(what: str) -> ApiError:
    return ApiError(Reason.MALFORMED_HTTP, f"The request is not well-formed HTTP/1.1: {what}")


class RequestReader:
    """The reader of one connection's requests, in turn: `take_head`, `take_body` until `complete`, `reset`.

    Both take the request's bytes from `data` at `at` and return where they stopped. Every refusal is an `ApiError`,
    after which the reader must not be used.
    """

    __slots__ = (
        "_announced_bytes", "_body", "_chunk_left", "_chunked", "_ended", "_head", "_headers", "_host", "_in_trailers",
        "_kind", "_left", "_length", "_limits", "_line", "_parser", "_peer", "_wire_bytes", "body_bytes", "complete",
        "is_known", "partial", "path", "request",
    )  # fmt: skip

    def __init__(self, limits: ServerLimits, peer: str, kind: type[HttpRequest] = HttpRequest) -> None:
        self._limits = limits
        self._kind = kind
        self._peer = peer
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._host = b""
        """The last well-formed host: a client names one host every time."""
        self.partial = b""
        """The beginning of an incomplete head."""
        self._head: Head | None = None
        """The last head, if a repetition of it can be recognised."""
        self.reset()

    def reset(self) -> None:
        """Prepare for the next request."""
        self.request: HttpRequest | None = None
        self.path = ""
        """The path as soon as it is known. Errors are written in the format of its API."""
        self.complete = False
        self.body_bytes = 0
        self._headers: list[Header] = []
        self._length = b""
        self._body: bytes | BytesIO = b""
        self._chunked = False
        self._left = 0
        """Missing bytes of a body of known length."""
        self.is_known = False
        """Whether the head was recognised. llhttp then does not see the request."""
        self._chunk_left = 0
        """Missing bytes of a chunk, its line end included."""
        self._line = b""
        """The beginning of an incomplete chunk line or trailer."""
        self._in_trailers = False
        self._announced_bytes = 0
        self._ended = False
        """Whether the announced body is complete."""
        self._wire_bytes = 0

    def close(self) -> None:
        """Drop the parser, which refers back to the reader."""
        self._parser = self._head = None
        self.partial = b""

    # callbacks of llhttp, which decide nothing

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.request is None:  # a later field is a trailer, which must never pass for a header field
            if value and value[-1] <= _SPACE:
                value = value.rstrip(b" \t")
            self._headers.append((name.lower(), value))

    def on_body(self, data: bytes) -> None:
        self.body_bytes += len(data)
        if not self._body:
            self._body = data
            return
        if isinstance(self._body, bytes):
            first = self._body
            self._body = BytesIO()  # its getvalue() copies nothing
            self._body.write(first)
        self._body.write(data)

    def on_message_complete(self) -> None:
        self.complete = True

    # the head

    def take_head(self, data: bytes, at: int) -> int:
        """Take a head and set `request`, or keep an incomplete head in `partial`."""
        head = self._head
        if head is not None and not self.partial:
            end, length = head.found(data, at)
            if end and end - at <= self._limits.header_bytes_max:
                self.is_known, self._left = True, length
                self._begin(head)
                return end
        if self.partial:
            known = len(self.partial)
            data, at, consumed = self.partial + data[at:], 0, at - known
        else:
            known, consumed = 0, 0
        while at < len(data) and data[at] == _CR and data.startswith(b"\r\n", at):
            at += 2  # RFC 9112, 2.2: a server ignores empty lines before a request
        end = data.find(_END_OF_HEAD, at)
        size = (end if end >= 0 else len(data)) - at
        if size > self._limits.header_bytes_max:
            raise self._too_large(data, at)
        if end < 0:
            self._refuse_hopeless(data, at, known)
            self.partial = data[at:]
            return len(data) + consumed
        end += len(_END_OF_HEAD)
        self._parse_head(data[at:end])
        self.partial = b""
        return end + consumed

    def _too_large(self, data: bytes, at: int) -> ApiError:
        line_bytes_max = self._limits.target_bytes_max + _REQUEST_LINE_EXTRA_BYTES
        if data.find(b"\r\n", at, at + line_bytes_max) < 0:
            return self._target_too_long()
        limit = self._limits.header_bytes_max
        return ApiError(Reason.HEADERS_TOO_LARGE, f"The request's header is larger than {limit} bytes.")

    def _body_too_large(self) -> ApiError:
        return ApiError(Reason.BODY_TOO_LARGE, f"The body is larger than {self._limits.body_bytes_max} bytes.")

    def _target_too_long(self) -> ApiError:
        limit = self._limits.target_bytes_max
        return ApiError(Reason.TARGET_TOO_LONG, f"The request target is longer than {limit} bytes.")

    @staticmethod
    def _refuse_hopeless(data: bytes, at: int, known: int) -> None:
        """Refuse an incomplete head that cannot become valid (TLS, bare line feeds, no method), without waiting for its
        end."""
        if _HOPELESS.search(data, max(at, known)) or not (data[at : at + 1].isupper() or data[at : at + 1] in b"\r"):
            raise _malformed("expected a request line and header fields, each ended by CR LF.")

    def _parse_head(self, data: bytes) -> None:
        line = _REQUEST_LINE.match(data)
        if line is None:
            raise self._bad_request_line(data)
        method, target, minor = line.groups()
        if len(target) > self._limits.target_bytes_max:
            raise self._target_too_long()
        if target[0] != _SLASH:
            target = self._other_form(method, target)
        path, _, query = target.partition(b"?")
        self.path = path.decode("ascii")
        self._feed_head(data)
        if len(self._headers) > self._limits.headers_count_max:
            count = self._limits.headers_count_max
            raise ApiError(Reason.HEADERS_TOO_LARGE, f"The request has more than {count} header fields.")
        head = Head(self.path, self._headers)
        head.method = method.decode("ascii")
        head.target = target
        head.query = query
        head.version = "1.1" if minor == b"1" else "1.0"
        self._read_framing(head)
        self._begin(head)
        self._head = head if self._left and head.keep_alive and head.keep(data, self._length) else None

    def _begin(self, head: Head) -> None:
        """Begin a request with a well-formed head. Raise ApiError if its body is too large."""
        if self._left > self._limits.body_bytes_max:
            raise self._body_too_large()
        self.path = head.path
        self.request = self._kind(self._peer, head)
        self.request.body_follows = not self.complete

    @staticmethod
    def _other_form(method: bytes, target: bytes) -> bytes:
        """Return the target in origin form (RFC 9112, 3.2), or `*`. The authority of an absolute target is checked and
        dropped."""
        absolute = _ABSOLUTE.fullmatch(target)
        if absolute is None:
            if method != b"OPTIONS":
                raise _malformed("only OPTIONS may ask for '*'.")
            return target
        if method == b"CONNECT":
            raise ApiError(Reason.NOT_IMPLEMENTED, "CONNECT is not offered here.")
        authority, rest = absolute.groups()
        if authority.translate(None, _HOST_BYTES):
            raise _malformed("the authority in the target is not a host and port.")
        if rest[:1] == b"/":
            return bytes(rest)
        return b"*" if method == b"OPTIONS" and not rest else b"/" + rest

    def _feed_head(self, head: bytes) -> None:
        """Feed a head to llhttp, without its Upgrade field, at which llhttp would stop. A server may ignore Upgrade
        (RFC 9110, 7.8)."""
        try:
            self._feed(head)
        except httptools.HttpParserUpgrade:
            self._parser = httptools.HttpRequestParser(self)
            self._headers = []
            self.complete = False
            self._feed(_UPGRADE.sub(b"", head))

    @staticmethod
    def _bad_request_line(head: bytes) -> ApiError:
        if _OTHER_VERSION.match(head):
            return ApiError(Reason.VERSION_NOT_SUPPORTED, "This server speaks HTTP/1.1 and HTTP/1.0 only.")
        if head.startswith(b"CONNECT "):
            return ApiError(Reason.NOT_IMPLEMENTED, "CONNECT is not offered here.")
        return _malformed("expected 'METHOD /path HTTP/1.1'.")

    def _feed(self, data: bytes) -> None:
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserInvalidMethodError as error:
            raise ApiError(Reason.NOT_IMPLEMENTED, "This method is not known here.") from error
        except httptools.HttpParserError as error:
            raise _malformed(f"{error}.") from error

    def _read_framing(self, head: Head) -> None:
        """Read the fields that rule the connection and the client's id. llhttp has refused contradictory lengths."""
        hosts = 0
        keep_alive = is_http11 = head.version == "1.1"
        for name, value in head.headers:
            if name not in _READ_HERE:
                continue
            if name == b"host":
                hosts += 1
                if value != self._host:
                    if value.translate(None, _HOST_BYTES):
                        raise _malformed("the Host field is not a host and port.")
                    self._host = value
            elif name == b"content-length":
                if len(value) > _LENGTH_DIGITS_MAX:
                    raise _malformed("the Content-Length has too many digits.")
                self._length, self._left = value, int(value)
            elif name == b"transfer-encoding":
                self._read_coding(value.lower(), is_http11)
            elif name == b"connection":
                tokens = value.lower()
                keep_alive = (keep_alive or b"keep-alive" in tokens) and b"close" not in tokens
            elif name == b"content-encoding":
                if not self.complete and value.lower() not in (b"", b"identity"):
                    message = "Bodies are not decompressed here; send it without Content-Encoding."
                    taken = [(b"accept-encoding", b"identity")]
                    raise ApiError(Reason.ENCODING_NOT_SUPPORTED, message, fields=taken)
            elif name == b"x-request-id":
                head.client_id = value.decode("ascii") if _REQUEST_ID.fullmatch(value) is not None else ""
            elif value.lower() != b"100-continue":
                raise ApiError(Reason.EXPECTATION_FAILED, "The only expectation this server knows is 100-continue.")
            else:
                head.expects_continue = is_http11
        if hosts > 1 or (hosts == 0 and is_http11):
            raise _malformed("exactly one Host field is needed.")
        if self._length:
            head.headers.remove((b"content-length", self._length))
        head.keep_alive = keep_alive

    def _read_coding(self, coding: bytes, is_http11: bool) -> None:
        """Check the Transfer-Encoding: only chunked, once, and not in HTTP/1.0. Raise ApiError."""
        if not is_http11:
            raise _malformed("HTTP/1.0 has no Transfer-Encoding.")
        if self._chunked:
            raise _malformed("Transfer-Encoding is given twice.")
        if coding != b"chunked":
            raise ApiError(Reason.NOT_IMPLEMENTED, "The only transfer coding this server knows is 'chunked'.")
        self._chunked = True

    # the body

    def take_body(self, data: bytes, at: int) -> int:
        """Take the body's bytes. The body's end sets `complete` and `request.body`."""
        if self._chunked:
            end = self._end_of_chunks(data, at)
        else:
            end = min(len(data), at + self._left)
            self._left -= end - at
            self._ended = not self._left
        piece = data if at == 0 and end == len(data) else data[at:end]
        if self.is_known:
            self.on_body(piece)
            self.complete = self._ended
        else:
            self._feed(piece)
        if self.complete != self._ended:
            raise _malformed("where its body ends is not clear.")
        if self._chunked:
            self._wire_bytes += end - at
            if self._wire_bytes > _CHUNK_OVERHEAD_RATIO * self.body_bytes + _CHUNK_OVERHEAD_BYTES:
                raise _malformed("the chunked body is mostly chunk extensions and trailers.")
        if self.complete:
            assert self.request is not None
            body = self._body
            self.request.body = body if isinstance(body, bytes) else body.getvalue()
            self._body = b""
        return end

    def _end_of_chunks(self, data: bytes, at: int) -> int:
        """Return the end of the bytes that belong to a chunked body."""
        size = len(data)
        while at < size:
            if self._chunk_left:
                step = min(self._chunk_left, size - at)
                self._chunk_left -= step
                at += step
                continue
            end = data.find(b"\n", at) + 1
            line = self._line + data[at : end or size]
            if len(line) > _CHUNK_LINE_BYTES_MAX:
                raise _malformed("the line of a chunk or a trailer is too long.")
            if not end:
                self._line = line
                return size
            self._line, at = b"", end
            if not self._in_trailers:
                self._begin_chunk(line)
            elif line == b"\r\n":
                self._ended = True
                return at
        return size

    def _begin_chunk(self, line: bytes) -> None:
        """Begin an announced chunk. Raise ApiError if the body gets too large."""
        head = _CHUNK_HEAD.fullmatch(line)
        if head is None:
            raise _malformed("expected the size of a chunk, ended by CR LF.")
        chunk_bytes = int(head.group(1), 16)
        self._announced_bytes += chunk_bytes
        if self._announced_bytes > self._limits.body_bytes_max:
            raise self._body_too_large()
        if chunk_bytes:
            self._chunk_left = chunk_bytes + 2
        else:
            self._in_trailers = True
