"""Agents whose contexts grow from call to call, and clients who ask single questions: what overfills a KV cache?

An agent makes 5 to 30 calls for one answer (Pareto, so that most are short). Each call repeats the prompt and the
answer of the one before and adds to them, and between two calls the agent is in its tools. Then it begins anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Final

from policies.request import Claim, Flow
from simulation.run import Arrival, Record

Calls = tuple[tuple[int, int, float], ...]
"""An interaction: tokens of each prompt and answer, and seconds until the next call."""

CALLS_MIN, CALLS_MAX, CALLS_SHAPE = 5, 30, 1.2
FIRST_TOKENS: Final = (1000, 4000)
MORE_TOKENS: Final = (300, 1500)
ANSWER_TOKENS: Final = (50, 300)
CONTEXT_TOKENS: Final = 11_700
"""Mean context at a call."""
THINK_S: Final = 0.5
RETRY_S: Final = 5.0
"""Wait before the retry of a request that was refused without a time to wait."""
QUESTION_TOKENS: Final = (200, 1000)
SHORT_ANSWER_TOKENS: Final = (100, 300)
BEGIN_S: Final = 20.0
"""All agents have begun by then."""


@dataclass(frozen=True, slots=True)
class Agents:
    """So many agents of one tenant. `pause_s`: the median time in a tool, log-normal with a sigma of 1."""

    tenant: str
    agents: int
    weight: float = 1.0
    pause_s: float = 2.0
    streamed: bool = True
    recorded: tuple[Calls, ...] = ()
    """Interactions that each agent goes through in an order drawn for it; none: they are drawn as well."""


@dataclass(frozen=True, slots=True)
class Questions:
    """Clients who ask one question after another, or questions that come at this rate."""

    tenant: str
    clients: int = 0
    per_s: float = 0.0
    weight: float = 1.0


class _Course:
    """An agent's interaction: its calls, and how far the interaction has come."""

    def __init__(self, agents: Agents, user: int, serial: int, random: Random) -> None:
        self.agents = agents
        self.user = user
        self.id = f"{agents.tenant}-{serial}"
        self.first_block = serial << 24
        self.calls = random.choice(agents.recorded) if agents.recorded else _drawn(agents.pause_s, random)
        self.made = 0
        self.retries = 0
        self.began_s = 0.0
        self.refused: tuple[float, float] | None = None
        """When its start was refused first, and the seconds of that `retry-after`."""

    def call(self, now: float, block_size: int) -> Arrival:
        """Return the next call."""
        prompt, answer, _ = self.calls[self.made]
        blocks = tuple(range(self.first_block, self.first_block + (prompt + answer) // block_size))
        return Arrival(
            f"{self.id}.{self.made}.{self.retries}",
            Flow(self.agents.tenant, "agent", f"user-{self.user}"),
            now,
            prompt,
            answer,
            weight=self.agents.weight,
            streamed=self.agents.streamed,
            claim=Claim(self.id, ends=self.made == len(self.calls) - 1, explicit=True),
            prefix=blocks[: prompt // block_size],
            context=blocks,
        )


def _drawn(pause_s: float, random: Random) -> Calls:
    calls, tokens = [], random.randint(*FIRST_TOKENS)
    for _ in range(min(CALLS_MAX, int(CALLS_MIN * random.paretovariate(CALLS_SHAPE)))):
        answer = random.randint(*ANSWER_TOKENS)
        calls.append((tokens, answer, pause_s * random.lognormvariate(0.0, 1.0)))
        tokens += answer + random.randint(*MORE_TOKENS)
    return tuple(calls)


class Crowd:
    """All of them in closed loops, from one seed: what comes first, and what follows a request that has ended."""

    def __init__(
        self, groups: Sequence[Agents | Questions], *, seed: int, until_s: float, block_size: int = 16
    ) -> None:
        self.finished: list[tuple[str, float, float]] = []
        """Tenant, begin and end of each whole interaction."""
        self.retries = 0
        """Requests made again because they were refused."""
        self.came_back: list[tuple[float, float, int]] = []
        """Starts that were refused and went later: first `retry-after`, seconds that it took, and refusals of each."""
        self._random = Random(seed)
        self._groups = groups
        self._until_s = until_s
        self._block_size = block_size
        self._serial = count(1)
        self._courses: dict[str, _Course] = {}
        self._askers: dict[str, Questions] = {}

    def arrivals(self) -> Iterator[Arrival]:
        """Return the arrivals that depend on no answer, in order of time."""
        found: list[Arrival] = []
        for group in self._groups:
            if isinstance(group, Agents):
                found += [self._begin(group, user, self._random.uniform(0.0, BEGIN_S)) for user in range(group.agents)]
                continue
            for _ in range(group.clients):
                found.append(self._ask(group, self._random.random(), again=True))
            now = 0.0
            while group.per_s and (now := now + self._random.expovariate(group.per_s)) < self._until_s:
                found.append(self._ask(group, now, again=False))
        return iter(sorted(found, key=lambda one: one.arrived_s))

    def next_arrival(self, record: Record, now: float) -> Arrival | None:
        """Return the client's next request after a request has ended."""
        group, course = self._askers.pop(record.arrival.id, None), self._courses.pop(record.arrival.id, None)
        if now > self._until_s:
            return None
        is_refused = record.outcome != "completed"
        self.retries += is_refused and (group is not None or course is not None)
        if group is not None:  # at once, but not after a refusal: time would stand still
            return self._ask(group, now + RETRY_S * is_refused, again=True)
        if course is None:
            return None
        if is_refused:
            course.retries += 1
            if course.refused is None and not course.made:
                course.refused = now, record.retry_after_s
            return self._call(course, now + (record.retry_after_s or RETRY_S))
        if course.refused is not None and not course.made and record.dispatched_s is not None:
            refused_s, retry_after_s = course.refused
            self.came_back.append((retry_after_s, record.dispatched_s - refused_s, course.retries))
        pause_s = course.calls[course.made][2]
        course.made += 1
        if course.made < len(course.calls):
            return self._call(course, now + pause_s)
        self.finished.append((course.agents.tenant, course.began_s, now))
        return self._begin(course.agents, course.user, now + THINK_S)

    def _begin(self, agents: Agents, user: int, now: float) -> Arrival:
        course = _Course(agents, user, next(self._serial), self._random)
        course.began_s = now
        return self._call(course, now)

    def _call(self, course: _Course, now: float) -> Arrival:
        arrival = course.call(now, self._block_size)
        self._courses[arrival.id] = course
        return arrival

    def _ask(self, group: Questions, now: float, *, again: bool) -> Arrival:
        serial, tokens = next(self._serial), self._random.randint(*QUESTION_TOKENS)
        id = f"{group.tenant}-{serial}"
        if again:
            self._askers[id] = group
        blocks = tuple(range(serial << 24, (serial << 24) + tokens // self._block_size))
        answer = self._random.randint(*SHORT_ANSWER_TOKENS)
        return Arrival(id, Flow(group.tenant, "chat"), now, tokens, answer, weight=group.weight, prefix=blocks)
