"""The access log: one JSON line for every request, written when it is settled. Never has content, a key or a header."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.metrics_core import Metric

from gateway.telemetry.log_line import LogLine, encode_line
from gateway.telemetry.log_writer import STDOUT, LogWriter
from gateway.telemetry.metric_families import single
from gateway.telemetry.record import PATH_LENGTH_MAX, RequestRecord
from policies.request import Request

FLUSH_S = 0.2
NOTHING: Final[dict[str, float]] = {}
BUFFER_LINES_MAX: Final = 512


def hidden(user: str) -> str:
    """Return a hash that tells users apart and hides their names, which may be addresses; "" for no user."""
    return hashlib.blake2b(user.encode("utf-8", "replace"), digest_size=8).hexdigest() if user else ""


def _ms(seconds: float) -> float:
    return int(seconds * 100_000 + 0.5) / 100  # a tenth of the cost of `round` to digits


class AccessLog:
    """A log of requests to a file or to standard output, in batches: a write per request costs more than its line."""

    def __init__(self, target: str) -> None:
        """Open the target: "stdout", "off" or a path of a file to append to."""
        self._lines = bytearray()
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._target = target
        self._writer = _writer(target)
        self._lost_before = 0
        """Lines lost by writers that are closed."""

    def collect(self) -> Iterator[Metric]:
        lost = self._lost_before + (0 if self._writer is None else self._writer.lines_lost)
        yield single("fairgate_access_log_lines_lost_total", lost)

    def reopen(self, target: str) -> Callable[[], None] | None:
        """Write to this target from now on, or to the file that now has the target's name. Raise OSError, and change
        nothing, if it cannot be opened.

        Return a function that writes the rest to the old target and closes it, which may take seconds; None if there is
        nothing to close.
        """
        if target == self._target and target in ("stdout", "off"):
            return None
        writer = _writer(target)
        self.flush()
        before, self._writer, self._target = self._writer, writer, target
        if before is None:
            return None
        self._lost_before += before.lines_lost
        return before.close

    def write(self, record: RequestRecord) -> None:
        if self._writer is None:
            return
        service, request = record.service, record.request
        first_token_s = record.first_token_s
        progress = None if request is None else request.progress
        line = LogLine(  # by position, since keyword arguments cost a look-up each
            int(time.time() * 1000) / 1000, record.id, record.tenant, record.app,
            "" if request is None else hidden(request.flow.user),
            1.0 if request is None else request.weight,
            "" if request is None else interaction_name(request),
            0 if progress is None else progress.stage,
            record.model, record.policy, record.path[:PATH_LENGTH_MAX], record.stream, record.outcome, record.reason,
            _ms(record.queue_s), _waited_ms(record), None if first_token_s is None else _ms(first_token_s),
            _ms(record.total_s), service.prompt, service.output, service.cached or 0,
            0 if progress is None else progress.cached_tokens,
            0 if progress is None else progress.wasted_tokens,
            0 if request is None else request.prompt_tokens,
            0 if request is None else request.output_tokens_max,
            record.backend, "" if progress is None or not record.backend else progress.placed or "", record.tries,
            record.client, record.client_id, record.group, record.key,
        )  # fmt: skip
        self._lines += encode_line(line)
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
        lines, count = self._lines, self._count
        self._lines, self._count = bytearray(), 0
        if count and self._writer is not None:
            self._writer.write(bytes(lines), count)

    def close(self) -> None:
        self.flush()
        if self._writer is not None:
            self._writer.close()


def _writer(target: str) -> LogWriter | None:
    return None if target == "off" else LogWriter("access log", STDOUT if target == "stdout" else target)


def _waited_ms(record: RequestRecord) -> dict[str, float]:
    """Return the milliseconds by obstacle, the longest first."""
    waited_s = record.waited_s
    if not waited_s:
        return NOTHING
    return {str(obstacle): _ms(waited_s[obstacle]) for obstacle in sorted(waited_s, key=lambda name: -waited_s[name])}


def interaction_name(request: Request) -> str:
    """Return the name of the interaction that the request belongs to, or would have begun; "" without one."""
    interaction = request.progress.interaction
    name = request.claim.id if interaction is None else interaction.key[2]
    return name if isinstance(name, str) else ""
