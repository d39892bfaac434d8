"""What is an experiment? Published numbers beside ours, each with what is required and whether it is met."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from lab.plots import Series
from policies.orders import order

Value = float | str
"""A number, or words where one number does not say it."""


class Verdict(StrEnum):
    MET = "met"
    MISSED = "missed"
    SHOWN = "-"
    """Nothing is required: the number stands there to be compared."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measure: what the paper prints, what comes out here, what is required of it. `published` is "" if nothing."""

    measure: str
    published: Value
    ours: Value
    required: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Figure:
    """Lines to plot; `name` is its file's, unique among all experiments. The x axis begins at `x_from` or below."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_from: float = 0.0


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of one experiment. `notes`: what differs from the paper, and why; each a paragraph."""

    rows: Sequence[Row]
    figures: Sequence[Figure] = ()
    notes: Sequence[str] = ()


class SkippedError(Exception):
    """An experiment cannot be run here; the message says why."""


class FromSourceError(SkippedError):
    """An experiment extends what is compiled here."""

    def __str__(self) -> str:
        return "it extends what is compiled here: run it from source"


def require_source() -> None:
    """Raise FromSourceError if the orders and placements are compiled here, so that no class can extend them."""
    if not order.__file__.endswith(".py"):
        raise FromSourceError


class MissingTraceError(SkippedError):
    """A recorded trace that an experiment needs is not there."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return f"{self.path} is not there: name the directory of the traces with --traces"


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of an experiment: the directory of the recorded traces, which need not exist."""

    traces: Path

    def trace(self, name: str) -> Path:
        """A file among them. Raises MissingTraceError."""
        path = self.traces / name
        if not path.exists():
            raise MissingTraceError(path)
        return path


@dataclass(frozen=True, slots=True)
class Experiment:
    """`reproduces` names the paper and its table or figure; `run` is deterministic."""

    name: str
    reproduces: str
    run: Callable[[Inputs], Findings]


def _verdict(is_met: bool) -> Verdict:
    return Verdict.MET if is_met else Verdict.MISSED


def within(measure: str, published: float, ours: float, share: float, *, target: float | None = None) -> Row:
    """Ours may differ from the published value (or from `target`, where that is required) by this share."""
    aim = published if target is None else target
    required = f"{aim:g} ± {share:.0%}"
    return Row(measure, published, ours, required, _verdict(abs(ours - aim) <= share * abs(aim)))


def holds(measure: str, published: Value, ours: Value, required: str, is_met: bool) -> Row:
    """A requirement that words say best."""
    return Row(measure, published, ours, required, _verdict(is_met))


def shown(measure: str, published: Value, ours: Value) -> Row:
    """Nothing is required: for comparison only."""
    return Row(measure, published, ours, "", Verdict.SHOWN)
