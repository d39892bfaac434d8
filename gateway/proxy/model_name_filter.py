"""The model's name in an answer: the client's own, whatever the engine calls the model."""

from __future__ import annotations

import json
import re
from typing import Final

from backends.answers.members import Nesting

CANDIDATES_MAX: Final = 10_000
"""Most members examined in one piece, which takes 10 ms. Later names stay as the engine wrote them."""
_MEMBERS: Final = re.compile(
    rb'"(?:model"\s*:\s*("[^"\\]*+(?:\\.[^"\\]*+)*+")'  # a name of a model
    rb'|([^"\\]*+)"\s*:\s*(?=\{))'  # any member that is an object
)
_OF_ANSWERS: Final = frozenset({b"response", b"message"})
"""Members of an event that hold the answer, with its own `model`."""


class ModelNameFilter:
    """A filter that replaces the engine's name of the model by the client's.

    Only the answer's own `model` is renamed: at the top, or in the `response` or `message` of an event. Elsewhere a
    member of this name is text of the model or the client, such as the argument of a tool.
    """

    __slots__ = ("_instead", "_nesting", "_parent")

    def __init__(self, asked: str) -> None:
        self._instead = json.dumps(asked).encode()
        self._nesting = Nesting()
        self._parent = b""
        """Name of the outermost object's last member that is an object itself."""

    def apply(self, data: bytes, *, goes_on: bool = False) -> bytes:
        """Return the data with the client's name, for complete events or a complete answer. `goes_on`: the data is a
        piece, and more follows."""
        pieces: list[bytes] = []
        kept = taken = 0
        nesting = self._nesting
        for number, found in enumerate(_MEMBERS.finditer(data)):
            if number >= CANDIDATES_MAX:
                break
            begin = found.start()
            nesting.take(data[taken:begin])
            taken = begin
            if found[1] is None:
                if nesting.depth == 1:
                    self._parent = found[2]
            elif nesting.depth == 1 or (nesting.depth == 2 and self._parent in _OF_ANSWERS):
                pieces += (data[kept : found.start(1)], self._instead)
                kept = found.end(1)
        if goes_on:
            nesting.take(data[taken:])
        else:
            self._nesting, self._parent = Nesting(), b""
        if not pieces:
            return data
        pieces.append(data[kept:])
        return b"".join(pieces)
