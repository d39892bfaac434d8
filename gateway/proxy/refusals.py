"""The messages for requests that admission refuses: the cause, where the tenant stands, and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final
from zlib import crc32

from gateway.http.errors import ApiError, Reason
from gateway.http.headers import Header
from policies.admission.decisions import Reject
from policies.limits.quotas import DAY_S
from policies.request import Limit, RejectReason

JITTER: Final = 0.1
"""Greatest part by which a retry time is extended, so that clients refused together come back apart."""

MESSAGES: Final = {
    RejectReason.QUEUE_FULL: "too many of your requests are waiting for this model; slow down",
    RejectReason.QUEUE_TIMEOUT: "no engine could take this request in time; try again later",
    RejectReason.NO_BACKEND: "no engine that serves this model is in service, or none could be reached",
    RejectReason.BACKEND_FAILED: "the engine went away, and no other one could take the request",
    RejectReason.SERVER_BUSY: "the engines that serve this model refuse this request for now",
    RejectReason.RATE_LIMITED: "you are beyond your limit of requests; try again later",
    RejectReason.OVER_USER_LIMIT: "the engines are overloaded, and this user asks for too much",
    RejectReason.OVER_APP_LIMIT: "the engines are overloaded, and this app asks for too much",
    RejectReason.WORKING_SET: (
        "interactions under way fill the engines' KV cache, and a new one would wait for longer than it may; come back "
        "later. Calls of interactions under way are still served"
    ),
    RejectReason.INTERNAL_ERROR: "the gateway failed on this request",
    RejectReason.WAIT_TOO_LONG: "this request would wait for longer than x-fairgate-wait-s-max says",
}
"""Message for the client. The error's code is the `Reason` of this name."""
_WHO: Final = {"user": "this user", "app_user": "this user in this app", "app": "this app, over all its users,"}
_WHAT: Final = {"starts": "interactions begun", "requests": "requests", "tokens": "tokens"}
_ALWAYS_ON: Final = {
    "requests": "{limit} requests a minute",
    "tokens": "{limit} tokens a minute",
    "concurrent": "{limit} requests at once",
    "requests_per_day": "{limit} requests a day",
    "tokens_per_day": "{limit} tokens a day",
    "requests_per_month": "{limit} requests in 30 days",
    "tokens_per_month": "{limit} tokens in 30 days",
    "cost_per_month": "a cost of {limit} in 30 days",
    "engine_seconds": "{limit} seconds at engines a minute",
    "engine_seconds_per_day": "{limit} seconds at engines a day",
    "engine_seconds_per_month": "{limit} seconds at engines in 30 days",
}


def refusal_error(decision: Reject, again_s: float) -> ApiError:
    """Return the error for a request that admission refused. `again_s`: least seconds until an engine takes
    requests."""
    retry_after_s = max(decision.retry_after_s, again_s)
    reason, message = Reason[decision.reason.name], MESSAGES[decision.reason]
    if decision.ceiling:
        message += f"; {decision.ceiling}"
    limit = decision.limit
    is_budget = limit is not None and DAY_S <= limit.window_s < math.inf
    if not is_budget:  # a budget ends for one tenant; other clients come back spread over a tenth of the wait
        retry_after_s = _spread(retry_after_s, decision.id)
    headers: list[Header] = []
    # The caller is not willing to wait, and a client library would.
    should_retry = False if decision.reason is RejectReason.WAIT_TOO_LONG else None
    if limit is not None:
        retry_after_s = min(retry_after_s, limit.window_s)
        headers = rate_limit_headers((limit._replace(reset_s=retry_after_s),))
        message = _limit_in_words(decision.reason, limit, retry_after_s)
        if is_budget:
            should_retry = False  # a client library would run out of retries before the budget is renewed
    return ApiError(reason, message, retry_after_s=retry_after_s, should_retry=should_retry, fields=headers)


def revoked_key_error() -> ApiError:
    return ApiError(Reason.INVALID_API_KEY, "this API key was revoked before an engine had answered the request")


def failure_error(reason: Reason, what: str, request_id: str, again_s: float) -> ApiError:
    """Return the error for a request that an engine failed on and that may be retried, in `again_s` at the earliest."""
    return ApiError(reason, f"{what}; request {request_id}", retry_after_s=_spread(again_s, request_id))


def _spread(wait_s: float, request_id: str) -> float:
    return wait_s * (1.0 + JITTER * (crc32(request_id.encode()) % 1024) / 1024)


def _limit_in_words(reason: RejectReason, limit: Limit, retry_after_s: float) -> str:
    """Return the sentence on a reached limit."""
    again = f"come back in {in_words(retry_after_s)}"
    if reason is RejectReason.RATE_LIMITED:
        name, _, group = limit.name.partition(" ")
        what = _ALWAYS_ON.get(name, "{limit} " + name).format(limit=limit.limit)
        who = f"{group[1:-1]} is at its" if group else "you are at your"
        return f"{who} limit of {what}; {again}"
    who, _, kind = limit.name.rpartition("_")
    return (
        f"the engines' KV cache is overloaded, and {_WHO.get(who, 'you')} reached the limit that holds meanwhile: "
        f"{limit.limit} {_WHAT.get(kind, kind)} in the window; {again}, or when the overload is over. "
        "Calls of interactions under way are still served"
    )


def in_words(seconds: float) -> str:
    """Return a time in words, in the two largest units and rounded up."""
    rest = max(1, math.ceil(seconds))
    units = [("hour", 3600), ("minute", 60), ("second", 1)]
    if rest > DAY_S:
        units = [("day", 86_400), ("hour", 3600)]
    smallest = units[1 if rest >= 3600 else 2][1]
    rest = -(-rest // smallest) * smallest  # without a third unit
    words = []
    for unit, length in units:
        count, rest = divmod(rest, length)
        if count:
            words.append(f"{count} {unit}{'' if count == 1 else 's'}")
    return " ".join(words)


def rate_limit_headers(limits: Iterable[Limit]) -> list[Header]:
    """Return OpenAI's `x-ratelimit-*` fields for the tightest limit of requests and the tightest of tokens."""
    tightest: dict[bytes, Limit] = {}
    for limit in limits:
        if limit.name.startswith(("engine", "cost")):
            continue
        kind = b"tokens" if "tokens" in limit.name.partition(" ")[0] else b"requests"
        other = tightest.get(kind)
        if other is None or limit.remaining * other.limit < other.remaining * limit.limit:
            tightest[kind] = limit
    fields = []
    for kind, limit in tightest.items():
        fields.append((b"x-ratelimit-limit-" + kind, b"%d" % limit.limit))
        fields.append((b"x-ratelimit-remaining-" + kind, b"%d" % max(0, limit.remaining)))
        fields.append((b"x-ratelimit-reset-" + kind, _duration(min(limit.reset_s, limit.window_s))))
    return fields


def _duration(seconds: float) -> bytes:
    """Return a duration in OpenAI's format: 12ms, 7s, 6m0s, 1h0m0s."""
    if seconds < 1.0:
        return b"%dms" % math.ceil(max(0.0, seconds) * 1000)
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return b"%dh%dm%ds" % (hours, minutes, rest)
    return b"%dm%ds" % (minutes, rest) if minutes else b"%ds" % rest
