"""Health of a backend, judged from probes and requests with hysteresis, and the HTTP questions that probes ask."""

from __future__ import annotations

from typing import Final

import msgspec

from backends.control_client import TIMEOUT_S, ControlClient
from backends.upstream_errors import ProtocolViolation, UpstreamError
from policies.capacity.gauges import Gauges

MODELS_TIMEOUT_S: Final = 5.0
FAILURES_MAX: Final = 3
SUCCESSES_MIN: Final = 2
_MODEL_LEN_MAX = 1 << 40
"""Longer contexts are ignored."""


class HealthState:
    """Health of one backend: is it healthy, and why not?

    FAILURES_MAX failed probes or connects in a row make the backend unhealthy; so does `mark_unhealthy`, called by the
    judge of its answers. SUCCESSES_MIN good probes in a row make the backend healthy again. A new backend is unhealthy
    until one good probe.
    """

    def __init__(self) -> None:
        self.healthy = False
        self.reason = "not probed yet"
        self.failures = 0
        """Failed probes and connects in a row. An answer ends the row."""
        self._successes = SUCCESSES_MIN - 1

    @property
    def probes_missing(self) -> int:
        """Return the good probes in a row until the backend can be healthy; 0 for a healthy backend."""
        return 0 if self.healthy else SUCCESSES_MIN - self._successes

    def probed(self, problem: str | None) -> None:
        """Record a probe's end: a problem, or None for a good probe."""
        if problem is not None:
            self._count_failure(f"probe: {problem}")
            return
        self.failures = 0
        self._successes += 1
        if not self.healthy and self._successes >= SUCCESSES_MIN:
            self._set_health(True, "")

    def connect_failed(self, problem: str) -> None:
        """Record a request without a connection, which counts like a failed probe."""
        self._count_failure(f"connect: {problem}")

    def mark_unhealthy(self, reason: str) -> None:
        """Mark the backend unhealthy because its answers are bad, although its probes are good."""
        if self.healthy:
            self._successes = 0
            self._set_health(False, reason)

    def _count_failure(self, reason: str) -> None:
        self._successes = 0
        self.failures += 1
        if not self.healthy:
            self.reason = reason
        elif self.failures >= FAILURES_MAX:
            self._set_health(False, reason)

    def _set_health(self, healthy: bool, reason: str) -> None:
        self.healthy, self.reason = healthy, reason
        self.failures = 0


class StandstillDetector:
    """Detector of an engine that makes no step although it has requests and passes its probes.

    A step makes tokens, or computes a part of a prompt and so takes KV blocks. Either changes one of `_signs`. Requests
    that arrive and wait change none.
    """

    def __init__(self, limit_s: float) -> None:
        """Create a detector; `limit_s` is longer than any step."""
        self.limit_s = limit_s
        self._page: Gauges | None = None
        self._signs: tuple[float | None, ...] = ()
        self._since_s = 0.0

    def read(self, page: Gauges) -> None:
        """Take the next page of metrics."""
        totals = (page.prompt_tokens_total, page.output_tokens_total, page.preemptions_total)
        signs = (page.running, page.kv_usage, *totals)
        if signs != self._signs:
            self._signs, self._since_s = signs, page.taken_s
        self._page = page

    def fault(self, oldest_s: float) -> str | None:
        """Return the fault of an engine that surely has had a request since `oldest_s`, or None for a working
        engine."""
        page = self._page
        # Without a counter that each step changes, one long answer would look like a standstill.
        if page is None or page.output_tokens_total is None or not (page.running or page.waiting):
            return None
        still_s = page.taken_s - max(self._since_s, oldest_s)
        return f"makes no step, and has requests for {still_s:.0f} s" if still_s >= self.limit_s else None


class ModelCard(msgspec.Struct):
    """A model in a backend's list. LoRA cards and some engines state no length."""

    id: str
    max_model_len: int | None = None
    parent: object = None
    """The base model of a LoRA adapter."""
    owned_by: str = ""
    """A word by which each kind of engine is recognised."""


class _ModelList(msgspec.Struct):
    """The body of an answer to `GET /v1/models`."""

    data: list[ModelCard]


async def probe(client: ControlClient, path: str, timeout_s: float = TIMEOUT_S) -> str | None:
    """GET the adapter's health path. Return what is wrong, or None for an answer of 200."""
    try:
        await client.get(path, timeout_s=timeout_s)
    except UpstreamError as error:
        return str(error)
    return None


async def fetch_models(client: ControlClient) -> list[ModelCard]:
    """GET /v1/models. Raise ConnectFailed, or ProtocolViolation for an invalid answer."""
    return read_models(client.url, await client.get("/v1/models", timeout_s=MODELS_TIMEOUT_S))


async def fetch_text(client: ControlClient, path: str) -> str:
    """Return the text of an answer with status 200, and "" for any other answer."""
    try:
        return (await client.get(path)).decode("latin-1")
    except UpstreamError:
        return ""


def read_models(url: str, body: bytes) -> list[ModelCard]:
    """Parse an answer to /v1/models. Raise ProtocolViolation for an invalid answer."""
    try:
        cards = msgspec.json.decode(body, type=_ModelList).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolViolation(url, f"/v1/models is no list of models: {error}") from error
    for card in cards:
        if card.max_model_len is not None and not 0 < card.max_model_len <= _MODEL_LEN_MAX:
            card.max_model_len = None
    return cards
