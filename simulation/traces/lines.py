"""Lines of a trace file, plain or gzip, and the error that names a place."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

LINE_BYTES_MAX = 16 << 20
"""Longest line. A prompt of a million tokens in blocks of 16 has 62,500 hashes, less than a megabyte."""
GZIP_MAGIC = b"\x1f\x8b"


class TraceError(Exception):
    """A trace cannot be read: where, what is wrong, what to do."""

    def __init__(self, path: Path, problem: str, *, line: int | None = None, column: str | int | None = None) -> None:
        place = str(path) if line is None else f"{path}:{line}"
        if column is not None:
            place += f": column {column!r}"
        super().__init__(f"{place}: {problem}")


def readable_bytes(path: Path) -> int:
    """Return the length of a file that may grow, without a line of JSON that is still being written.

    Raise TraceError.
    """
    try:
        with path.open("rb") as file:
            is_gzip = file.read(2) == GZIP_MAGIC
            size = file.seek(0, 2)
            file.seek(max(0, size - LINE_BYTES_MAX))
            last = file.read(LINE_BYTES_MAX).rpartition(b"\n")[2]
    except OSError as error:
        raise TraceError(path, f"cannot be read: {error.strerror or error}") from error
    if is_gzip or not last.startswith(b"{"):
        return size
    try:
        msgspec.json.decode(last)
    except (ValueError, RecursionError):
        return size - len(last)
    return size


def read_lines(path: Path, bytes_max: int | None = None) -> Iterator[tuple[int, str]]:
    """Yield lines that are not blank, without their ends, with their numbers from 1. Raise TraceError.

    `bytes_max` is how much of the file is read; None for all.
    """
    number = 0
    try:
        with path.open("rb") as file:
            is_gzip = file.read(2) == GZIP_MAGIC
            file.seek(0)
            lines = cast(BinaryIO, gzip.GzipFile(fileobj=file)) if is_gzip else file
            while line := lines.readline(LINE_BYTES_MAX + 1):
                if bytes_max is not None and not is_gzip and (bytes_max := bytes_max - len(line)) < 0:
                    return
                number += 1
                if len(line) > LINE_BYTES_MAX:
                    raise TraceError(path, f"longer than {LINE_BYTES_MAX >> 20} MiB: this is not a trace", line=number)
                text = _decoded(path, number, line)
                if text:
                    yield number, text
    except EOFError as error:
        problem = "the gzip ends in the middle: the file was cut off; fetch or compress it again"
        raise TraceError(path, problem, line=number + 1) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(path, f"the gzip is damaged ({error}); fetch it again", line=number + 1) from error
    except OSError as error:
        raise TraceError(path, f"cannot be read: {error.strerror or error}") from error


def _decoded(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8").strip("\r\n \t")
    except UnicodeDecodeError as error:
        raise TraceError(path, "not UTF-8 text: this is not a trace", line=number, column=error.start + 1) from error
