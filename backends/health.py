"""May a backend be given work? Judged from probes and from what requests met, with hysteresis."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field

import aiohttp
import msgspec

from backends.tls_contexts import what_failed
from backends.upstream_errors import ConnectFailed, ProtocolViolation, UpstreamError
from policies.capacity.gauges import Gauges

_BODY_BYTES_MAX = 4 * 1024 * 1024
_MODEL_LEN_MAX = 1 << 40
"""A length beyond that says nothing."""


@dataclass(eq=False, kw_only=True)
class HealthState:
    """Is one backend healthy, since when, and why not? Pure: times are monotonic seconds given by the caller.

    `failures_max` failures in a row (failed probes, failed connects) make it unhealthy, and so does who judges its
    answers (`give_up`); `successes_min` good probes in a row make it healthy again. Before the first probe it is not
    healthy, and one good probe is enough.
    """

    failures_max: int = 3
    successes_min: int = 2
    healthy: bool = field(default=False, init=False)
    reason: str = field(default="not probed yet", init=False)
    since_s: float = field(default=0.0, init=False)
    _failures: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._successes = self.successes_min - 1

    @property
    def probes_missing(self) -> int:
        """How many good probes in a row make it healthy at the earliest? 0: it is."""
        return 0 if self.healthy else self.successes_min - self._successes

    def probed(self, problem: str | None, now_s: float) -> None:
        """A probe ended: None is well, otherwise what was wrong."""
        if problem is not None:
            self._failed(f"probe: {problem}", now_s)
            return
        self._failures = 0
        self._successes += 1
        if not self.healthy and self._successes >= self.successes_min:
            self._turn(True, "", now_s)

    def connect_failed(self, problem: str, now_s: float) -> None:
        """A request found no connection: as telling as a failed probe."""
        self._failed(f"connect: {problem}", now_s)

    def give_up(self, reason: str, now_s: float) -> None:
        """It is well by its probes, and its answers are not."""
        if self.healthy:
            self._successes = 0
            self._turn(False, reason, now_s)

    def answered(self) -> None:
        """A request was answered in full: failures before it were not in a row."""
        self._failures = 0

    def _failed(self, reason: str, now_s: float) -> None:
        self._successes = 0
        self._failures += 1
        if not self.healthy:
            self.reason = reason
        elif self._failures >= self.failures_max:
            self._turn(False, reason, now_s)

    def _turn(self, healthy: bool, reason: str, now_s: float) -> None:
        self.healthy, self.reason, self.since_s = healthy, reason, now_s
        self._failures = 0


class Standstill:
    """Does an engine do nothing, though it has requests and says that it is well? Judged from its pages of metrics.

    A step makes tokens, or computes a part of a prompt, which takes blocks of the KV cache. So it changes one of
    `_signs`; requests that come and wait do not.
    """

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: no step takes so long."""
        self.limit_s = limit_s
        self._page: Gauges | None = None
        self._signs: tuple[float | None, ...] = ()
        self._since_s = 0.0

    def read(self, page: Gauges) -> None:
        """The next page."""
        totals = (page.prompt_tokens_total, page.output_tokens_total, page.preemptions_total)
        signs = (page.running, page.kv_usage, *totals)
        if signs != self._signs:
            self._signs, self._since_s = signs, page.taken_s
        self._page = page

    def fault(self, oldest_s: float) -> str | None:
        """What is wrong, if it is sure to have had a request since `oldest_s`? None: nothing."""
        page = self._page
        # Without a count that each step changes, one long answer looks like a standstill.
        if page is None or page.output_tokens_total is None or not (page.running or page.waiting):
            return None
        still_s = page.taken_s - max(self._since_s, oldest_s)
        return f"makes no step, and has requests for {still_s:.0f} s" if still_s >= self.limit_s else None


class ModelCard(msgspec.Struct):
    """One model that a backend says it serves; LoRA cards and other engines state no length."""

    id: str
    max_model_len: int | None = None
    parent: object = None
    """Whose LoRA adapter it is."""
    owned_by: str = ""
    """Each kind of engine has its own word here."""


class _Cards(msgspec.Struct):
    data: list[ModelCard]


async def probe(
    session: aiohttp.ClientSession,
    url: str,
    *,
    api_key: str | None = None,
    timeout_s: float = 2.0,
    tls: ssl.SSLContext | None = None,
) -> str | None:
    """GET `url` (the adapter's health path on the backend): None if it answers 200, otherwise what is wrong."""
    try:
        await _get(session, url, api_key, timeout_s, tls)
    except UpstreamError as error:
        return str(error)
    return None


async def fetch_models(
    session: aiohttp.ClientSession,
    url: str,
    api_key: str | None = None,
    *,
    timeout_s: float = 5.0,
    tls: ssl.SSLContext | None = None,
) -> list[ModelCard]:
    """GET /v1/models of the backend at `url`. Raises ConnectFailed, or ProtocolViolation for any other answer."""
    return read_models(url, await _get(session, url.rstrip("/") + "/v1/models", api_key, timeout_s, tls))


async def fetch_text(
    session: aiohttp.ClientSession, url: str, *, api_key: str | None, tls: ssl.SSLContext | None, timeout_s: float = 2.0
) -> str:
    """Return the text of an answer with status 200, and "" for any other one."""
    try:
        return (await _get(session, url, api_key, timeout_s, tls)).decode("latin-1")
    except UpstreamError:
        return ""


def read_models(url: str, body: bytes) -> list[ModelCard]:
    """What an answer to /v1/models says; ProtocolViolation if it is none."""
    try:
        cards = msgspec.json.decode(body, type=_Cards).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolViolation(url, f"/v1/models is no list of models: {error}", before_first_byte=False) from error
    for card in cards:
        if card.max_model_len is not None and not 0 < card.max_model_len <= _MODEL_LEN_MAX:
            card.max_model_len = None
    return cards


async def _get(
    session: aiohttp.ClientSession, url: str, api_key: str | None, timeout_s: float, tls: ssl.SSLContext | None
) -> bytes:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    body = bytearray()
    try:
        # Redirects are not followed: requests would not be, and the key is for this backend alone.
        async with session.get(
            url, headers=headers, timeout=timeout, allow_redirects=False, ssl=tls or True
        ) as response:
            async for piece in response.content.iter_chunked(65536):
                body += piece
                if len(body) > _BODY_BYTES_MAX:
                    raise ProtocolViolation(url, f"more than {_BODY_BYTES_MAX} bytes", before_first_byte=False)
            status = response.status
    except TimeoutError as error:
        raise ConnectFailed(url, f"no answer within {timeout_s:g} s") from error
    except aiohttp.ClientConnectorCertificateError as error:
        raise ConnectFailed(url, what_failed(error.certificate_error)) from error
    except aiohttp.ClientConnectorError as error:
        why = what_failed(error.os_error) if isinstance(error.os_error, ssl.SSLError) else str(error)
        raise ConnectFailed(url, why) from error
    except (aiohttp.ClientError, OSError) as error:
        raise ConnectFailed(url, what_failed(error)) from error
    if status in (401, 403):
        why = f"status {status}: the api_key of this backend is missing or wrong"
        raise ProtocolViolation(url, why, before_first_byte=False)
    if status != 200:
        raise ProtocolViolation(url, f"status {status}, not 200", before_first_byte=False)
    return bytes(body)
