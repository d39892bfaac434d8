"""What happened to one request? The one record that the access log and the metrics are written from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.telemetry.trace import TraceContext
from policies.admission.waits import seconds_of
from policies.request import Request, ServiceTokens

__all__ = ["Outcome", "RequestRecord"]


NO_SERVICE: Final = ServiceTokens(0, 0)


class Outcome:
    """How did it end? In words, as the log and the metrics have it."""

    COMPLETED: Final = "completed"
    ABANDONED: Final = "abandoned"
    """The client went away."""
    FAILED: Final = "failed"
    """The engine, or the way to it, failed."""
    REFUSED: Final = "refused"
    """It was queued, or asked to be, and was not served; or somebody, be it the engine, found it wrong by itself."""


class RequestRecord:
    """Times in seconds on the monotonic clock, tokens as settled. Never any content."""

    __slots__ = (
        "_dispatched_s", "_ended_s", "_first_token_s", "_waited_s", "app", "arrived_s", "backend", "client",
        "client_request_id", "estimated_tokens", "model", "outcome", "path", "pool", "reason", "request", "request_id",
        "service", "stream", "tenant", "trace", "tries",
    )  # fmt: skip

    def __init__(self, request_id: str, path: str, *, now: float) -> None:
        self.request_id = request_id
        self.path = path
        self.client = ""
        """Its address."""
        self.client_request_id = ""
        self.tenant = ""
        self.app = ""
        self.model = ""
        self.pool = ""
        self.stream = False
        self.request: Request | None = None
        """What asked for admission; None: it never came to that."""
        self.trace: TraceContext | None = None
        """Its place in a trace, if traces are followed."""
        self.backend = ""
        self.tries = 0
        self.outcome = ""
        """As `Outcome` says it."""
        self.reason = ""
        self.service = NO_SERVICE
        self.estimated_tokens = 0
        self.arrived_s = now
        self._dispatched_s: float | None = None
        self._first_token_s: float | None = None
        self._ended_s = now
        self._waited_s: Mapping[str, float] | None = None

    def dispatched(self, backend: str, now: float) -> None:
        self.backend = backend
        self.tries += 1
        self._dispatched_s = now

    def returned(self) -> None:
        """It went back to the queue."""
        self._dispatched_s = self._first_token_s = None

    def first_token(self, now: float) -> None:
        self._first_token_s = now

    def ended(self, outcome: str, reason: str, service: ServiceTokens, estimated_tokens: int, now: float) -> None:
        self.outcome = outcome
        self.reason = reason
        self.service = service
        self.estimated_tokens = estimated_tokens
        self._ended_s = now

    @property
    def queue_s(self) -> float:
        """From arrival to (the last) dispatch, or to the end if it never was dispatched."""
        return self.dispatched_s - self.arrived_s

    @property
    def dispatched_s(self) -> float:
        """When it went to its engine; if it never did, when it ended."""
        return self._ended_s if self._dispatched_s is None else self._dispatched_s

    @property
    def was_dispatched(self) -> bool:
        """Did an engine have it, and not give it back?"""
        return self._dispatched_s is not None

    @property
    def ended_s(self) -> float:
        return self._ended_s

    @property
    def waited_s(self) -> Mapping[str, float]:
        """Once it has ended: what held it back, in seconds by obstacle; empty if nothing did. Their sum is `queue_s`
        without the time in which the gateway read the request."""
        if self._waited_s is None:
            self._waited_s = seconds_of(None if self.request is None else self.request.progress.wait)
        return self._waited_s

    @property
    def first_token_s(self) -> float | None:
        """From arrival to the first token; None if none was seen (the answer was not streamed, or there was none)."""
        return None if self._first_token_s is None else self._first_token_s - self.arrived_s

    @property
    def total_s(self) -> float:
        return self._ended_s - self.arrived_s

    def debug_headers(self, policy: str) -> list[tuple[bytes, bytes]]:
        """Who was served how, for the client to see. `policy` is the pool's."""
        queue_ms = f"{self.queue_s * 1000:.1f}"
        fields = {
            "x-fairgate-tenant": self.tenant,
            "x-fairgate-policy": policy,
            "x-fairgate-backend": self.backend,
            "x-fairgate-queue-ms": queue_ms,
            "server-timing": f"queue;dur={queue_ms}",
        }
        return [(name.encode(), value.encode()) for name, value in fields.items()]
