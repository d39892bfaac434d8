"""Which trace is a request part of, and is it recorded? W3C Trace Context (`traceparent`), read when its head is there.

Every request costs this where tracing is configured, so it is cheap; the span is made at the end, of those that are
recorded only.
"""

from __future__ import annotations

import re
from random import getrandbits
from typing import Final

__all__ = ["TRACEPARENT", "Sampler", "Trace"]

Header = tuple[bytes, bytes]

TRACEPARENT: Final = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)
"""The trace, the span in it that asks, and its flags."""
_STATE_BYTES_MAX: Final = 512
_FIELDS: Final = frozenset({b"traceparent", b"tracestate"})


class Trace:
    """One request's place in a trace."""

    __slots__ = ("host", "is_sampled", "parent_id", "span_id", "state", "trace_id")

    def __init__(self, trace_id: str, span_id: str, *, is_sampled: bool) -> None:
        """In hexadecimal digits."""
        self.trace_id = trace_id
        self.span_id = span_id
        """Of this gateway's span."""
        self.is_sampled = is_sampled
        self.parent_id = ""
        """Of the client's span; "": it has none."""
        self.state = b""
        """The client's `tracestate`."""
        self.host = b""
        """What the client calls this gateway, if recorded."""

    def passed_on(self, headers: list[Header]) -> list[Header]:
        """The header fields of the request, with this gateway's span as the one that asks."""
        flags = "01" if self.is_sampled else "00"
        fields = [field for field in headers if field[0] not in _FIELDS]
        fields.append((b"traceparent", f"00-{self.trace_id}-{self.span_id}-{flags}".encode()))
        if self.state:
            fields.append((b"tracestate", self.state))
        return fields


class Sampler:
    """Decides which traces are recorded: as the client's `traceparent` says; where there is none, this part of them."""

    def __init__(self, ratio: float) -> None:
        self._bound = round(ratio * (1 << 64))

    def begin(self, headers: list[Header]) -> Trace | None:
        """None: the client has said that its trace is not recorded, and what it said is passed on as it is."""
        said = state = b""
        for name, value in headers:
            if name == b"traceparent":
                said = value if not said else b"twice"
            elif name == b"tracestate":
                state = state + b"," + value if state else value
        found = TRACEPARENT.fullmatch(said) if said else None
        if found is None:
            digits = f"{getrandbits(192):048x}"
            is_sampled = int(digits[16:32], 16) < self._bound  # as OpenTelemetry's samplers do by the id of a trace
            trace = Trace(digits[:32], digits[32:], is_sampled=is_sampled)
        else:
            if not int(found[3], 16) & 1:
                return None
            trace = Trace(found[1].decode(), f"{getrandbits(64):016x}", is_sampled=True)
            trace.parent_id = found[2].decode()
            trace.state = state if len(state) <= _STATE_BYTES_MAX else b""
        if trace.is_sampled:
            trace.host = next((value for name, value in headers if name == b"host"), b"")
        return trace
