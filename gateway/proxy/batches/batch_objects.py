"""Files, batches and results in OpenAI's format, and the checks of a file's lines."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from gateway.http.errors import ApiError
from gateway.http.headers import Header
from gateway.keys.identity import Principal
from gateway.telemetry.record import RequestRecord

WINDOW_S: Final = 86_400
DAY_S: Final = 86_400
FAULTS_MAX: Final = 100
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
NOT_ASKED: Final = {
    "no_room": "your files take all the bytes that you may keep; delete some",
    "batch_cancelled": "the batch was cancelled before this request had its answer",
    "batch_expired": "the batch was expired before this request had its answer",
}
"""Messages for requests without an answer, by code."""
_LONGEST: Final = max(NOT_ASKED, key=lambda code: len(code + NOT_ASKED[code]))
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_Key = Annotated[str, msgspec.Meta(max_length=64)]
_Value = Annotated[str, msgspec.Meta(max_length=512)]


class Expiry(msgspec.Struct):
    """A file's own expiry, which applies if it is earlier than that of all files."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, msgspec.Meta(ge=3600, le=30 * DAY_S)]


class NewBatch(msgspec.Struct):
    """The body of a request that creates a batch."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[_Key, _Value], msgspec.Meta(max_length=16)] | None = None
    output_expires_after: Expiry | None = None


class Caller(msgspec.Struct, omit_defaults=True):
    """A `Principal` as stored with a batch, by field names. Fields that an earlier version did not write have their
    defaults."""

    tenant: str
    weight: float
    apps: tuple[str, ...]
    models: frozenset[str] | None = None
    digest: bytes = b""
    user: str = ""
    issuer: str = ""
    is_batch: bool = False
    groups: frozenset[str] | None = None
    twin_digest: bytes = b""


_read_caller = msgspec.json.Decoder(tuple[Caller, list[Header]]).decode


def write_caller(of: Principal, fields: list[Header]) -> str:
    """Return a batch's author and the header fields of app and user as JSON. The key is represented by its hash
    alone."""
    return msgspec.json.encode((msgspec.convert(of, Caller, from_attributes=True), fields)).decode()


def read_caller(written: str) -> tuple[Principal, list[Header]]:
    """Return the author and the header fields. The key's validity and expiry are checked for each line."""
    of, fields = _read_caller(written)
    return Principal(**msgspec.structs.asdict(of)), fields


class StoredFile(NamedTuple):
    """A file's description."""

    id: str
    purpose: str
    filename: str
    bytes: int
    made_s: int
    expires_s: int = 0
    """Own expiry of the file, 0 without one."""

    def shown(self, keep_days: int) -> dict[str, Any]:
        until_s = self.made_s + keep_days * DAY_S
        return {
            "id": self.id, "object": "file", "bytes": self.bytes, "created_at": self.made_s, "filename": self.filename,
            "purpose": self.purpose, "status": "processed", "expires_at": min(until_s, self.expires_s or until_s),
        }  # fmt: skip


class LineResult(NamedTuple):
    """The result of one line.

    Attributes:
        record: the record of the request; None if none was run.
        instead: the line to write if there is no room for `line`; empty if there is room.
    """

    n: int
    line: bytes
    is_error: bool
    record: RequestRecord | None = None
    instead: bytes = b""


def new_id(prefix: str) -> str:
    return id_of(prefix, time.time()) + secrets.token_hex(8)


def id_of(prefix: str, unix_s: float) -> str:
    """Return the beginning of ids made at this time. Ids rise with time."""
    return f"{prefix}{int(unix_s * 1000):012x}"


def files_of(batch: str) -> tuple[str, str]:
    """Return the ids of a batch's output file and error file."""
    key = batch.removeprefix("batch_")
    return f"file-{key}o", f"file-{key}e"


def new_batch(asked: NewBatch, now_s: int) -> dict[str, Any]:
    """Return the first state of a new batch."""
    ends = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    return {
        "id": new_id("batch_"), "object": "batch", "status": "validating", "errors": None, "created_at": now_s,
        **msgspec.to_builtins(asked), **dict.fromkeys(f"{end}_at" for end in ends), "expires_at": now_s + WINDOW_S,
        "output_file_id": None, "error_file_id": None, "request_counts": {"total": 0, "completed": 0, "failed": 0},
    }  # fmt: skip


