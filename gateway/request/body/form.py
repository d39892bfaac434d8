"""A reader of forms with an uploaded file: it reads the few needed fields, without a copy of the file.

Own code, since it is `bytes.find` from one boundary to the next, while available parsers call back for every piece and
accept more than an engine may. A doubtful form is refused, so that gateway and engine see the same fields.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from gateway.http.errors import ApiError, Reason
from gateway.request.apis import Api
from gateway.request.body.payload import NO_FIELDS, STEERING, USER_LENGTH_MAX, Payload
from gateway.request.fields import FLAGS
from gateway.request.prompt import Prompt

_LINE_END: Final = b"\r\n"
_LAST: Final = b"--"
PARTS_MAX: Final = 128
HEAD_BYTES_MAX: Final = 4096
VALUE_BYTES_MAX: Final = 256
AUDIO_PROMPT: Final = Prompt(b"")
AUDIO_PROMPT.attachments = 1
"""The prompt of an upload, which counts as one inline clip. The clip's beginning and tokens are unknown."""

_TYPE: Final = b"multipart/form-data"
_DISPOSITION: Final = b"form-data"
_BOUNDARY: Final = re.compile(rb"[A-Za-z0-9'()+_,./:=? -]{0,69}[A-Za-z0-9'()+_,./:=?-]")
_TOKEN: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_LINE: Final = re.compile(rb"(" + _TOKEN + rb"):[ \t]*([^\r\n\0]*)")
_PARAMETER: Final = re.compile(
    rb"[ \t]*;[ \t]*(?:(" + _TOKEN + rb')=(?:"((?:[^"\\]|\\.)*+)"|([^\s;"\\]*)))?[ \t]*', re.DOTALL
)
"""A parameter as clients write it: .NET leaves the quotes out, others name the file in a second way."""
_CHARSETS: Final = (b"utf-8", b"utf8", b"us-ascii", b"ascii", b"iso-8859-", b"latin", b"windows-125", b"cp125")
"""Beginnings of the charsets of a form in which every engine reads the same names."""
_PLAIN: Final = frozenset({b"7bit", b"8bit", b"binary"})
_READ: Final = frozenset({"model", "stream", "user"})


class FormPart(NamedTuple):
    """A part of a form: `body[at:after]`, with its value in `body[begin:end]`."""

    name: str
    file_name: str
    at: int
    begin: int
    end: int
    after: int


class FormPayload(Payload):
    """A form, in which the gateway may replace the model's name."""

    __slots__ = ("_model_at",)

    def __init__(
        self, body: bytes, api: Api, model: str, stream: bool, user: str, model_at: tuple[int, int] | None
    ) -> None:
        """Create a payload. `model_at`: bounds of the model's name in the body; None if the form has none."""
        super().__init__(body, NO_FIELDS, api, AUDIO_PROMPT, 1, model, stream, user)
        self._model_at = model_at

    def rename(self, model: str) -> None:
        self.model = model
        if self._model_at is not None:
            begin, end = self._model_at
            view = memoryview(self.body)
            name = model.encode()
            self.body = b"".join((view[:begin], name, view[end:]))
            self._model_at = begin, begin + len(name)


def is_form(content_type: bytes) -> bool:
    """Return whether the content-type names a form."""
    return content_type[: len(_TYPE)].lower() == _TYPE


def read_form(body: bytes, content_type: bytes, api: Api) -> Payload:
    """Read the fields that admission needs and leave out those that steer an engine. Raise `ApiError` 400 for a bad
    form."""
    parts, end = read_parts(body, content_type)
    found: dict[str, str] = {}
    model_at: tuple[int, int] | None = None
    left_out_bytes = 0
    kept: list[FormPart] = []
    for part in parts:
        if part.name in _READ:
            _note(found, part.name, body[part.begin : min(part.end, part.begin + VALUE_BYTES_MAX + 1)])
        if part.name == "model":
            model_at = part.begin - left_out_bytes, part.end - left_out_bytes
        if part.name not in STEERING:
            kept.append(part)
        else:
            left_out_bytes += part.after - part.at
    if len(kept) < len(parts) or len(body) > end + len(_LINE_END):  # engines may read trailing bytes as they like
        view = memoryview(body)
        begin, last = (parts[0].at, parts[-1].after) if parts else (end, end)
        pieces = [view[:begin], *[view[one.at : one.after] for one in kept], view[last:end]]
        body = b"".join([*pieces, _LINE_END])
    stream = FLAGS.get(found.get("stream", "").lower(), False)
    user = found.get("user", "")[:USER_LENGTH_MAX]
    return FormPayload(body, api, found.get("model", ""), stream, user, model_at)


