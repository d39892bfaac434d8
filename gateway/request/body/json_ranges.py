"""Where do the members of a JSON object and the items of a list begin and end? Read in slices, without a copy.

For bodies that are too long to be decoded at one go while others wait. All functions are generators that yield when
they have read some more, at most `WINDOW_BYTES` at a time. They follow strings and brackets, which is enough to know
what is whose; whether a value inside is well-formed is for the engine to judge. A strict parser that takes the body at
all finds the same members at the same places.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Generator
from typing import Final

import msgspec

from gateway.http.errors import ApiError, Reason
from gateway.request.body.slices import WINDOW_BYTES, Slices
from gateway.request.fields import decode_name

DEPTH_MAX: Final = 512
MEMBERS_MAX: Final = 1024
VALUES_MAX: Final = 1 << 18
"""Objects and lists in one value. Each would be some tokens of prompt, and no context has room for so many."""

ITEM_COST: Final = 512
"""What it costs to look at one item, in bytes that are read at the same time."""

_SPACE: Final = re.compile(rb"[ \t\r\n]*+")
_NAME: Final = re.compile(rb'"((?:[^"\\]|\\.){0,256}+)"', re.DOTALL)
_SCALAR: Final = re.compile(rb"[-+.0-9A-Za-z]*+")
_IN_STRING: Final = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_FLAT: Final = re.compile(rb'(?:[^"{}\[\]]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+', re.DOTALL)
"""Whole strings and whatever else is no bracket. Possessive: it keeps no way back, so it needs no memory."""
_QUOTE, _BACKSLASH, _COMMA, _COLON = 0x22, 0x5C, 0x2C, 0x3A
_OPEN_LIST, _CLOSE_LIST, _OPEN_OBJECT, _CLOSE_OBJECT = 0x5B, 0x5D, 0x7B, 0x7D


class ObjectMember:
    """One member of an object: where its name begins, and where its value begins and ends. Of a name too long to be
    anybody's, `name` is empty."""

    __slots__ = ("at", "end", "name", "value")

    def __init__(self, name: str, at: int, value: int, end: int) -> None:
        self.name = name
        self.at = at
        self.value = value
        self.end = end


def broken(what: str) -> ApiError:
    """What is said of a body that is no JSON."""
    return ApiError(Reason.INVALID_JSON, f"the body is not valid JSON: {what}")


def members(body: bytes, at: int, found: list[ObjectMember]) -> Generator[None, None, int]:
    """Find the members of the object that begins at `at`; returns where it ends."""
    at += 1
    at = yield from past_space(body, at)
    if _byte(body, at) == _CLOSE_OBJECT:
        return at + 1
    while True:
        if len(found) >= MEMBERS_MAX:
            raise ApiError(Reason.INVALID_REQUEST, f"an object of the request has more than {MEMBERS_MAX} fields")
        start = at
        if _byte(body, at) != _QUOTE:
            raise broken(f"a field's name is expected at byte {at}")
        name = ""
        match = _NAME.match(body, at)
        if match is not None:
            name, at = _decoded(body, match), match.end()
        else:
            at = yield from end_of_string(body, at + 1)
        at = yield from past_space(body, at)
        if _byte(body, at) != _COLON:
            raise broken(f"a colon is expected at byte {at}")
        value = yield from past_space(body, at + 1)
        end = yield from _end_of_value(body, value)
        found.append(ObjectMember(name, start, value, end))
        at = yield from past_space(body, end)
        mark = _byte(body, at)
        if mark == _CLOSE_OBJECT:
            return at + 1
        if mark != _COMMA:
            raise broken(f"a comma is expected at byte {at}")
        at = yield from past_space(body, at + 1)


