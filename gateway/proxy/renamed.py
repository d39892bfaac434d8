"""Which name has the model in an answer? The one by which the client asked for it, whatever the engine calls it."""

from __future__ import annotations

import json
import re

from gateway.request.body.payload import Payload


class Renamed:
    """Writes the client's name of the model in the place of the engine's, in what goes to the client.

    A quote inside of JSON text has a backslash before it, so what looks like a member `model` is one, and never text
    that was generated. Only a value that is the engine's name is changed.
    """

    __slots__ = ("_instead", "_named")

    @classmethod
    def of(cls, payload: Payload) -> Renamed | None:
        """None: the client's name of the model is the engines'."""
        return None if payload.asked in ("", payload.model) else cls(payload.model, payload.asked)

    def __init__(self, served: str, asked: str) -> None:
        spellings = {json.dumps(served), json.dumps(served, ensure_ascii=False)}
        names = b"|".join([re.escape(spelling.encode("utf-8", "surrogatepass")) for spelling in sorted(spellings)])
        self._named = re.compile(rb'"model"(\s*:\s*)(?:' + names + rb")")
        self._instead = json.dumps(asked).encode()

    def in_answer(self, data: bytes) -> bytes:
        """Whole events of a stream, or an answer in one piece."""
        return self._named.sub(lambda found: b'"model"' + found[1] + self._instead, data)
