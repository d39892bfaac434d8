"""What RFC 9110 and 9112 ask of a server in front of others: a request, and what is to become of it.

Each case: the bytes, the status of the answer (0: none yet), whether the connection ends, and the request line that
reaches the engine.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.http.corpus import REFUSED

FOLLOWER = b"GET /version?next HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer known\r\nConnection: close\r\n\r\n"
"""A good request, sent right behind a case."""
FOLLOWS = b"GET /version?next HTTP/1.1"


class Outcome(NamedTuple):
    """Of a case with the follower right behind it: what the client is answered, and what reaches the engine."""

    statuses: tuple[int, ...]
    reached: tuple[bytes, ...]


class Case(NamedTuple):
    sent: bytes
    status: int
    closes: bool
    reaches: bytes | None = None

    @property
    def outcome(self) -> Outcome:
        reached = () if self.reaches is None else (self.reaches,)
        if self.closes:
            return Outcome((self.status,), reached)
        return Outcome((self.status, 200), (*reached, FOLLOWS))


BODY = b'{"model":"simulated","messages":[{"role":"user","content":"x"}]}'
KEY = b"Host: x\r\nAuthorization: Bearer known\r\n"
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKS = b"\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"
WORK = b"POST /v1/chat/completions HTTP/1.1"
READ = b"GET /version HTTP/1.1"

ASKED: dict[str, Case] = {
    # RFC 9112, 2.2: lines
    "an empty line before a request is forgiven": Case(b"\r\n" + WORK + b"\r\n" + KEY + LENGTH, 200, False, WORK),
    # 9112, 2.3: versions
    "HTTP/1.0 is answered and ends": Case(b"GET /version HTTP/1.0\r\n" + KEY + b"\r\n", 200, True, READ),
    "HTTP/1.0 ends, too, where the length of the answer is not known": Case(
        b"GET /version HTTP/1.0\r\nConnection: keep-alive\r\n" + KEY + b"\r\n", 200, True, READ
    ),
    # 9110, 9.1: methods
    "a method that is not offered there": Case(b"DELETE /version HTTP/1.1\r\n" + KEY + b"\r\n", 405, False),
    "TRACE is not offered": Case(b"TRACE /version HTTP/1.1\r\n" + KEY + b"\r\n", 405, False),
    "HEAD comes with GET": Case(
        b"HEAD /version HTTP/1.1\r\n" + KEY + b"\r\n", 200, False, b"HEAD /version HTTP/1.1"
    ),
    "OPTIONS needs no key": Case(b"OPTIONS /version HTTP/1.1\r\nHost: x\r\n\r\n", 204, False),
    "OPTIONS of nothing": Case(b"OPTIONS /nowhere HTTP/1.1\r\nHost: x\r\n\r\n", 404, False),
    "content of a GET is refused, unread": Case(
        b"GET /version HTTP/1.1\r\n" + KEY + b"Content-Length: 5\r\n\r\nhello", 400, True
    ),
    "a GET may say that it has none": Case(
        b"GET /version HTTP/1.1\r\n" + KEY + b"Content-Length: 0\r\n\r\n", 200, False, READ
    ),
    # 9112, 3.2: targets
    "absolute form": Case(
        b"GET http://y/version?a HTTP/1.1\r\n" + KEY + b"\r\n", 200, False, b"GET /version?a HTTP/1.1"
    ),
    "absolute form in TLS's scheme": Case(b"GET https://y:8/version HTTP/1.1\r\n" + KEY + b"\r\n", 200, False, READ),
    "asterisk form": Case(b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", 204, False),
    "asterisk form of an absolute target": Case(b"OPTIONS http://x HTTP/1.1\r\nHost: x\r\n\r\n", 204, False),
    # 9112, 5 and 6: fields and lengths
    "chunks": Case(WORK + b"\r\n" + KEY + b"Transfer-Encoding: chunked\r\n" + CHUNKS, 200, False, WORK),
    "a chunk extension is ignored": Case(
        WORK + b"\r\n" + KEY + b"Transfer-Encoding: chunked\r\n\r\n%x;a=b\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n",
        200,
        False,
        WORK,
    ),
    # 9112, 6 and 7: odd, but to be understood in one way only
    "a length with a zero before it": Case(
        WORK + b"\r\n" + KEY + b"Content-Length: 0%d\r\n\r\n" % len(BODY) + BODY, 200, False, WORK
    ),
    "a length behind white space": Case(
        WORK + b"\r\n" + KEY + b"Content-Length: \t %d \r\n\r\n" % len(BODY) + BODY, 200, False, WORK
    ),
    "chunks in capitals behind a tab": Case(
        WORK + b"\r\n" + KEY + b"TRANSFER-ENCODING:\tCHUNKED \r\n" + CHUNKS, 200, False, WORK
    ),
    "a coding in a field that is not Transfer-Encoding": Case(
        WORK + b"\r\n" + KEY + b"Transfer_Encoding: chunked\r\nX-Transfer-Encoding: chunked\r\n" + LENGTH,
        200, False, WORK,
    ),
    "a trailer that would be a field": Case(
        WORK + b"\r\n" + KEY + b"Transfer-Encoding: chunked\r\n" + CHUNKS[:-2] + b"Host: evil\r\nX-Api-Key: e\r\n\r\n",
        200, False, WORK,
    ),
    "a trailer that would be a length": Case(
        WORK + b"\r\n" + KEY + b"Transfer-Encoding: chunked\r\n" + CHUNKS[:-2] + b"Content-Length: 5\r\n\r\n", 400, True
    ),
    "fields that Connection names": Case(
        WORK + b"\r\nConnection: keep-alive, Content-Length, Host, Authorization\r\n" + KEY + LENGTH, 200, False, WORK
    ),
    "a request in the body of another": Case(
        b"GET /version HTTP/1.1\r\n" + KEY + b"Content-Length: %d\r\n\r\n" % len(FOLLOWER) + FOLLOWER, 400, True
    ),
    "no value": Case(READ + b"\r\nA:\r\n" + KEY + b"\r\n", 200, False, READ),
    "a value in UTF-8": Case(READ + b"\r\n" + "A: é\r\n".encode() + KEY + b"\r\n", 200, False, READ),
    "a field twice": Case(READ + b"\r\nA: b\r\nA: c\r\n" + KEY + b"\r\n", 200, False, READ),
    "a host of IPv6": Case(READ + b"\r\nHost: [::1]:8000\r\n" + KEY[9:] + b"\r\n", 200, False, READ),
    "HTTP/1.0 needs no host": Case(b"GET /version HTTP/1.0\r\n" + KEY[9:] + b"\r\n", 200, True, READ),
    "the size of a chunk with zeros and capitals": Case(
        WORK + b"\r\n" + KEY + b"Transfer-Encoding: chunked\r\n\r\n000%X\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n",
        200, False, WORK,
    ),
    "a query with escapes": Case(
        b"GET /version?c=d%20&e=%00 HTTP/1.1\r\n" + KEY + b"\r\n", 200, False, b"GET /version?c=d%20&e=%00 HTTP/1.1"
    ),
    "a method in a field": Case(
        b"GET /version HTTP/1.1\r\nX-HTTP-Method-Override: DELETE\r\n" + KEY + b"\r\n", 200, False, READ
    ),
    # 9110, 7.6.1 and 7.8: connections and upgrades
    "close is heeded": Case(b"GET /version HTTP/1.1\r\nConnection: close\r\n" + KEY + b"\r\n", 200, True, READ),
    "an upgrade to h2c is ignored": Case(
        b"GET /version HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
        + KEY + b"\r\n", 200, False, READ,
    ),
    "an upgrade with a body is ignored": Case(
        WORK + b"\r\nConnection: upgrade\r\nUpgrade: websocket\r\n" + KEY + LENGTH, 200, False, WORK
    ),
    "an upgrade with chunks is ignored": Case(
        WORK + b"\r\nUpgrade: h2c\r\nUpgrade: x\r\nConnection: upgrade\r\n" + KEY
        + b"Transfer-Encoding: chunked\r\n" + CHUNKS, 200, False, WORK,
    ),
    # 9110, 10.1.1: expectations
    "a body that is there needs no 100": Case(WORK + b"\r\nExpect: 100-continue\r\n" + KEY + LENGTH, 200, False, WORK),
    "no 100 for whom nobody knows": Case(
        WORK + b"\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 10\r\n\r\n", 401, True
    ),
    # 9110, 15.5.2 and what is ours
    "no key": Case(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n", 401, False),
    "no such path": Case(b"GET /nowhere HTTP/1.1\r\n" + KEY + b"\r\n", 404, False),
    "a path that climbs": Case(b"GET /v1/../version HTTP/1.1\r\n" + KEY + b"\r\n", 400, False),
}  # fmt: skip

CASES = ASKED | {name: Case(sent, status, True) for name, (sent, status) in REFUSED.items()}
"""One table, with all that is refused for its form."""
