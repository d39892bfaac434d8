"""Rows of a CSV file, typed by a class whose fields are the columns, and errors that name the place."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from simulation.traces.lines import TraceError, read_lines

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
