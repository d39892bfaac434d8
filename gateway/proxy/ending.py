"""Is a relayed answer complete? An engine may close the connection amid an answer of unknown length."""

from __future__ import annotations

from typing import Final

from gateway.http.headers import content_type, is_json

_CLOSES: Final = {b"{": b"}", b"[": b"]"}


class Ending:
    """A check of an answer that is relayed as it comes: the last byte of JSON must close what the first one opened."""

    __slots__ = ("_first", "_is_json", "_last")

    def __init__(self, headers: list[tuple[bytes, bytes]]) -> None:
        self._is_json = is_json(content_type(headers))
        self._first = self._last = b""

    def come(self, data: bytes) -> None:
        """Add the next bytes."""
        if self._is_json and not data.isspace():
            self._first = self._first or data.lstrip()[:1]
            self._last = data.rstrip()[-1:]

    @property
    def is_missing(self) -> bool:
        """Is the end missing, after the last bytes?"""
        return self._last != _CLOSES.get(self._first, self._last)
