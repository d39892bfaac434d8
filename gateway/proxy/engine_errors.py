"""What does a tenant see of an engine's error?

Errors about the request are shown in the engine's words. Of the engine's own trouble only its existence is shown.
Faults for an operator to mend are logged.
"""

from __future__ import annotations

import logging
import re
import time
from typing import Any, Final

import msgspec

from backends.answers.sse import Dialect
from gateway.http.errors import ApiError, EngineError, Reason

logger = logging.getLogger("fairgate")

ERROR_BODY_BYTES_MAX: Final = 1 << 20
READ_BYTES_MAX: Final = 1 << 16
"""Longest error body that is read. Longer ones hold nothing for a client."""
MESSAGE_LENGTH_MAX: Final = 4000
AGAIN_S: Final = 1.0
"""Retry time at an engine that is busy or failed: it answered, so it is in service."""
LOG_AGAIN_S: Final = 60.0
"""Interval of equal log lines about one backend."""

_INTERNAL: Final = re.compile(r'Traceback \(most recent call last\)|File "[^"]+", line [0-9]|<(?:!doctype|html)', re.I)
_REASONS: Final = {404: Reason.NOT_FOUND, 405: Reason.NOT_FOUND, 413: Reason.BODY_TOO_LARGE}
_BUSY: Final = frozenset({429, 503, 529})
_NO_LEAVE: Final = frozenset({401, 403, 407})
_TROUBLE: Final = "the engine failed on this request"

OWN_ERROR_EVENTS: Final = {dialect: ApiError(Reason.BACKEND_FAILED, _TROUBLE).sse_event(dialect) for dialect in Dialect}
"""Stream events that replace an engine's own internal errors, by format."""

_logged_s: dict[tuple[str, int], float] = {}


def engine_error(backend: str, status: int, body: bytes, again_s: float = 0.0) -> ApiError:
    """Return the error for an engine's answer that is neither a success nor retried. `again_s`: the engine's retry
    time."""
    if status in _NO_LEAVE:
        what = "does not accept the gateway: the api_key of this backend is missing or wrong"
        _log_misconfigured(backend, status, what)
        return ApiError(Reason.BACKEND_FAILED, "the engine did not accept this gateway; its operator has to mend that")
    if status in _BUSY:
        return ApiError(Reason.SERVER_BUSY, "the engine is busy; try again", retry_after_s=again_s or AGAIN_S)
    if not 400 <= status < 500:
        if status < 400:
            _log_misconfigured(backend, status, "redirects instead of answering: its url is wrong, or the path is")
        message = f"{_TROUBLE} (it answered with status {status})"
        return ApiError(Reason.BACKEND_FAILED, message, retry_after_s=AGAIN_S if status >= 500 else None)
    reason = _REASONS.get(status, Reason.INVALID_REQUEST)
    fields = _error_fields(body)
    message = _message(fields, status)
    if not message or _INTERNAL.search(message):
        message = f"the engine refused this request with status {status}, and gave no reason that can be passed on"
        if status in (404, 405):
            message = "the engine that serves this model has nothing at this path"
        return EngineError(reason, status, message, type="", param=None, code=reason.value)
    kind, param, code = fields.get("type"), fields.get("param"), fields.get("code")
    return EngineError(
        reason,
        status,
        message[:MESSAGE_LENGTH_MAX],
        type=kind if isinstance(kind, str) else "",
        param=param if isinstance(param, str) else None,
        code=code if isinstance(code, str) or type(code) is int else None,
    )


def _error_fields(body: bytes) -> dict[str, Any]:
    """Return the fields of an error in any of the engines' formats, empty without one."""
    if len(body) > READ_BYTES_MAX:
        return {}
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    if not isinstance(answer, dict):
        return {}
    error = answer.get("error")
    if isinstance(error, dict):
        return error
    if isinstance(error, str):
        return {"message": error, "type": answer.get("error_type")}
    return answer


def _message(fields: dict[str, Any], status: int) -> str:
    message = fields.get("message")
    if isinstance(message, str):
        return message
    detail = fields.get("detail")  # FastAPI's format
    if isinstance(detail, str):
        return "" if status in (404, 405) else detail
    if not isinstance(detail, list):
        return ""
    faults = []
    for fault in detail[:20]:
        if isinstance(fault, dict) and isinstance(fault.get("msg"), str):
            place = fault.get("loc")
            where = ".".join([str(part) for part in place[1:]]) if isinstance(place, list) else ""
            faults.append(f"{where}: {fault['msg']}" if where else fault["msg"])
    return "; ".join(faults)


def _log_misconfigured(backend: str, status: int, what: str) -> None:
    now = time.monotonic()
    if now - _logged_s.get((backend, status), float("-inf")) >= LOG_AGAIN_S:
        _logged_s[backend, status] = now
        logger.error("backend %s %s (status %d)", backend, what, status)
