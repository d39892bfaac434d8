"""What are a few members of a JSON object that is too long to hold? Found in passing, wherever the text is cut.

Linear in the text and bounded in memory: what is held are the last bytes, which may be half a name, and the first bytes
of each value. A name counts only as deep in the object as it is looked for, so neither generated text nor what a client
wrote and the engine repeats can forge it.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

VALUE_BYTES_MAX: Final = 4096
"""A value that does not end within so many bytes is not read."""
CANDIDATES_MAX: Final = 1000
"""More names in other places than these end the search: each costs more than the text around it."""
_SLICE_BYTES: Final = 65536
_NAME_BYTES_MAX: Final = 48
"""A name with its quotes, its colon and the spaces before that."""
_decode: Final = json.JSONDecoder().raw_decode  # it ends with the value; msgspec wants to know the end before


class Nesting:
    """How deep the end of a JSON text is, whose pieces are given one after another."""

    depth: int = 0
    in_string: bool = False
    _is_escaped: bool = False

    def take(self, text: bytes) -> None:
        """Take note of how deep the text is after this piece, and whether inside a string."""
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
    """`wanted`: (depth, name) of each member, 1 being the outermost object. What surrounds the object, as an event's
    fields do, must hold no quote and no bracket. Of two members of one name the first counts."""

    _carry: bytes = b""
    _candidates: int = 0

    def __init__(self, wanted: set[tuple[int, str]]) -> None:
        self._wanted = {(depth, name.encode()) for depth, name in wanted}
        names = b"|".join(sorted({re.escape(name) for _, name in self._wanted}))
        self._names = re.compile(rb'"(%b)"[ \t\r\n]{0,16}:' % names)
        self._values: dict[bytes, bytes] = {}
        """By name, the first bytes of the value, as far as they have come."""
        self._found: dict[str, Any] = {}

    def feed(self, data: bytes) -> None:
        """The next bytes of the text."""
        for at in range(0, len(data), _SLICE_BYTES):
            if not self._wanted and not self._values:
                return
            self._feed(data[at : at + _SLICE_BYTES] if len(data) > _SLICE_BYTES else data)

    def values(self) -> dict[str, Any]:
        """The text has ended: what was found, by name."""
        if self._wanted:
            carry, self._carry = self._carry, b""
            self._search(carry, len(carry))
        for name in list(self._values):
            self._read(name)
        return self._found

    def _feed(self, data: bytes) -> None:
        for name in list(self._values):
            held = self._values[name]
            self._values[name] = held + data[: VALUE_BYTES_MAX - len(held)]
            if len(held) + len(data) >= VALUE_BYTES_MAX:
                self._read(name)
        text = self._carry + data
        begins_max = max(0, len(text) - _NAME_BYTES_MAX)
        self._carry = text[self._search(text, begins_max) :]

    def _search(self, text: bytes, begins_max: int) -> int:
        """Look at the names that begin before `begins_max`; returns how far the text has been taken in."""
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

    def _read(self, name: bytes) -> None:
        """The value has come, or enough of it to know that it is too long."""
        text = self._values.pop(name).decode("utf-8", "replace").lstrip(" \t\r\n")
        try:
            value, end = _decode(text)
        except (ValueError, RecursionError):
            return
        if end < len(text):  # else it may go on
            self._found[name.decode()] = value
