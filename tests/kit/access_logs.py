"""Lines of an access log, as the gateway writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LINE = {
    "ts": 1000.5, "request_id": "req_1", "tenant": "alice", "app": "chat", "user": "u", "weight": 2.0,
    "interaction": "i", "stage": 3, "model": "m", "policy": "vtc", "path": "/v1/chat/completions", "stream": True,
    "outcome": "completed", "reason": "", "queue_ms": 100.0, "ttft_ms": 200.0, "total_ms": 500.0, "tokens_in": 100,
    "tokens_out": 20, "tokens_cached": 64, "tokens_in_estimated": 90, "tokens_out_max": 50, "backend": "b", "tries": 1,
}  # fmt: skip


def logged(**fields: Any) -> str:
    return json.dumps(LINE | fields)


def write(directory: Path, *lines: str) -> Path:
    path = directory / "trace"
    path.write_text("\n".join(lines) + "\n")
    return path
