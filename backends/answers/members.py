"""A streaming finder of a few members of a JSON object that is too long to hold.

Its work is linear in the text, and its memory is bounded: it holds the last bytes, which may be half a name, and the
first bytes of each value. A name counts only at its depth in the object, so neither generated text nor a client's text
that the engine repeats can forge a member.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

VALUE_BYTES_MAX: Final = 4096
"""Longer values are not read."""
CANDIDATES_MAX: Final = 1000
"""Names at other depths that end the search: each costs more than the text around it."""
_SLICE_BYTES: Final = 65536
_NAME_BYTES_MAX: Final = 48
"""Length of a name with its quotes, its colon and the spaces before the colon."""
_decode: Final = json.JSONDecoder().raw_decode  # stops at the value's end; msgspec must know the end first


class Nesting:
    """Nesting depth at the end of a JSON text that comes in pieces."""

    depth: int = 0
    in_string: bool = False
    _is_escaped: bool = False

    def take(self, text: bytes) -> None:
        """Update the depth, and whether the text is inside a string, by this piece."""
        if not text:
            return
        if self._is_escaped:
            self._is_escaped = False
            if text[:1] in (b"\\", b'"'):
                text = text[1:]
        if text.find(b"\\") >= 0:
            text = text.replace(b"\\\\", b"")
            if text.endswith(b"\\"):
                self._is_escaped = True
            text = text.replace(b'\\"', b"")
        parts = text.split(b'"')
        structure = b"".join(parts[1::2] if self.in_string else parts[0::2])
        if len(parts) % 2 == 0:
            self.in_string = not self.in_string
        self.depth += structure.count(b"{") + structure.count(b"[")
        self.depth -= structure.count(b"}") + structure.count(b"]")


class MemberFinder(Nesting):
    """Finder of `wanted` members: (depth, name) each, the outermost object having depth 1.

    Text around the object, such as an event's fields, must hold no quote and no bracket. If two members have one name,
    the first counts.
    """

    _carry: bytes = b""
    _candidates: int = 0

    def __init__(self, wanted: set[tuple[int, str]]) -> None:
        self._wanted = {(depth, name.encode()) for depth, name in wanted}
        names = b"|".join(sorted({re.escape(name) for _, name in self._wanted}))
        self._names = re.compile(rb'"(%b)"[ \t\r\n]{0,16}:' % names)
        self._values: dict[bytes, bytes] = {}
        """The first bytes of each value so far, by name."""
        self._found: dict[str, Any] = {}

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the text."""
        for at in range(0, len(data), _SLICE_BYTES):
            if not self._wanted and not self._values:
                return
            self._feed(data[at : at + _SLICE_BYTES] if len(data) > _SLICE_BYTES else data)

    def values(self) -> dict[str, Any]:
        """End the text and return the found values by name."""
        if self._wanted:
            carry, self._carry = self._carry, b""
            self._search(carry, len(carry))
        for name in list(self._values):
            self._decode_value(name)
        return self._found

    def _feed(self, data: bytes) -> None:
        for name in list(self._values):
            held = self._values[name]
            self._values[name] = held + data[: VALUE_BYTES_MAX - len(held)]
            if len(held) + len(data) >= VALUE_BYTES_MAX:
                self._decode_value(name)
        text = self._carry + data
        begins_max = max(0, len(text) - _NAME_BYTES_MAX)
        self._carry = text[self._search(text, begins_max) :]

    def _search(self, text: bytes, begins_max: int) -> int:
        """Search the names that begin before `begins_max`. Return how far the text is consumed."""
        at = 0
        for found in self._names.finditer(text):
            begin = found.start()
            if begin >= begins_max:
                break
            self.take(text[at:begin])
            at = begin
            if self.in_string:
                continue  # the end of a text
            place = self.depth, found[1]
            if place in self._wanted:
                self._wanted.discard(place)
                self._values[found[1]] = text[found.end() : found.end() + VALUE_BYTES_MAX]
                continue
            self._candidates += 1
            if self._candidates > CANDIDATES_MAX:
                self._wanted.clear()
                return len(text)
        if begins_max > at:
            self.take(text[at:begins_max])
            at = begins_max
        return at

    def _decode_value(self, name: bytes) -> None:
        """Decode a value that is complete or known to be too long."""
        text = self._values.pop(name).decode("utf-8", "replace").lstrip(" \t\r\n")
        try:
            value, end = _decode(text)
        except (ValueError, RecursionError):
            return
        if end < len(text):  # otherwise the value may continue
            self._found[name.decode()] = value