def read_parts(body: bytes, content_type: bytes) -> tuple[list[FormPart], int]:
    """Return the parts of a form and the form's end, or raise `ApiError` 400."""
    said = _parameters(content_type, _TYPE)
    boundary = None if said is None else _BOUNDARY.fullmatch(said.get(b"boundary", b""))
    if said is None or boundary is None:
        what = "its content-type should be 'multipart/form-data; boundary=...', with a boundary of up to 70 letters"
        raise _bad(what)
    if not (charset := said.get(b"charset", b"utf-8")).lower().startswith(_CHARSETS):
        raise _bad(f"its charset '{charset[:40].decode('latin-1')}' is not known here; send utf-8")
    mark = b"\r\n--" + boundary[0]
    at = 0
    while body.startswith(_LINE_END, at):
        at += len(_LINE_END)
    if not body.startswith(mark[2:], at):
        raise _bad("the body does not begin with the boundary of its content-type")
    parts: list[FormPart] = []
    at += len(mark) - 2
    while not _is_end(body, at):
        begin = at + 2
        number = len(parts) + 1
        if number > PARTS_MAX:
            raise _bad(f"it has more than {PARTS_MAX} parts")
        value = body.find(b"\r\n\r\n", begin, begin + HEAD_BYTES_MAX) + 4
        if value < 4:
            raise _bad(f"the head of part {number} does not end within {HEAD_BYTES_MAX} bytes")
        name, file_name = _names(body[begin : value - 4], number)
        end = body.find(mark, value)
        if end < 0 or body.startswith(mark[2:], value):
            raise _bad(f"part {number} does not end with a line end and the boundary")
        parts.append(FormPart(name, file_name, at, value, end, end + len(mark)))
        at = end + len(mark)
    return parts, at + len(_LAST)


def _is_end(body: bytes, at: int) -> bool:
    """Return whether the form ends behind this boundary. Raise ApiError if no part follows either."""
    if body.startswith(_LAST, at):
        return True
    if not body.startswith(b"\r\n", at):
        raise _bad(f"a line end is expected behind the boundary at byte {at}")
    return False


def _parameters(value: bytes, kind: bytes) -> dict[bytes, bytes] | None:
    """Return the parameters of a header's value that begins with `kind`.

    Return None if it begins otherwise, has a parameter twice, or can be read in more than one way.
    """
    found: dict[bytes, bytes] = {}
    at = len(kind)
    if value[:at].lower() != kind:
        return None
    while at < len(value):
        parameter = _PARAMETER.match(value, at)
        if parameter is None:
            return None
        at = parameter.end()
        if parameter[1] is not None:
            name = parameter[1].lower()
            if name in found:
                return None
            found[name] = parameter[3] if parameter[2] is None else parameter[2]
    return found


def _names(head: bytes, number: int) -> tuple[str, str]:
    """Return the field name in a part's head and the file name, empty without one."""
    disposition: dict[bytes, bytes] | None = None
    for line in head.split(b"\r\n"):
        field = _LINE.fullmatch(line)
        if field is None:
            raise _bad(f"the head of part {number} is not made of 'name: value' lines")
        name, value = field[1].lower(), field[2].rstrip()
        if name == b"content-disposition" and disposition is None:
            disposition = _parameters(value, _DISPOSITION)
            if disposition is not None and _is_plain(disposition):
                continue
        elif name != b"content-disposition" and (name != b"content-transfer-encoding" or value.lower() in _PLAIN):
            continue
        raise _bad(f"part {number} should say 'content-disposition: form-data; name=\"...\"' once, and not be encoded")
    if disposition is None:
        raise _bad(f"part {number} has no content-disposition")
    named, file_name = disposition[b"name"], disposition.get(b"filename", b"")
    return named.decode("utf-8", "replace"), file_name.decode("utf-8", "replace")


def _is_plain(disposition: dict[bytes, bytes]) -> bool:
    """Return whether every reader gets one name for the field."""
    is_coded = any([parameter.startswith(b"name*") for parameter in disposition])
    return not is_coded and b"\\" not in disposition.get(b"name", b"\\")


def _note(found: dict[str, str], name: str, value: bytes) -> None:
    if name in found:
        raise ApiError(Reason.INVALID_REQUEST, f"'{name}' is given twice", param=name)
    if len(value) > VALUE_BYTES_MAX:
        message = f"'{name}' is longer than {VALUE_BYTES_MAX} bytes"
        raise ApiError(Reason.INVALID_REQUEST, message, param=name)
    found[name] = value.decode("utf-8", "replace")


def _bad(what: str) -> ApiError:
    return ApiError(Reason.INVALID_REQUEST, f"the body is not a well-formed form: {what}")
