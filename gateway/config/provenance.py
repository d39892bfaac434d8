"""Where does a value of the configuration come from: the file, the environment, the command line, or a default?"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Final, Literal, NamedTuple

Loc = tuple[int | str, ...]


class Provenance(NamedTuple):
    """Where one value comes from."""

    source: Literal["file", "environment", "command line", "workers", "default"]
    """workers: made at the start, so that all workers have the same."""
    line: int = 0
    """Of the file; 0: it is not there."""
    variable: str = ""
    """The (first) environment variable in it."""


class Provenances:
    """What stands in the file, and what the command line gave."""

    def __init__(self, file: str, written: Mapping[Loc, Provenance], overridden: Set[str]) -> None:
        """`file`: ""; there is none, and all that is set was given. `written`: the scalars of the file by their place.
        `given`: the fields of the top level that the command line gave."""
        self.file = file
        self.written = written
        self._overridden = overridden

    def of(self, loc: Loc) -> Provenance:
        """Where a value comes from that is set. (Whether it is, its section knows.)"""
        if not self.file or loc[0] in self._overridden:
            return Provenance("command line")
        for end in range(len(loc), 0, -1):  # text in the place of a section is all that is set of it
            written = self.written.get(loc[:end])
            if written is not None:
                return written
        return Provenance("workers")


UNKNOWN: Final = Provenances("", {}, frozenset())
"""Of a configuration that was made by a program."""
