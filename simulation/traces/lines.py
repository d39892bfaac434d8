"""Lines of a trace file, plain or gzip, rows of a table in CSV, and the error that names a place."""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

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
    """Return the length of a file that may grow, without a last line of JSON that has no end yet.

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
    is_being_written = not is_gzip and last.startswith(b"{") and not last.endswith(b"}")
    return size - len(last) if is_being_written else size


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


R = TypeVar("R", bound=msgspec.Struct)


def csv_rows(path: Path, row: type[R], bytes_max: int | None = None) -> Iterator[tuple[int, R]]:
    """Yield each line after the header with its number, as a row. Raise TraceError. `bytes_max` is that of
    `read_lines`."""
    needs = f"a trace as a table needs {', '.join(required_columns(row))}"
    lines = read_lines(path, bytes_max)
    first = next(lines, None)
    if first is None:
        raise TraceError(path, f"is empty ({needs})")
    header_line, header = first[0], csv_cells(path, *first)
    missing = [name for name in required_columns(row) if name not in header]
    if missing:
        raise TraceError(path, f"missing from the header ({needs})", line=header_line, column=missing[0])
    twice = [field.encode_name for field in msgspec.structs.fields(row) if header.count(field.encode_name) > 1]
    if twice:
        raise TraceError(path, "twice in the header: which of them counts?", line=header_line, column=twice[0])
    for number, line in lines:
        cells = csv_cells(path, number, line)
        if len(cells) != len(header):
            problem = f"{len(cells)} columns where the header has {len(header)}"
            raise TraceError(path, problem, line=number, column=min(len(cells), len(header)) + 1)
        fields = dict(zip(header, cells, strict=True))
        try:
            yield number, msgspec.convert(fields, row, strict=False)
        except msgspec.ValidationError as error:
            column, problem = place_of(error)
            raise TraceError(
                path, f"{problem}, and is {fields.get(column or '', '')!r}", line=number, column=column
            ) from error


def csv_cells(path: Path, number: int, line: str) -> list[str]:
    """Return the cells of one line. Raise TraceError."""
    try:
        return [cell.strip() for cell in next(csv.reader([line]))]
    except csv.Error as error:
        raise TraceError(path, f"not a line of CSV: {error}", line=number) from error


def required_columns(row: type[msgspec.Struct]) -> list[str]:
    """Return the columns that a row must have."""
    return [field.encode_name for field in msgspec.structs.fields(row) if field.required]


def place_of(error: msgspec.ValidationError) -> tuple[str | None, str]:
    """Return the column of an error, and what is wrong there."""
    missing = re.search(r"missing required field `(.+?)`", str(error))
    if missing:
        return missing[1], "missing here"
    at = re.search(r"^(.*) - at `\$\.?(.*)`$", str(error))
    return (at[2].removesuffix("[...]"), at[1]) if at else (None, str(error))
