"""What is fuzzed, and what must hold for every input? A harness is one reader of foreign bytes and its bounds."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
TIMED_FROM_BYTES = 1 << 16
"""Smaller inputs are read too fast for a clock to tell linear from quadratic."""
JSON_MARKS = (*b'{ } [ ] : , " \\ \\" null true \xff \0'.split(b" "), b" ", b"\n", b"9" * 40, b"-1", b"1e999")
"""What JSON is made of, and what may not stand in it."""
START_S = 0.05
"""Whatever a reader takes once, and what else the machine may be doing."""


class Violation(Exception):
    """A property did not hold: the message says which, and for how long an input."""


@dataclass(frozen=True, slots=True)
class Harness:
    """One reader. `read` gets bytes, and may raise nothing but `errors`.

    Seeds lie in `corpus/NAME/`, one input a file; `tokens` are what a mutation may put in.
    """

    name: str
    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...] = ()
    tokens: tuple[bytes, ...] = ()
    s_per_mb_max: float = 1.0
    """Of CPU, interpreted: ten times what a linear reader takes, a hundredth of a quadratic one."""
    memory_ratio_max: float = 3.0
    """What reading allocates at its peak, by the size of the input, which is not counted."""
    grown_bytes: int = 1 << 19
    """How long an input is made to see whether reading is linear."""
    start_bytes: int = 1 << 18
    """What it allocates however short the input is."""

    def seeds(self) -> list[bytes]:
        """The kept inputs, in a fixed order."""
        return [path.read_bytes() for path in sorted((CORPUS / self.name).glob("*"))]


class Measure(Enum):
    """What else is looked at while an input is read. One at a time: to measure memory takes ten times as long."""

    NOTHING = auto()
    TIME = auto()
    MEMORY = auto()


def check(harness: Harness, data: bytes, measure: Measure = Measure.NOTHING, *, slower: float = 1.0) -> None:
    """Read one input. Any exception that leaves here is a finding. `slower`: how much, because coverage is recorded."""
    if measure is Measure.MEMORY:
        tracemalloc.start()
    started = time.process_time()
    try:
        harness.read(data)
    except harness.errors:
        pass
    finally:
        took_s = time.process_time() - started
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    size = len(data)
    long_s = slower * (START_S + harness.s_per_mb_max * size / 1e6)
    if measure is Measure.TIME and size >= TIMED_FROM_BYTES and took_s > long_s:
        raise Violation(f"{harness.name}: {took_s:.2f} s for {size} bytes")
    if peak_bytes > harness.start_bytes + harness.memory_ratio_max * size:
        raise Violation(f"{harness.name}: {peak_bytes} bytes of memory for {size} bytes")


def grown(data: bytes, at: int, length: int, size: int) -> bytes:
    """The input with one piece of it repeated until it is so long: what is not linear shows there."""
    at %= max(1, len(data))
    piece = data[at : at + max(1, length)] or b"["
    return data[:at] + piece * (size // len(piece)) + data[at + len(piece) :]
