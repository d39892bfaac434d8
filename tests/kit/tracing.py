"""The end of a request, as what writes it is told."""

from __future__ import annotations

from gateway.telemetry.ends import EndedRequest


def end(
    tenant: str, *, dispatched_s: float, ended_s: float, service: float, queue_s: float = 0.0, **fields: object
) -> EndedRequest:
    known: dict[str, object] = {"pool": "p", "tenant": tenant, "weight": 1.0, "outcome": "completed", "reason": ""}
    known |= {"request_id": "r", "app": "a", "model": "m", "backend": "b", "waited_s": {}, "first_token_s": 0.2}
    known |= {"dispatched_s": dispatched_s, "ended_s": ended_s, "queue_s": queue_s, "service": service}
    known |= {"prompt_tokens": 1, "output_tokens": 1}
    return EndedRequest(**{**known, **fields})  # type: ignore[arg-type]
