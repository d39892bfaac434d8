"""What becomes of whole interactions? Calls that wait for each other's answers, and what is lost when one is refused.

An interaction is the chain of calls behind one answer: the next call is sent when the answer to the one before has
come and its tools have run. A call that is refused cuts the interaction: its user gets no answer, and what its earlier
calls took was spent for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from policies.request import Claim, Flow
from simulation.run import Arrival, Record


class PlannedCall(NamedTuple):
    """A call of an interaction. `system_tokens` of the prompt are the app's own instructions."""

    prompt_tokens: int
    output_tokens: int
    system_tokens: int = 0
    tools_s: float = 0.0
    """How long the caller works on the answer before the next call."""


@dataclass(frozen=True, slots=True)
class PlannedInteraction:
    """The calls behind one answer, in order; the first is sent at `starts_s`."""

    id: str
    flow: Flow
    starts_s: float
    calls: tuple[PlannedCall, ...]
    output_tokens_max: int = 4096
    weight: float = 1.0

    def arrival(self, stage: int, now: float) -> Arrival:
        """Return the call of this stage, from 1, sent at this time."""
        call = self.calls[stage - 1]
        claim = Claim(self.id, stage, begins=stage == 1, ends=stage == len(self.calls), explicit=True)
        return Arrival(
            f"{self.id}#{stage}", self.flow, now, call.prompt_tokens, call.output_tokens, self.output_tokens_max,
            self.weight, system_tokens=call.system_tokens, claim=claim,
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class Course:
    """How far has one interaction come? `records` are its calls so far."""

    interaction: PlannedInteraction
    records: list[Record]

    @property
    def completed(self) -> bool:
        """Was its last call answered?"""
        return len(self.records) == len(self.interaction.calls) and self.records[-1].outcome == "completed"

    @property
    def refused(self) -> bool:
        """Was it refused before anything was spent on it?"""
        return len(self.records) == 1 and self.records[0].outcome not in ("", "completed")

    @property
    def cut(self) -> bool:
        """Was it refused in the middle?"""
        return len(self.records) > 1 and self.records[-1].outcome not in ("", "completed")

    @property
    def wasted_tokens(self) -> int:
        """Prompt and output tokens that were spent on it although it was cut."""
        if not self.cut:
            return 0
        return sum(record.arrival.prompt_tokens + len(record.token_s) for record in self.records[:-1])


class InteractionClients:
    """The clients of a simulation: gives the first calls, and each next one when the last has been answered."""

    def __init__(self, interactions: Iterable[PlannedInteraction]) -> None:
        self._planned = sorted(interactions, key=lambda one: (one.starts_s, one.id))
        self.courses: dict[str, Course] = {one.id: Course(one, []) for one in self._planned}

    def arrivals(self) -> Iterator[Arrival]:
        """The first call of each, in order of time."""
        for interaction in self._planned:
            yield interaction.arrival(1, interaction.starts_s)

    def next_arrival(self, record: Record, now: float) -> Arrival | None:
        """Return what the client sends when this call has ended at this time: its next call, or nothing."""
        course = self.courses[record.arrival.claim.id]
        course.records.append(record)
        interaction, stage = course.interaction, len(course.records)
        if record.outcome != "completed" or stage == len(interaction.calls):
            return None
        return interaction.arrival(stage + 1, now + interaction.calls[stage - 1].tools_s)
