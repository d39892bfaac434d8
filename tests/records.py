"""A record of a request that nobody sent."""

from __future__ import annotations

from gateway.telemetry.record import RequestRecord


def record_of(id: str, *, arrived_s: float = 0.0) -> RequestRecord:
    record = RequestRecord()
    record.path, record.id, record.arrived_s = "/v1/chat/completions", id, arrived_s
    return record
