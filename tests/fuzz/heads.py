"""The reader of requests as they come from the network: head, framing, chunks, and what proxies and traces say."""

from __future__ import annotations

from gateway.http.accounts import ServerLimits
from gateway.http.addresses import TrustedProxies, household
from gateway.http.errors import ApiError
from gateway.http.headers import REQUEST_DROPPED, bearer_key, forwarded
from gateway.http.http_request import HttpRequest, RequestReader
from gateway.telemetry.trace import TraceSampler
from tests.fuzz.harness import Harness
from tests.fuzz.transport import pieces
from tests.http.http_raw import wire

LIMITS = ServerLimits(body_bytes_max=1 << 20)
PROXIES = TrustedProxies(["10.0.0.0/8", "::1/128"])
SAMPLER = TraceSampler(0.5)
REQUESTS_MAX = 64


def read_requests(data: bytes) -> None:
    """Wherever it is cut, the same requests are read, and none after one that is refused. So they are by a reader that
    has seen none of those before."""
    once = _read([data])
    for read in (_read(pieces(data)), _read([data], anew=True)):
        assert [_wire(request) for request in read] == [_wire(request) for request in once]
    for request in once:
        if request is not None:
            _look(request)


def _wire(request: HttpRequest | None) -> tuple[object, ...]:
    """What was read of it."""
    return () if request is None else wire(request)


def _read(cut: list[bytes], *, anew: bool = False) -> list[HttpRequest | None]:
    """What a connection reads: requests; None: it was refused and ended, by an answer that depends on what had come.
    `anew`: each request by another reader."""
    reader = RequestReader(LIMITS, "10.0.0.1")
    found: list[HttpRequest | None] = []
    try:
        for data in cut:
            at = 0
            while at < len(data) and len(found) < REQUESTS_MAX:
                at = reader.take_head(data, at) if reader.request is None else reader.take_body(data, at)
                assert at <= len(data)
                if reader.complete:
                    assert reader.request is not None
                    found.append(reader.request)
                    reader.reset()
                    if anew:
                        reader.close()
                        reader = RequestReader(LIMITS, "10.0.0.1")
    except ApiError:
        found.append(None)
    finally:
        reader.close()
    return found


def _look(request: HttpRequest) -> None:
    assert request.path.startswith(("/", "*"))
    assert len(request.body) <= LIMITS.body_bytes_max
    names = {name for name, _ in forwarded(request.headers, REQUEST_DROPPED)}
    assert not names & {b"authorization", b"x-api-key", b"host", b"connection", b"content-length"}
    assert bearer_key(request.headers) != b""
    household(PROXIES.client("10.0.0.1", request.headers))
    trace = SAMPLER.begin(request.headers)
    if trace is not None:
        assert len(trace.passed_on(list(request.headers))[-1][1]) == 55


_REQUESTS = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"POST /v1 HTTP/1.1\r\nHost: x\r\n", b"Content-Length: 5\r\n", b"\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n", b"5\r\nhello\r\n", b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b";a=b", b"\n",
    b"Expect: 100-continue\r\n", b"Connection: close, x\r\n", b"Upgrade: h2c\r\n", b"\0", b"\t", b"\r", b"http://a/",
    b"Forwarded: for=1.2.3.4\r\n", b"X-Forwarded-For: 1.2.3.4, [::1]:5\r\n", b"OPTIONS * HTTP/1.1\r\n", b": ", b"0x",
    b"traceparent: 00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01\r\n", b"Authorization: Bearer k\r\n", b"+",
)  # fmt: skip

HARNESSES = (Harness("request", read_requests, (), _REQUESTS, memory_ratio_max=6.0),)
