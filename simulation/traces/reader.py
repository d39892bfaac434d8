"""Reader of recorded traffic, fairgate's access log or a CSV table, as arrivals in order of time.

Files are read once for their faults and totals, and again for every run, so that no run holds them in memory. A log may
grow meanwhile: all passes end where the log ended at the first look.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from heapq import heappop, heappush
from itertools import chain, islice
from pathlib import Path

import msgspec

from policies.orders.cost import LinearCost
from policies.request import ServiceTokens
from simulation.run import Arrival
from simulation.traces.lines import TraceError, csv_rows, place_of, read_lines, readable_bytes, required_columns
from simulation.traces.rows import AccessLogLine, PlainCsvLine, TracedRequest, TraceLine

HELD_MAX = 1_000_000
"""Requests held until their turn, where lines are not in order of arrival."""
POPULATIONS_MAX = 10_000
"""(tenant, app) pairs whose mean answer is known separately."""
OUTPUT_TOKENS_MAX = 4096
UNKNOWN_OUTPUT_TOKENS = 256
"""Answer length for a trace without a single answer."""
FOREIGN_LINES_MAX = 100
"""Lines at the start of a log that other writers may have written before its first one."""


class Trace:
    """A trace that has been read through once. Raise TraceError with file, line and column for a fault.

    Attributes:
        paths: its files with content, in the order of their beginnings.
        format: name of its format.
        requests: how many `arrivals` gives.
        skipped: lines of requests that never asked an engine for anything: refused before, or with an empty prompt.
        foreign: lines in a log that other writers wrote, or that are incomplete.
        elsewhere: lines of requests for other models.
        assumed: requests without an answer, whose length is taken from the mean of their tenant and app.
        span_s: from the first arrival to the last, after `speed`.
        demand: service that each tenant asks for: prompt tokens plus twice the output tokens.
        weights: each tenant's, as of its last request, or as given.
    """

    def __init__(
        self,
        *paths: Path,
        row: type[TraceLine] | None = None,
        speed: float = 1.0,
        limit: int | None = None,
        weights: Mapping[str, float] | None = None,
        models: Collection[str] = (),
    ) -> None:
        """Read a trace.

        Args:
            row: the format of its lines; None for one of fairgate's own, told by the content.
            speed: 2 lets requests arrive in half the time.
            limit: read only this many requests.
            weights: weights of tenants, in place of the trace's.
            models: read only requests for these models; empty for all.
        """
        self._ends = {path: readable_bytes(path) for path in paths}
        self.paths = [path for path in paths if next(self._lines(path), None) is not None]
        if not self.paths:
            raise TraceError(paths[0], "is empty")
        self._speed = speed
        self._limit = limit
        self.requests = self.skipped = self.foreign = self.elsewhere = self.assumed = 0
        self._own_weights = weights or {}
        self._models = models
        self._row = row or self._own_format(self.paths[0])
        self.format = self._row.format
        if len(self.paths) > 1:
            self.paths.sort(key=self._begins)
        self.span_s = 0.0
        self.demand: dict[str, float] = {}
        self.weights: dict[str, float] = {}
        self._answers = _MeanAnswerTokens()
        self._begins_s = 0.0
        self._survey()

    @property
    def name(self) -> str:
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        return self.paths[0].name + more

    def arrivals(self, block_size: int) -> Iterator[Arrival]:
        """Yield every request in order of arrival, from time 0, with prefixes in blocks of `block_size` tokens."""
        for number, entry in enumerate(self._limited()):
            output_tokens, asked = entry.output_tokens, entry.output_tokens_max
            if output_tokens is None:
                output_tokens = self._answers.expected(entry)
            yield Arrival(
                f"r{number}",
                entry.flow,
                (entry.time_s - self._begins_s) / self._speed,
                entry.prompt_tokens,
                output_tokens,
                max(output_tokens, OUTPUT_TOKENS_MAX if asked is None else asked),
                entry.weight,
                entry.streamed,
                claim=entry.claim,
                prefix=_blocks(entry, number, block_size),
            )

    def _survey(self) -> None:
        """Count the requests, the demand by tenant and the length of the trace. Raise TraceError for an empty one."""
        price = LinearCost()
        last_s = 0.0
        for entry in self._limited():
            if not self.requests:
                self._begins_s = entry.time_s
            self.requests += 1
            last_s = entry.time_s
            if entry.output_tokens is None:
                self.assumed += 1
            self._answers.learn(entry)
            tenant = entry.flow.tenant
            service = ServiceTokens(entry.prompt_tokens, entry.output_tokens or 0)
            self.demand[tenant] = self.demand.get(tenant, 0.0) + price(service)
            self.weights[tenant] = entry.weight
        if not self.requests:
            passed = f"{self.skipped} lines skipped, {self.elsewhere} of other models"
            raise TraceError(self.paths[0], f"holds no request to replay ({passed})")
        self.span_s = (last_s - self._begins_s) / self._speed

    # --- from lines to entries ---

    def _limited(self) -> Iterator[TracedRequest]:
        return islice(self.entries(), self._limit)

    def entries(self) -> Iterator[TracedRequest]:
        """Yield all requests in order of time by the trace's clock. A request is held while a later line may precede
        it."""
        held: list[tuple[float, int, TracedRequest]] = []
        settled_s = float("-inf")
        self.skipped = self.foreign = self.elsewhere = 0
        for number, (path, line, row) in enumerate(chain.from_iterable(map(self._rows_of, self.paths))):
            entry = self._entry(path, line, row)
            if not entry.prompt_tokens:
                self.skipped += 1
                continue
            if self._models and entry.model and entry.model not in self._models:
                self.elsewhere += 1
                continue
            if entry.time_s < settled_s:
                problem = f"{settled_s - entry.time_s:g} s too early after the lines above it: sort the trace by time"
                raise TraceError(path, problem, line=line, column=row.time_column)
            heappush(held, (entry.time_s, number, entry))
            if len(held) > HELD_MAX:
                problem = f"more than {HELD_MAX} requests out of order; cut it up"
                raise TraceError(path, problem, line=line)
            settled_s = max(settled_s, entry.time_s if entry.settled_s is None else entry.settled_s)
            while held and held[0][0] <= settled_s:
                yield heappop(held)[2]
        while held:
            yield heappop(held)[2]

    def _entry(self, path: Path, line: int, row: TraceLine) -> TracedRequest:
        try:
            entry = row.entry()
        except ValueError as error:
            raise TraceError(path, str(error), line=line, column=row.time_column) from error
        if not math.isfinite(entry.time_s):
            raise TraceError(path, "not a finite number", line=line, column=row.time_column)
        return entry._replace(weight=self._own_weights.get(entry.flow.tenant, row.weight))

    def _rows_of(self, path: Path) -> Iterator[tuple[Path, int, TraceLine]]:
        rows = csv_rows(path, self._row, self._ends[path]) if self._row.is_csv else self._json_rows(path)
        return ((path, number, row) for number, row in rows)

    def _begins(self, path: Path) -> float:
        """Return the beginning of a file. A file without a request comes first."""
        return next((self._entry(*place).time_s for place in self._rows_of(path)), float("-inf"))

    def _json_rows(self, path: Path) -> Iterator[tuple[int, TraceLine]]:
        decoder = msgspec.json.Decoder(self._row)
        for number, line in self._lines(path):
            if self._row.is_log and not line.startswith("{"):
                self.foreign += 1
                continue
            try:
                yield number, decoder.decode(line)
            except msgspec.ValidationError as error:
                column, problem = place_of(error)
                raise TraceError(path, f"{problem} ({self._needs()})", line=number, column=column) from error
            except (ValueError, RecursionError) as error:
                if self._row.is_log:
                    self.foreign += 1
                    continue
                byte = re.search(r"byte (\d+)", str(error))
                at = int(byte[1]) + 1 if byte else None
                raise TraceError(path, f"{error} ({self._needs()})", line=number, column=at) from error

    def _lines(self, path: Path) -> Iterator[tuple[int, str]]:
        return read_lines(path, self._ends[path])

    def _needs(self) -> str:
        return f"format {self._row.format} needs {', '.join(required_columns(self._row))}"

    def _own_format(self, path: Path) -> type[TraceLine]:
        """Return the access log if one of the first lines is JSON, else the table. A log may begin with other lines."""
        first = islice(self._lines(path), FOREIGN_LINES_MAX)
        return AccessLogLine if any(line.startswith("{") for _, line in first) else PlainCsvLine


class _MeanAnswerTokens:
    """Mean answer lengths by (tenant, app), and over all requests for an app without a complete answer."""

    def __init__(self) -> None:
        self._everybody = [0, 0]
        self._populations: dict[tuple[str, ...], list[int]] = {}

    def learn(self, entry: TracedRequest) -> None:
        totals = [self._everybody]
        key = entry.flow[:2]
        if key in self._populations or len(self._populations) < POPULATIONS_MAX:
            totals.append(self._populations.setdefault(key, [0, 0]))
        for total in totals:
            total[0] += entry.output_tokens is not None
            total[1] += entry.output_tokens_min if entry.output_tokens is None else entry.output_tokens

    def expected(self, entry: TracedRequest) -> int:
        """Return the expected length of an answer that was not seen to its end, within its limit.

        All seen tokens divided by ended answers is the mean of memoryless lengths.
        """
        count, tokens = self._populations.get(entry.flow[:2], self._everybody)
        if not count:
            count, tokens = self._everybody
        expected = entry.output_tokens_min + (round(tokens / count) if count else UNKNOWN_OUTPUT_TOKENS)
        return expected if entry.output_tokens_max is None else max(1, min(expected, entry.output_tokens_max))


def _blocks(entry: TracedRequest, number: int, block_size: int) -> tuple[int, ...]:
    """Convert a trace's blocks to chained hashes of an engine's blocks: equal hashes mean equal text up to their end.

    The unknown part of a prompt is taken as unique.
    """
    if not entry.hash_ids:
        return ()
    value, index, prefix = 0, -1, []
    for block in range(entry.prompt_tokens // block_size):
        last = ((block + 1) * block_size - 1) // entry.block_tokens
        while index < min(last, len(entry.hash_ids) - 1):
            index += 1
            value = hash((value, entry.hash_ids[index]))
        prefix.append(hash((value, block)) if last == index else hash((value, block, number)))
    return tuple(prefix)
