"""What is in one line of the access log? msgspec writes the structure in C; it stands apart from what is compiled."""

from __future__ import annotations

import msgspec

__all__ = ["Line", "encode_line"]


class Line(msgspec.Struct):
    ts: float
    request_id: str
    tenant: str
    app: str
    user: str
    weight: float
    interaction: str
    stage: int
    model: str
    policy: str
    path: str
    stream: bool
    outcome: str
    reason: str
    queue_ms: float
    waited_ms: dict[str, float]
    ttft_ms: float | None
    total_ms: float
    tokens_in: int
    tokens_out: int
    tokens_cached: int
    tokens_cached_expected: int
    tokens_wasted: int
    tokens_in_estimated: int
    tokens_out_max: int
    backend: str
    placed: str
    tries: int
    client: str
    client_request_id: str


encode_line = msgspec.json.Encoder().encode
