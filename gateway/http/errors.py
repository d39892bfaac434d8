"""What does a tenant see when a request is refused or fails? One typed error, rendered for OpenAI or Anthropic clients.

`Reason` is the machine-readable code that clients, logs and metrics share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec

from backends.answers.sse import Dialect
from gateway.http.headers import Header
from policies.queue.expected_wait import interval_s

_CALLER: Final = "invalid_request_error"
_LIMIT: Final = "rate_limit_error"
_SERVER: Final = "server_error"
_new_text: Final[Any] = str.__new__


class Reason(StrEnum):
    """Error codes of refused and failed requests, each with its HTTP status and its OpenAI error type. The codes are
    stable, as part of the public interface."""

    status: int
    type: str

    def __new__(cls, word: str, status: int, type: str = _CALLER) -> Any:  # the type is not made yet
        self = _new_text(cls, word)
        self._value_, self.status, self.type = word, status, type
        return self

    INVALID_API_KEY = "invalid_api_key", 401, "authentication_error"
    EXPIRED_API_KEY = "expired_api_key", 401, "authentication_error"
    ISSUER_UNAVAILABLE = "issuer_unavailable", 503, _SERVER
    APP_NOT_ALLOWED = "app_not_allowed", 403, "permission_error"
    USER_BLOCKED = "user_blocked", 403, "permission_error"
    MODEL_NOT_FOUND = "model_not_found", 404
    NOT_FOUND = "not_found", 404
    INVALID_PATH = "invalid_path", 400
    METHOD_NOT_ALLOWED = "method_not_allowed", 405
    INVALID_JSON = "invalid_json", 400
    INVALID_REQUEST = "invalid_request", 400
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded", 400
    BODY_TOO_LARGE = "body_too_large", 413
    ENCODING_NOT_SUPPORTED = "encoding_not_supported", 415
    QUEUE_FULL = "queue_full", 429, _LIMIT
    QUEUE_TIMEOUT = "queue_timeout", 503, _SERVER
    RATE_LIMITED = "rate_limited", 429, _LIMIT
    TOO_MANY_AT_ONCE = "too_many_at_once", 429, _LIMIT
    TOO_MANY_FAILED_KEYS = "too_many_failed_keys", 429, _LIMIT
    OVER_USER_LIMIT = "over_user_limit", 429, _LIMIT
    OVER_APP_LIMIT = "over_app_limit", 429, _LIMIT
    WORKING_SET = "working_set", 429, _LIMIT
    WAIT_TOO_LONG = "wait_too_long", 429, _LIMIT
    NO_BACKEND = "no_backend", 503, _SERVER
    DRAINING = "draining", 503, _SERVER
    ANSWERS_BREAK = "answers_break", 503, _SERVER
    BACKEND_FAILED = "backend_failed", 502, _SERVER
    BACKEND_TIMEOUT = "backend_timeout", 504, _SERVER
    MALFORMED_HTTP = "malformed_http", 400
    CLIENT_TOO_SLOW = "client_too_slow", 408
    TARGET_TOO_LONG = "target_too_long", 414
    EXPECTATION_FAILED = "expectation_failed", 417
    UPGRADE_REQUIRED = "upgrade_required", 426
    HEADERS_TOO_LARGE = "headers_too_large", 431
    NOT_IMPLEMENTED = "not_implemented", 501
    VERSION_NOT_SUPPORTED = "version_not_supported", 505
    SERVER_BUSY = "server_busy", 503, _SERVER
    INTERNAL_ERROR = "internal_error", 500, _SERVER


_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def dialect_of(path: str) -> Dialect:
    """Return the format in which clients of this path read errors."""
    return Dialect.MESSAGES if path.startswith("/v1/messages") else Dialect.OPENAI


def expected_wait_headers(wait_s: float) -> list[Header]:
    """Return the header fields with an expected wait or the time until a retry, and with half to twice that time."""
    interval = b"%.3f-%.3f" % interval_s(wait_s)
    return [(b"x-fairgate-expected-wait-s", b"%.3f" % wait_s), (b"x-fairgate-expected-wait-range-s", interval)]


class ApiError(Exception):
    """An error as the tenant sees it.

    Args:
        retry_after_s: sent as `retry-after` (whole seconds, rounded up, at least 1) and `retry-after-ms`, and as the
            expected wait and its interval.
        should_retry: overrides the client library's own rule for the status; None leaves the rule alone.
        fields: further header fields of the answer.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
        fields: Sequence[Header] = (),
    ) -> None:
        super().__init__(message)
        self.status = reason.status
        self.type = reason.type
        self.code = reason
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry
        self._fields = fields
        self._client_code: str | int | None = reason.value
        self._anthropic_message = f"{reason.value}: {message}"

    def body(self, dialect: Dialect = Dialect.OPENAI) -> bytes:
        """Return the JSON body of the answer in the client's format."""
        if dialect is Dialect.MESSAGES:
            return self._anthropic_body()
        return msgspec.json.encode({"error": self._openai_error()})

    def _openai_error(self) -> dict[str, object]:
        return {"message": self.message, "type": self.type, "param": self.param, "code": self._client_code}

    def _anthropic_body(self) -> bytes:
        """Return the JSON body for clients of /v1/messages. The reason stands before the message."""
        kind = _ANTHROPIC_TYPES.get(self.status, _CALLER)
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": self._anthropic_message}})

    def headers(self) -> list[Header]:
        """Return the answer's header fields: the content type, and when and whether to retry."""
        fields = [(b"content-type", b"application/json"), *self._fields]
        if self.retry_after_s is not None:
            fields.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_s))))
            fields.append((b"retry-after-ms", b"%d" % max(1, math.ceil(self.retry_after_s * 1000))))
            fields += expected_wait_headers(self.retry_after_s)
        if self.should_retry is not None:
            fields.append((b"x-should-retry", b"true" if self.should_retry else b"false"))
        return fields

    def sse_event(self, dialect: Dialect = Dialect.OPENAI) -> bytes:
        """Return the error as a stream event, for an answer whose first byte has been sent."""
        if dialect is Dialect.MESSAGES:
            return b"event: error\ndata: %b\n\n" % self._anthropic_body()
        if dialect is Dialect.RESPONSES:
            # The event itself is the error. What stands under `error` besides makes OpenAI's own library raise it.
            error = self._openai_error() | {"code": self.code.value}
            event = {"type": "error", "code": self.code.value, "message": self.message, "param": self.param}
            content = msgspec.json.encode({**event, "sequence_number": 0, "error": error})
            return b"event: error\ndata: %b\n\n" % content
        return b"data: %b\n\n" % self.body()


class EngineError(ApiError):
    """An engine's error about the request itself, with the engine's message, status and code."""

    def __init__(
        self, reason: Reason, status: int, message: str, *, type: str, param: str | None, code: str | int | None
    ) -> None:
        super().__init__(reason, message, param=param)
        self.status = status
        self.type = type or self.type
        self._client_code = code
        self._anthropic_message = message
