"""Has an answer come to its end? An engine may close the connection amid one whose length it never said."""

from __future__ import annotations

from typing import Final

from gateway.http.headers import content_type, is_json

_CLOSES: Final = {b"{": b"}", b"[": b"]"}


class Ending:
    """Of an answer that goes on to the client as it comes: in JSON, its last byte closes what its first one opened."""

    __slots__ = ("_first", "_is_json", "_last")

    def __init__(self, headers: list[tuple[bytes, bytes]]) -> None:
        self._is_json = is_json(content_type(headers))
        self._first = self._last = b""

    def come(self, data: bytes) -> None:
        """The next bytes."""
        if self._is_json and not data.isspace():
            self._first = self._first or data.lstrip()[:1]
            self._last = data.rstrip()[-1:]

    @property
    def is_missing(self) -> bool:
        """All that came has come: was that not all?"""
        return self._last != _CLOSES.get(self._first, self._last)
