"""What an experiment reads of a simulation: all records, decisions, and calls of the admission engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from policies.admission.decisions import Decision
from simulation.run import Record

LOST = "lost"
"""Outcome of a request whose gateway died."""


class EngineEvent(NamedTuple):
    """A call of the admission engine, complete enough to repeat. `arrived` carries the `Arrival`."""

    now: float
    method: str
    args: tuple[object, ...]


@dataclass(slots=True, eq=False)
class SimulationResult:
    """Result of a simulation: records by request, decisions in order, and replayable engine calls."""

    records: dict[str, Record] = field(default_factory=dict)
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    events: list[EngineEvent] = field(default_factory=list)
    waiting_max: int = 0
    """Most requests that waited inside one engine at the end of any step."""
    ended_s: float = 0.0
