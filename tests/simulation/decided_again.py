"""What does another engine decide on the events of a run?"""

from __future__ import annotations

from collections.abc import Iterable

from policies.admission.decisions import Decision
from policies.admission.engine import AdmissionEngine
from simulation.run import Arrival, EngineEvent


def replay(events: Iterable[EngineEvent], engine: AdmissionEngine) -> list[tuple[float, Decision]]:
    """Its decisions, each with its time."""
    decisions: list[tuple[float, Decision]] = []
    for now, method, args in events:
        words = [arg.request() if isinstance(arg, Arrival) else arg for arg in args]
        decisions += [(now, decision) for decision in getattr(engine, method)(*words[:2], now, *words[2:])]
    return decisions
