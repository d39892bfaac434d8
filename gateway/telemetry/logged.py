"""What does the access log say of one request, or of a tenant's requests within some time? Sentences, and numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from gateway.telemetry.log_line import LogLine, decode_line
from policies.admission.explanation import OF_REFUSAL, dispatched_in_words, in_seconds, join_sentence, waited_in_words
from policies.capacity.obstacle import Obstacle
from simulation.statistics import quantiles
from simulation.traces.lines import read_lines, readable_bytes

ENDED: Final = {"abandoned": "was left by its client", "refused": "was refused"}
FAILED: Final = ("failed", "refused")
REASONS_SHOWN: Final = 5
NAMES: Final = {"queue_s": "Time in the queue", "ttft_s": "First token", "total_s": "End"}


def arrived_s(line: LogLine) -> float:
    return line.ts - line.total_ms / 1000


class LogExcerpt:
    """The requests that were asked about, and the requests dispatched while they waited. Raises TraceError.

    Files are read twice, so that only the asked requests are held in memory.

    Attributes:
        lines: of the asked requests.
        ahead: by tenant, the requests that the same engines had while an asked one waited.
        left_out: lines that are malformed, or that broke off.
    """

    def __init__(
        self, paths: Sequence[Path], is_asked: Callable[[LogLine], bool], *, has: str = "", is_last: bool = False
    ) -> None:
        """Read the files. `has`: text that each asked line contains. `is_last`: ask for the last ended request only."""
        self._ends = {path: readable_bytes(path) for path in paths}
        self.left_out = 0
        lines = sorted((line for line in self._read(has) if is_asked(line)), key=lambda line: line.ts)
        self.lines = lines[-1:] if is_last else lines
        self.ahead = self._ahead()

    def sentence(self) -> str:
        """Describe the one request."""
        [line] = self.lines
        waited = waited_in_words(self._waited_s(), self.ahead, line.tenant)
        if line.outcome == "refused" and not line.backend:
            why = next((text for reason, text in OF_REFUSAL.items() if reason == line.reason), line.reason)
            return join_sentence(line.request_id, line.tenant, f"refused: {why}", waited)
        said = dispatched_in_words(line.backend, line.placed, at_once=not waited) if line.backend else "not dispatched"
        ttft = "" if line.ttft_ms is None else f"had its first token after {in_seconds(line.ttft_ms / 1000)}"
        why = f" ({line.reason})" if line.reason else ""
        ended = f"{ENDED.get(line.outcome, line.outcome)}{why} after {in_seconds(line.total_ms / 1000)}"
        return join_sentence(line.request_id, line.tenant, said, waited, ttft, ended)

    def summary(self) -> list[str]:
        """Describe two requests or more: outcomes, times, what they waited for, and which waited longest."""
        found = self.numbers()
        ended = ", ".join(f"{count:,} {outcome}" for outcome, count in found["outcomes"].items())
        said = [f"{len(self.lines):,} requests of {self.lines[0].tenant}: {ended}."]
        if why := [f"{count:,} {reason}" for reason, count in found["reasons"].items()]:
            said.append(f"Failed or refused: {', '.join(why[:REASONS_SHOWN])}.")
        for name, text in NAMES.items():
            if found[name] is not None:
                half, most = (in_seconds(found[name][part]) for part in ("p50", "p95"))
                said.append(f"{text}: half of them {half} or less, one in twenty {most} or more.")
        if found["waited_s"]:
            said.append(
                f"Together they {waited_in_words(found['waited_s'], self.ahead, self.lines[0].tenant)}; "
                f"that is {found['queue_part']:.0%} of their time."
            )
            said.append(f"Longest waited {found['longest']}: ask for it by this id.")
        return said

    def numbers(self) -> dict[str, Any]:
        """Return the sums and quantiles as plain data."""
        lines = self.lines
        total_ms = sum(line.total_ms for line in lines)
        return {
            "requests": len(lines),
            "outcomes": dict(Counter(line.outcome for line in lines).most_common()),
            "reasons": dict(Counter(_why(line) for line in lines if line.outcome in FAILED).most_common()),
            "queue_s": quantiles([line.queue_ms / 1000 for line in lines], 50, 95),
            "ttft_s": quantiles([line.ttft_ms / 1000 for line in lines if line.ttft_ms is not None], 50, 95),
            "total_s": quantiles([line.total_ms / 1000 for line in lines], 50, 95),
            "queue_part": sum(line.queue_ms for line in lines) / total_ms if total_ms else 0.0,
            "waited_s": self._waited_s(),
            "ahead": dict(self.ahead.most_common()),
            "longest": max(lines, key=lambda line: line.queue_ms).request_id,
            "lines_left_out": self.left_out,
        }

    def _waited_s(self) -> dict[str, float]:
        """Return the seconds that all lines waited together, by obstacle."""
        by: dict[str, float] = {}
        for line in self.lines:
            for name, waited_ms in line.waited_ms.items():
                by[name] = by.get(name, 0.0) + waited_ms / 1000
        return {str(name): by[name] for name in Obstacle if by.get(name)}

    def _ahead(self) -> Counter[str]:
        begins, ends = _merged((arrived_s(line), line.queue_ms / 1000) for line in self.lines if line.waited_ms)
        if not begins:
            return Counter()
        models, engines = {line.model for line in self.lines}, {line.backend for line in self.lines}
        found: Counter[tuple[str, str]] = Counter()
        for line in self._read():
            if not line.backend:
                continue
            if line.model in models:
                engines.add(line.backend)
            place = bisect_left(begins, line.ts) - 1
            if place >= 0 and arrived_s(line) + line.queue_ms / 1000 < ends[place]:
                found[line.backend, line.tenant] += 1
        ahead: Counter[str] = Counter()
        for (engine, tenant), count in found.items():
            if engine in engines:
                ahead[tenant] += count
        return ahead

    def _read(self, has: str = "") -> Iterator[LogLine]:
        self.left_out = 0
        for path, end in self._ends.items():
            for _, text in read_lines(path, end):
                if has not in text:
                    continue
                try:
                    yield decode_line(text)
                except (ValueError, RecursionError):
                    self.left_out += 1


def _why(line: LogLine) -> str:
    """Return the reason, with the engine if there is one: no_backend, or backend_failed at gpu-1."""
    return f"{line.reason} at {line.backend}" if line.backend else line.reason


def _merged(waits: Iterator[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Merge overlapping waits (begin, seconds), and return the begins and the ends."""
    begins: list[float] = []
    ends: list[float] = []
    for begin_s, wait_s in sorted(waits):
        end_s = begin_s + wait_s
        if ends and begin_s <= ends[-1]:
            ends[-1] = max(ends[-1], end_s)
        else:
            begins.append(begin_s)
            ends.append(end_s)
    return begins, ends
