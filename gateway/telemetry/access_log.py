"""One JSON line for every request, written when it is settled. Never any content, key or header."""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from pathlib import Path

import msgspec

from gateway.telemetry.record import Record

__all__ = ["AccessLog", "hidden"]

FLUSH_S = 0.2
BUFFER_LINES_MAX = 512


class _Line(msgspec.Struct, omit_defaults=False):
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
    ttft_ms: float | None
    total_ms: float
    tokens_in: int
    tokens_out: int
    tokens_cached: int
    tokens_in_estimated: int
    tokens_out_max: int
    backend: str
    tries: int


def hidden(user: str) -> str:
    """A name for the user that tells users apart and nothing else: what clients write there may be an address."""
    return hashlib.blake2b(user.encode("utf-8", "replace"), digest_size=8).hexdigest() if user else ""


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)


class AccessLog:
    """Lines go to a file or to standard output in batches, since a write per request costs more than the line."""

    def __init__(self, target: str) -> None:
        """`target`: "stdout", "off" or a path, opened for appending."""
        self._encoder = msgspec.json.Encoder()
        self._lines = bytearray()
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_off = target == "off"
        self._file = None if target in ("stdout", "off") else Path(target).open("ab", buffering=0)

    def write(self, record: Record, policy: str) -> None:
        if self._is_off:
            return
        service, request = record.service, record.request
        first_token_s = record.first_token_s
        line = _Line(
            ts=round(time.time(), 3),
            request_id=record.request_id,
            tenant=record.tenant,
            app=record.app,
            user="" if request is None else hidden(request.flow.user),
            weight=1.0 if request is None else request.weight,
            interaction="" if request is None else request.claim.id,
            stage=0 if request is None else request.stage,
            model=record.model,
            policy=policy,
            path=record.path,
            stream=record.stream,
            outcome=record.outcome.value,
            reason=record.reason,
            queue_ms=_ms(record.queue_s),
            ttft_ms=None if first_token_s is None else _ms(first_token_s),
            total_ms=_ms(record.total_s),
            tokens_in=service.prompt,
            tokens_out=service.output,
            tokens_cached=service.cached or 0,
            tokens_in_estimated=record.estimated_tokens,
            tokens_out_max=0 if request is None else request.output_tokens_max,
            backend=record.backend,
            tries=record.tries,
        )
        self._lines += self._encoder.encode(line)
        self._lines += b"\n"
        self._count += 1
        if self._count >= BUFFER_LINES_MAX:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lines, self._lines, self._count = self._lines, bytearray(), 0
        if not lines:
            return
        if self._file is not None:
            self._file.write(lines)
        else:
            sys.stdout.buffer.write(lines)
            sys.stdout.buffer.flush()

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
