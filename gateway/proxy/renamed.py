"""Which name has the model in an answer? The one by which the client asked for it, whatever the engine calls it."""

from __future__ import annotations

import json
import re
from typing import Final

from backends.answers.members import Nesting
from gateway.request.body.payload import Payload

CANDIDATES_MAX: Final = 10_000
"""Members looked at in one piece, which takes 10 ms. What follows them stays as the engine wrote it."""
_MEMBERS: Final = re.compile(
    rb'"(?:model"\s*:\s*("[^"\\]*+(?:\\.[^"\\]*+)*+")'  # a name of a model
    rb'|([^"\\]*+)"\s*:\s*(?=\{))'  # any member that is an object
)
_OF_ANSWERS: Final = frozenset({b"response", b"message"})
"""Members of an event that hold the answer, and so the answer's own `model`."""


class Renamed:
    """Writes the client's name of the model in the place of the engine's, in what goes to the client.

    Only the answer's own `model` is renamed: at the top, or in the `response` or `message` of an event. Elsewhere a
    member of this name is what the model or the client wrote, such as the argument of a tool.
    """

    __slots__ = ("_instead", "_nesting", "_parent")

    @classmethod
    def of(cls, payload: Payload) -> Renamed | None:
        """None: the client's name of the model is the engines'."""
        return None if payload.asked in ("", payload.model) else cls(payload.asked)

    def __init__(self, asked: str) -> None:
        self._instead = json.dumps(asked).encode()
        self._nesting = Nesting()
        self._parent = b""
        """The last member of the outermost object that is an object."""

    def in_answer(self, data: bytes, *, goes_on: bool = False) -> bytes:
        """Rename in whole events of a stream, or in an answer. `goes_on`: this is a piece, and the rest follows."""
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
