"""The reader of bodies, as JSON or as a form by the rules of their API."""

from __future__ import annotations

from gateway.http.errors import ApiError, Reason
from gateway.http.headers import header_of
from gateway.http.http_request import HttpRequest
from gateway.request.apis import AUDIO, OTHER, Api
from gateway.request.body.form import is_form, read_form
from gateway.request.body.payload import Payload, read_json


def read_body(request: HttpRequest, api: Api, json_bytes_max: int) -> Payload:
    """Read a body of JSON of at most `json_bytes_max` bytes, or a form where the API takes forms. Raise `ApiError` for
    a larger body of JSON, and for one that cannot be read.

    All other bodies are read as JSON whatever their content-type, since some engines ignore it.
    """
    if api is AUDIO or api is OTHER:
        content_type = header_of(request.headers, b"content-type")
        if is_form(content_type):
            return read_form(request.body, content_type, api)
        if api is AUDIO:
            raise ApiError(Reason.INVALID_REQUEST, "a form with a file is expected: content-type multipart/form-data")
    if len(request.body) > json_bytes_max:
        message = f"the body has {len(request.body)} bytes of JSON, and at most {json_bytes_max} are read"
        raise ApiError(Reason.BODY_TOO_LARGE, message)
    return read_json(request.body, api)
