"""How is a body read? By the rules of its API: at one go, or in slices where it is large."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

from gateway.http.errors import ApiError, Reason
from gateway.http.http_request import HttpRequest
from gateway.request.apis import AUDIO, OTHER, Api
from gateway.request.body.form import is_form, read_form
from gateway.request.body.large_body import read_large_json
from gateway.request.body.payload import LARGE_BODY_BYTES, Payload, read_json
from gateway.request.body.slices import at_once

AT_ONCE_BYTES_MAX: Final = 1 << 20
OBJECTS_MAX: Final = 1 << 13
"""A body within both is read within 20 ms, whatever it holds (`bench.bodies --megabytes 1`)."""
_OBJECTS: Final = (b'{"', b"{}", b"{ ", b"{\n", b"{\r", b"{\t")
"""How an object of JSON can begin. Where code stands in a string, most braces have something else behind them."""


def is_quick(body: bytes, api: Api) -> bool:
    """Is it read at one go? Conversations are up to `AT_ONCE_BYTES_MAX`: in slices they take ten times as long."""
    if len(body) <= LARGE_BODY_BYTES:
        return True
    if len(body) > AT_ONCE_BYTES_MAX or not api.conversation or "prompt" in api.prompt:
        return False
    return body.count(b"{") <= OBJECTS_MAX or sum([body.count(begin) for begin in _OBJECTS]) <= OBJECTS_MAX


def read_body(request: HttpRequest, api: Api) -> Payload:
    """Of a small one. Raises `ApiError` 400 where it cannot be read."""
    form = _form_type(request, api)
    return read_json(request.body, api) if form is None else at_once(read_form(request.body, form, api))


def read_body_in_slices(request: HttpRequest, api: Api) -> Generator[None, None, Payload]:
    """The same of a large one."""
    form = _form_type(request, api)
    payload: Payload
    if form is None:
        payload = yield from read_large_json(request.body, api)
    else:
        payload = yield from read_form(request.body, form, api)
    return payload


def _form_type(request: HttpRequest, api: Api) -> bytes | None:
    """The content-type of a form, where the API takes one. Whatever a body is labelled elsewhere, it is read as JSON:
    some engines do not look at the label."""
    if api is not AUDIO and api is not OTHER:
        return None
    content_type = request.header(b"content-type")
    if is_form(content_type):
        return content_type
    if api is AUDIO:
        raise ApiError(Reason.INVALID_REQUEST, "a form with a file is expected: content-type multipart/form-data")
    return None
