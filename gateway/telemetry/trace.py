"""Which trace is a request part of, and is it recorded? W3C Trace Context (`traceparent`), read with the head.

Every request pays for this where tracing is configured, so it is cheap. A span is made at the end, and only for a
recorded trace.
"""

from __future__ import annotations

import re
from random import getrandbits
from typing import Final

TRACEPARENT: Final = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)
"""Trace id, id of the client's span, and flags."""
_STATE_BYTES_MAX: Final = 512
_LOW_64_BITS: Final = (1 << 64) - 1


class TraceContext:
    """The trace id and span id of one request, and what its client said about the trace."""

    parent_id: int = 0
    """Id of the client's span; 0 without one."""
    state: bytes = b""

    def __init__(self, trace_id: int, span_id: int, *, is_sampled: bool, traceparent: bool) -> None:
        self.trace_id = trace_id
        self.span_id = span_id
        self.is_sampled = is_sampled
        self.traceparent = traceparent
        """Whether the client sent anything about a trace, valid or not."""

    def passed_on(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return the request's header fields with this gateway's span as the parent. May change the list."""
        if self.traceparent:
            headers = [field for field in headers if field[0] != b"traceparent" and field[0] != b"tracestate"]
            if self.state:
                headers.append((b"tracestate", self.state))
        headers.append((b"traceparent", b"00-%032x-%016x-%02x" % (self.trace_id, self.span_id, self.is_sampled)))
        return headers


class TraceSampler:
    """Trace sampler: follows the client's `traceparent`, and records the fraction `ratio` of requests without one."""

    def __init__(self, ratio: float) -> None:
        self._bound = round(ratio * (1 << 64))

    def begin(self, headers: list[tuple[bytes, bytes]]) -> TraceContext | None:
        """Begin the request's part of a trace.

        Return None if the client says that its trace is not recorded; its fields are then passed on unchanged.
        """
        traceparent = state = b""
        for name, value in headers:
            if name == b"traceparent":
                traceparent = value if not traceparent else b"twice"
            elif name == b"tracestate":
                state = state + b"," + value if state else value
        found = TRACEPARENT.fullmatch(traceparent) if traceparent else None
        if found is None:
            digits = getrandbits(192)
            trace_id = digits >> 64
            is_sampled = trace_id & _LOW_64_BITS < self._bound  # as OpenTelemetry's own samplers decide
            trace = TraceContext(
                trace_id, digits & _LOW_64_BITS, is_sampled=is_sampled, traceparent=bool(traceparent or state)
            )
        elif not int(found[3], 16) & 1:
            return None
        else:
            trace = TraceContext(int(found[1], 16), getrandbits(64), is_sampled=True, traceparent=True)
            trace.parent_id = int(found[2], 16)
            trace.state = state if len(state) <= _STATE_BYTES_MAX else b""
        return trace
