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
HOST, TOKEN = b"Host: x\r\n", b"Authorization: Bearer known\r\n"
KEY = HOST + TOKEN
WORK = b"POST /v1/chat/completions HTTP/1.1"
READ = b"GET /version HTTP/1.1"
READ_OLD = b"GET /version HTTP/1.0"
ESCAPED = b"GET /version?c=d%20&e=%00 HTTP/1.1"
SIZE = len(BODY)
LENGTH = b"Content-Length: %d\r\n" % SIZE
CHUNKED = b"Transfer-Encoding: chunked\r\n"


def posted(*fields: bytes, body: bytes = BODY) -> bytes:
    """A request to a model with these fields."""
    return b"".join((WORK, b"\r\n", KEY, *fields, b"\r\n", body))


def in_chunks(*fields: bytes, size: bytes = b"%x" % SIZE, trailer: bytes = b"") -> bytes:
    return posted(*fields, body=b"".join((size, b"\r\n", BODY, b"\r\n0\r\n", trailer, b"\r\n")))


def read(*fields: bytes, line: bytes = READ, key: bytes = KEY, body: bytes = b"") -> bytes:
    """A request without content, or with one that must not be there."""
    return b"".join((line, b"\r\n", *fields, key, b"\r\n", body))


def taken(sent: bytes, reaches: bytes = READ) -> Case:
    """What reaches the engine, whose answer is sent on a connection that is kept."""
    return Case(sent, 200, False, reaches)


ASKED: dict[str, Case] = {
    # RFC 9112, 2.2: lines
    "an empty line before a request is forgiven": taken(b"\r\n" + posted(LENGTH), WORK),
    # 9112, 2.3: versions
    "HTTP/1.0 is answered and ends": Case(read(line=READ_OLD), 200, True, READ),
    "HTTP/1.0 ends, too, where the length of the answer is not known": Case(
        read(b"Connection: keep-alive\r\n", line=READ_OLD), 200, True, READ
    ),
    # 9110, 9.1: methods
    "a method that is not offered there": Case(read(line=b"DELETE /version HTTP/1.1"), 405, False),
    "TRACE is not offered": Case(read(line=b"TRACE /version HTTP/1.1"), 405, False),
    "HEAD comes with GET": taken(read(line=b"HEAD /version HTTP/1.1"), b"HEAD /version HTTP/1.1"),
    "OPTIONS needs no key": Case(read(line=b"OPTIONS /version HTTP/1.1", key=HOST), 204, False),
    "OPTIONS of nothing": Case(read(line=b"OPTIONS /nowhere HTTP/1.1", key=HOST), 404, False),
    "content of a GET is refused, unread": Case(read(b"Content-Length: 5\r\n", body=b"hello"), 400, True),
    "a GET may say that it has none": taken(read(b"Content-Length: 0\r\n")),
    # 9112, 3.2: targets
    "absolute form": taken(read(line=b"GET http://y/version?a HTTP/1.1"), b"GET /version?a HTTP/1.1"),
    "absolute form in TLS's scheme": taken(read(line=b"GET https://y:8/version HTTP/1.1")),
    "asterisk form": Case(read(line=b"OPTIONS * HTTP/1.1", key=HOST), 204, False),
    "asterisk form of an absolute target": Case(read(line=b"OPTIONS http://x HTTP/1.1", key=HOST), 204, False),
    # 9112, 5 and 6: fields and lengths
    "chunks": taken(in_chunks(CHUNKED), WORK),
    "a chunk extension is ignored": taken(in_chunks(CHUNKED, size=b"%x;a=b" % SIZE), WORK),
    # 9112, 6 and 7: odd, but to be understood in one way only
    "a length with a zero before it": taken(posted(b"Content-Length: 0%d\r\n" % SIZE), WORK),
    "a length behind white space": taken(posted(b"Content-Length: \t %d \r\n" % SIZE), WORK),
    "chunks in capitals behind a tab": taken(in_chunks(b"TRANSFER-ENCODING:\tCHUNKED \r\n"), WORK),
    "a coding in a field that is not Transfer-Encoding": taken(
        posted(b"Transfer_Encoding: chunked\r\nX-Transfer-Encoding: chunked\r\n", LENGTH), WORK
    ),
    "a trailer that would be a field": taken(in_chunks(CHUNKED, trailer=b"Host: evil\r\nX-Api-Key: e\r\n"), WORK),
    "a trailer that would be a length": Case(in_chunks(CHUNKED, trailer=b"Content-Length: 5\r\n"), 400, True),
    "fields that Connection names": taken(
        posted(b"Connection: keep-alive, Content-Length, Host, Authorization\r\n", LENGTH), WORK
    ),
    "a request in the body of another": Case(
        read(b"Content-Length: %d\r\n" % len(FOLLOWER), body=FOLLOWER), 400, True
    ),
    "no value": taken(read(b"A:\r\n")),
    "a value in UTF-8": taken(read("A: é\r\n".encode())),
    "a field twice": taken(read(b"A: b\r\nA: c\r\n")),
    "a host of IPv6": taken(read(b"Host: [::1]:8000\r\n", key=TOKEN)),
    "HTTP/1.0 needs no host": Case(read(line=READ_OLD, key=TOKEN), 200, True, READ),
    "the size of a chunk with zeros and capitals": taken(in_chunks(CHUNKED, size=b"000%X" % SIZE), WORK),
    "a query with escapes": taken(read(line=ESCAPED), ESCAPED),
    "a method in a field": taken(read(b"X-HTTP-Method-Override: DELETE\r\n")),
    # 9110, 7.6.1 and 7.8: connections and upgrades
    "close is heeded": Case(read(b"Connection: close\r\n"), 200, True, READ),
    "an upgrade to h2c is ignored": taken(
        read(b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n")
    ),
    "an upgrade with a body is ignored": taken(posted(b"Connection: upgrade\r\nUpgrade: websocket\r\n", LENGTH), WORK),
    "an upgrade with chunks is ignored": taken(
        in_chunks(b"Upgrade: h2c\r\nUpgrade: x\r\nConnection: upgrade\r\n", CHUNKED), WORK
    ),
    # 9110, 10.1.1: expectations
    "a body that is there needs no 100": taken(posted(b"Expect: 100-continue\r\n", LENGTH), WORK),
    "no 100 for whom nobody knows": Case(
        read(b"Expect: 100-continue\r\nContent-Length: 10\r\n", line=WORK, key=HOST), 401, True
    ),
    # 9110, 15.5.2 and what is ours
    "no key": Case(read(key=HOST), 401, False),
    "no such path": Case(read(line=b"GET /nowhere HTTP/1.1"), 404, False),
    "a path that climbs": Case(read(line=b"GET /v1/../version HTTP/1.1"), 400, False),
}  # fmt: skip

CASES = ASKED | {name: Case(sent, status, True) for name, (sent, status) in REFUSED.items()}
"""One table, with all that is refused for its form."""
