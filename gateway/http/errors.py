"""What does a tenant see when a request is refused or fails? One typed error, rendered for OpenAI or Anthropic clients.

`Reason` is the machine-readable word that clients, logs and metrics share; one table gives its HTTP status and its
OpenAI error type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from backends.answers.sse import Dialect

__all__ = ["ApiError", "EngineError", "Reason", "dialect_of"]

Header = tuple[bytes, bytes]


class Reason(StrEnum):
    """Why a request got no answer from a model; stable, part of the public interface."""

    INVALID_API_KEY = "invalid_api_key"
    EXPIRED_API_KEY = "expired_api_key"
    ISSUER_UNAVAILABLE = "issuer_unavailable"
    APP_NOT_ALLOWED = "app_not_allowed"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_FOUND = "not_found"
    INVALID_PATH = "invalid_path"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    INVALID_JSON = "invalid_json"
    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    BODY_TOO_LARGE = "body_too_large"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    RATE_LIMITED = "rate_limited"
    TOO_MANY_AT_ONCE = "too_many_at_once"
    TOO_MANY_FAILED_KEYS = "too_many_failed_keys"
    OVER_USER_LIMIT = "over_user_limit"
    OVER_APP_LIMIT = "over_app_limit"
    WORKING_SET = "working_set"
    NO_BACKEND = "no_backend"
    DRAINING = "draining"
    BACKEND_FAILED = "backend_failed"
    BACKEND_TIMEOUT = "backend_timeout"
    MALFORMED_HTTP = "malformed_http"
    CLIENT_TOO_SLOW = "client_too_slow"
    TARGET_TOO_LONG = "target_too_long"
    EXPECTATION_FAILED = "expectation_failed"
    HEADERS_TOO_LARGE = "headers_too_large"
    NOT_IMPLEMENTED = "not_implemented"
    VERSION_NOT_SUPPORTED = "version_not_supported"
    SERVER_BUSY = "server_busy"
    INTERNAL_ERROR = "internal_error"


class _Form(NamedTuple):
    status: int
    type: str


_CALLER: Final = "invalid_request_error"
_SERVER: Final = "server_error"

_FORMS: Final[dict[Reason, _Form]] = {
    Reason.INVALID_API_KEY: _Form(401, "authentication_error"),
    Reason.EXPIRED_API_KEY: _Form(401, "authentication_error"),
    Reason.ISSUER_UNAVAILABLE: _Form(503, _SERVER),
    Reason.APP_NOT_ALLOWED: _Form(403, "permission_error"),
    Reason.MODEL_NOT_FOUND: _Form(404, _CALLER),
    Reason.NOT_FOUND: _Form(404, _CALLER),
    Reason.INVALID_PATH: _Form(400, _CALLER),
    Reason.METHOD_NOT_ALLOWED: _Form(405, _CALLER),
    Reason.INVALID_JSON: _Form(400, _CALLER),
    Reason.INVALID_REQUEST: _Form(400, _CALLER),
    Reason.CONTEXT_LENGTH_EXCEEDED: _Form(400, _CALLER),
    Reason.BODY_TOO_LARGE: _Form(413, _CALLER),
    Reason.QUEUE_FULL: _Form(429, "rate_limit_error"),
    Reason.RATE_LIMITED: _Form(429, "rate_limit_error"),
    Reason.TOO_MANY_AT_ONCE: _Form(429, "rate_limit_error"),
    Reason.TOO_MANY_FAILED_KEYS: _Form(429, "rate_limit_error"),
    Reason.OVER_USER_LIMIT: _Form(429, "rate_limit_error"),
    Reason.OVER_APP_LIMIT: _Form(429, "rate_limit_error"),
    Reason.WORKING_SET: _Form(429, "rate_limit_error"),
    Reason.QUEUE_TIMEOUT: _Form(503, _SERVER),
    Reason.NO_BACKEND: _Form(503, _SERVER),
    Reason.DRAINING: _Form(503, _SERVER),
    Reason.BACKEND_FAILED: _Form(502, _SERVER),
    Reason.BACKEND_TIMEOUT: _Form(504, _SERVER),
    Reason.MALFORMED_HTTP: _Form(400, _CALLER),
    Reason.CLIENT_TOO_SLOW: _Form(408, _CALLER),
    Reason.TARGET_TOO_LONG: _Form(414, _CALLER),
    Reason.EXPECTATION_FAILED: _Form(417, _CALLER),
    Reason.HEADERS_TOO_LARGE: _Form(431, _CALLER),
    Reason.NOT_IMPLEMENTED: _Form(501, _CALLER),
    Reason.VERSION_NOT_SUPPORTED: _Form(505, _CALLER),
    Reason.SERVER_BUSY: _Form(503, _SERVER),
    Reason.INTERNAL_ERROR: _Form(500, _SERVER),
}

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
    """In which format does a client of this path read errors?"""
    return Dialect.MESSAGES if path.startswith("/v1/messages") else Dialect.OPENAI


class ApiError(Exception):
    """An error as the tenant sees it.

    `retry_after_s` becomes `retry-after` (whole seconds, rounded up, at least 1) and `retry-after-ms`;
    `should_retry` overrides the client library's own rule for the status, None leaves it alone; `fields` are further
    header fields of the answer.
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
        form = _FORMS[reason]
        self.status = form.status
        self.type = form.type
        self.code = reason
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry
        self._fields = fields

    def body(self, dialect: Dialect = Dialect.OPENAI) -> bytes:
        """The JSON body of the answer, in the client's format."""
        if dialect is Dialect.MESSAGES:
            return self.anthropic_body()
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code.value}
        return msgspec.json.encode({"error": error})

    def anthropic_body(self) -> bytes:
        """The JSON body as clients of /v1/messages read it; the reason stands before the message."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        message = f"{self.code.value}: {self.message}"
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})

    def headers(self) -> list[Header]:
        """The answer's header fields: content type and when (and whether) to come again."""
        fields = [(b"content-type", b"application/json"), *self._fields]
        if self.retry_after_s is not None:
            fields.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_s))))
            fields.append((b"retry-after-ms", b"%d" % max(1, math.ceil(self.retry_after_s * 1000))))
        if self.should_retry is not None:
            fields.append((b"x-should-retry", b"true" if self.should_retry else b"false"))
        return fields

    def sse_event(self, dialect: Dialect = Dialect.OPENAI) -> bytes:
        """The error as a stream event, for when the first byte of the answer is already out."""
        if dialect is Dialect.MESSAGES:
            return b"event: error\ndata: %b\n\n" % self.anthropic_body()
        if dialect is Dialect.RESPONSES:
            return b"event: error\ndata: %b\n\n" % self._responses_event()
        return b"data: %b\n\n" % self.body()

    def _responses_event(self) -> bytes:
        """As clients of /v1/responses read it: the event itself is the error. What stands under `error` besides makes
        OpenAI's own library raise it."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code.value}
        event = {"type": "error", "code": self.code.value, "message": self.message, "param": self.param}
        return msgspec.json.encode({**event, "sequence_number": 0, "error": error})


class EngineError(ApiError):
    """What an engine found wrong with the request, in its own words, with its status and its code."""

    def __init__(
        self, reason: Reason, status: int, message: str, *, type: str, param: str | None, code: str | int | None
    ) -> None:
        super().__init__(reason, message, param=param)
        self.status = status
        self.type = type or self.type
        self._engine_code = code

    def body(self, dialect: Dialect = Dialect.OPENAI) -> bytes:
        if dialect is Dialect.MESSAGES:
            return self.anthropic_body()
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self._engine_code}
        return msgspec.json.encode({"error": error})

    def anthropic_body(self) -> bytes:
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": self.message}})