def listed(data: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Return one page of a list. `data` has one entry beyond `limit` if there are more."""
    first, last = (data[0]["id"], data[:limit][-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data[:limit], "has_more": len(data) > limit, "first_id": first, "last_id": last}


class StoredLine(msgspec.Struct):
    """A line of a file, which is one request."""

    custom_id: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    """The fields of a line's request that are checked when a batch is created."""

    model: str = ""
    stream: bool | None = None


class _CheckedLine(msgspec.Struct):
    """A line of a file, typed for the checks when a batch is created."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: _Body


_read_line = msgspec.json.Decoder(StoredLine).decode
_read_checked = msgspec.json.Decoder(_CheckedLine).decode


def strip_line(text: bytes) -> bytes:
    """Return a line without byte order mark and surrounding white space; empty if the line is blank."""
    return text.removeprefix(BYTE_ORDER_MARK).strip()


def read_line(text: bytes) -> StoredLine:
    return _read_line(strip_line(text))


class LineChecker:
    """The faults found in a file's lines, which are added in order by `take`."""

    def __init__(self, batch: str, endpoint: str, model_error: Callable[[str], ApiError | None]) -> None:
        """Create checks without faults. `model_error` returns the error of a model that cannot be asked, or None."""
        self.total = 0
        self.faults: list[dict[str, Any]] = []
        self.unanswered_bytes = 0
        """Bytes of the results if no request is answered."""
        self._batch = batch
        self._endpoint = endpoint
        self._model_error = cache(model_error)
        self._seen: set[int] = set()
        """Hashes of the ids seen, which are smaller than the ids."""

    def take(self, rows: Iterable[tuple[int, bytes]]) -> None:
        for n, text in rows:
            found = strip_line(text)
            if not found:
                continue
            self.total += 1
            try:
                line = _read_checked(found)
            except UNREADABLE as error:
                field = re.search(r"(?:\$\.|field `)([\w.]+)", str(error))
                code = "invalid_request" if isinstance(error, msgspec.ValidationError) else "invalid_json_line"
                self.fault(n, code, str(error), field[1] if field else None)
                continue
            identity = hash(line.custom_id)
            if identity in self._seen:
                self.fault(n, "duplicate_custom_id", "a line before has the same id", "custom_id")
            if line.url != self._endpoint:
                self.fault(n, "mismatched_url", f"the url should be that of the batch, {self._endpoint}", "url")
            if line.body.stream:
                self.fault(n, "invalid_request", "the answers of a batch are not streamed", "body.stream")
            if (unserved := self._model_error(line.body.model)) is not None:
                self.fault(n, unserved.code.value, unserved.message, "body.model")
            self._seen.add(identity)
            self.unanswered_bytes += len(not_asked(f"{self._batch}-{n}", line.custom_id, _LONGEST))

    def fault(self, line: int | None, code: str, message: str, param: str | None) -> None:
        if len(self.faults) < FAULTS_MAX:
            self.faults.append({"code": code, "message": message, "param": param, "line": line})


def answered(request_id: str, custom_id: str, status: int, body: bytes) -> bytes:
    """Return the output line of an answered request."""
    if not body.isascii():
        body = body.decode("utf-8", "replace").encode()
    try:
        shown: object = msgspec.Raw(msgspec.json.format(body, indent=-1))
    except UNREADABLE:
        shown = body.decode()
    return _line(request_id, custom_id, {"status_code": status, "request_id": request_id, "body": shown}, None)


def not_asked(request_id: str, custom_id: str, code: str) -> bytes:
    """Return the output line of a request without an answer."""
    return _line(request_id, custom_id, None, {"code": code, "message": NOT_ASKED[code]})


def _line(request_id: str, custom_id: str, response: object, error: object) -> bytes:
    shown = {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(shown) + b"\n"