def items(body: bytes, at: int, found: array[int], count_max: int) -> Slices:
    """Find the items of the list that begins at `at`: begins and ends by turns. At most one more than `count_max`."""
    at = yield from past_space(body, at + 1)
    if _byte(body, at) == _CLOSE_LIST:
        return
    read = 0
    while len(found) <= 2 * count_max:
        end = yield from _end_of_value(body, at)
        read += end - at + ITEM_COST
        if read >= WINDOW_BYTES:
            read = 0
            yield
        found.append(at)
        found.append(end)
        at = yield from past_space(body, end)
        mark = _byte(body, at)
        if mark == _CLOSE_LIST:
            return
        if mark != _COMMA:
            raise broken(f"a comma is expected at byte {at}")
        at = yield from past_space(body, at + 1)


def past_space(body: bytes, at: int) -> Generator[None, None, int]:
    """Where does the space end that begins here, if any does?"""
    while True:
        match = _SPACE.match(body, at, at + WINDOW_BYTES)
        assert match is not None
        if match.end() < at + WINDOW_BYTES:
            return match.end()
        at = match.end()
        yield


def end_of_string(body: bytes, at: int) -> Generator[None, None, int]:
    """Where does the string end whose opening quote is before `at`? Behind its closing quote."""
    size = len(body)
    while True:
        stop = min(at + WINDOW_BYTES, size)
        quote = body.find(b'"', at, stop)
        if quote >= 0 and (quote == at or body[quote - 1] != _BACKSLASH):
            return quote + 1
        if quote < 0 and body[stop - 1] != _BACKSLASH:
            at = stop  # nothing is escaped across the window's end
        else:
            match = _IN_STRING.match(body, at, stop)
            assert match is not None
            at = match.end()
            if at < stop and body[at] == _QUOTE:
                return at + 1
            if at == stop - 1 and stop < size:
                at += 2  # the backslash at the window's end, and what it escapes
        if at >= size - 1:
            if at < size and body[at] == _QUOTE:
                return at + 1
            raise broken("a string is not closed")
        yield


def _end_of_value(body: bytes, at: int) -> Generator[None, None, int]:
    first = _byte(body, at)
    if first == _QUOTE:
        end = yield from end_of_string(body, at + 1)
        return end
    if first in (_OPEN_OBJECT, _OPEN_LIST):
        end = yield from _end_of_nested(body, at)
        return end
    end = at
    while True:
        match = _SCALAR.match(body, end, end + WINDOW_BYTES)
        assert match is not None
        if match.end() < end + WINDOW_BYTES:
            break
        end = match.end()
        yield
    if match.end() == at:
        raise broken(f"a value is expected at byte {at}")
    return match.end()


def _end_of_nested(body: bytes, at: int) -> Generator[None, None, int]:
    depth = values = read = 0
    size = len(body)
    while at < size:
        match = _FLAT.match(body, at, at + WINDOW_BYTES)
        assert match is not None
        read += match.end() - at + 1
        at = match.end()
        mark = body[at] if at < size else 0
        if mark in (_OPEN_OBJECT, _OPEN_LIST):
            depth += 1
            values += 1
            read += ITEM_COST
            if depth > DEPTH_MAX:
                raise broken(f"it is nested deeper than {DEPTH_MAX}")
            if values > VALUES_MAX:
                message = f"one field of the request holds more than {VALUES_MAX} objects and lists"
                raise ApiError(Reason.INVALID_REQUEST, message)
            at += 1
        elif mark in (_CLOSE_OBJECT, _CLOSE_LIST):
            depth -= 1
            at += 1
            if depth == 0:
                return at
        elif mark == _QUOTE:
            at = yield from end_of_string(body, at + 1)  # one that goes on behind the window
        if read >= WINDOW_BYTES:
            read = 0
            yield
    raise broken("it ends too early")


def _byte(body: bytes, at: int) -> int:
    if at >= len(body):
        raise broken("it ends too early")
    return body[at]


def _decoded(body: bytes, match: re.Match[bytes]) -> str:
    try:
        return str(decode_name(body[match.start() : match.end()]))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""  # no text at all, so nobody's name
