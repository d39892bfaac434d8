"""How long will a request wait that cannot start at once?

A request waits at one gate: for its turn in the pool; below a full node of the tree; or, if it is a start, for room in
the working set. The tree and the set that decide say at which. The wait is the number of turns until it has gone, times
the seconds that a turn took lately while something waited at that gate.

What stands before it is counted as the order counts. The k-th request of a flow goes when the flow has received what
k - 1 usual requests of it take. Until then, every other flow of its tenant, and every other tenant at the gate, goes
first as often as brings it up to there, but no more often than requests of it wait and come at its usual rate. The
starts of a tenant enter the working set one after another. These are the known turns. Tenants that do not wait yet will
come and go first, too: the true number of turns over the known one (`passed`) is learned from waits that have ended.

If the tenants before a request have longer answers than the tenants that went lately, a turn takes so much longer.

All of it is asked and learned only of requests that wait. Of many members that wait, a sample is looked at, so that an
answer costs about the same however many they are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import exp, inf, log, sqrt
from typing import Any, Final, NamedTuple

from policies.averages import QUICK, STEADY
from policies.queue.backlog import Backlog
from policies.queue.counters import Counters, M, Member
from policies.request import WAIT_S_MAX, Request

SAMPLED: Final = 64
"""Members of one level."""
GATES_MAX: Final = 1000
"""Gates whose pace is remembered, the last ones at which a turn ended."""
WINDOW_S: Final = 15.0
"""Of the pace: what lies so far back counts 1/e."""
PASSED: Final = 1.5
"""True turns over known ones, until it is learned: `bench.expected_waits` finds 1.4 to 1.6 in each kind of traffic."""
PASSED_MAX: Final = 3.0
STEP: Final = 0.003
"""Part of the logarithm of true turns over expected ones by which one wait changes `passed`."""
ERROR_MAX: Final = 0.5
"""Of this logarithm: a few waits that nobody could foresee change little."""
SHORT_S: Final = 1e-3
"""Two requests of a member come no closer, as far as this is concerned."""
COUNTED_S_MIN: Final = 1.0
"""Shorter waits are not counted."""
BAND: Final = 2.0
"""A wait that is expected to take N seconds is told as N / BAND to N * BAND seconds, and is right within these."""


def interval_s(wait_s: float) -> tuple[float, float]:
    """Return the least and the most seconds that a wait takes which is expected to take `wait_s` seconds."""
    return wait_s / BAND, wait_s * BAND


class Gate(NamedTuple):
    """Where requests of one class wait: at a node of the tree, or as the starts of a tenant for the working set."""

    can_wait: bool
    node: str = ""
    """The full node; "": the pool, where each waits for its turn."""
    starts_of: str = ""
    """The tenant; "": they do not wait for the working set."""


class Expected(NamedTuple):
    """An expected wait."""

    wait_s: float
    since_s: float
    """When this was expected."""
    turns: float
    """Known turns until the request goes, its own among them."""
    gone: int
    """Requests that had gone through the gate by then."""
    gate: Gate
    is_learned: bool
    """A turn at the gate was seen. Else nobody knows how long one takes."""

    @property
    def late_s(self) -> float:
        """The wait and one standard deviation, where turns vary as exponentially distributed times do."""
        return min(WAIT_S_MAX, self.wait_s * (1.0 + 1.0 / sqrt(max(1.0, self.turns))))


class GateState(NamedTuple):
    """Where a request waits, and what of the pool decides about the length of its turns."""

    gate: Gate
    backlog: Backlog | None
    """None: all go in the order in which they came."""
    queued: int
    """Requests in its queue."""
    queues: int
    """Queues of the pool. Each has one turn in as many."""
    running: int
    """Requests that run behind the gate."""
    answer_s: float
    """How long answers take, where none was seen of a request that waited; of starts: how long a context counts."""

    @property
    def is_behind_a_start(self) -> bool:
        """Does another start of its tenant wait for the working set, as this one does?"""
        return self.backlog is not None and len(_starts(self.backlog, self.gate.starts_of)) > 0

    def is_empty(self, tenant: str) -> bool:
        """Does nothing wait at the gate? `tenant`: of a request that went through it."""
        gate, backlog = self.gate, self.backlog
        if backlog is None:
            return self.queued == 0
        if gate.starts_of:
            return not self.is_behind_a_start
        own = backlog.tenant(tenant)
        if gate.node:
            return gate.node not in backlog.full and (own is None or own.queued == 0)
        return len(backlog.batch if gate.can_wait else backlog.tenants) == 0


class _Pace:
    """How fast do requests go through one gate while something waits there?"""

    __slots__ = ("_answers_s", "_seconds", "_turns", "gone", "is_waited_for", "last_s", "passed")

    def __init__(self, passed: float) -> None:
        self.passed = passed
        self.gone = 0
        """Requests that went through the gate while others waited, or that had waited."""
        self.last_s = -inf
        """When the last one went that had waited."""
        self.is_waited_for = False
        """It left others waiting."""
        self._turns = self._seconds = self._answers_s = 0.0
        """While something waited: requests that went, seconds, and the sum of their tenants' `answer_s`."""

    @property
    def is_learned(self) -> bool:
        return self._seconds > 0.0

    def turn_s(self, running: int, answer_s: float) -> float:
        """By Little's law while nothing is known, which counts as one turn."""
        return (self._seconds + answer_s / max(1, running)) / (self._turns + 1.0)

    def answer_s(self) -> float:
        """Usual seconds of the answers of the tenants whose requests went lately; 0: none is known."""
        return self._answers_s / self._turns if self._turns else 0.0

    def went(self, elapsed_s: float, answer_s: float) -> None:
        """A request of a tenant with such answers went, so long after the one before it or after it began to wait."""
        kept = max(exp(-elapsed_s / WINDOW_S), 1.0 - STEADY)
        self.gone += 1
        self._turns = self._turns * kept + 1.0
        self._seconds = self._seconds * kept + elapsed_s
        self._answers_s = self._answers_s * kept + answer_s

    def learn(self, expected: Expected, turns: float) -> None:
        """A wait has ended after so many turns."""
        error = log(turns / (self.passed * expected.turns))
        self.passed *= exp(STEP * max(-ERROR_MAX, min(ERROR_MAX, error)))
        self.passed = max(1.0, min(PASSED_MAX, self.passed))


class ExpectedWaits:
    """The expected waits of one pool, and what waits that have ended taught."""

    def __init__(self) -> None:
        self._right = self._longer = self._shorter = 0
        self._usual = Member(())
        """What a request of any tenant takes."""
        self._paces: OrderedDict[Gate, _Pace] = OrderedDict()
        self._resumed_s = -inf
        """When an engine came into service last. No turn began before."""

    def of(self, request: Request, place: GateState, now: float, *, comes: bool, held_s: float = 0.0) -> Expected:
        """Return the expected wait. `comes`: the request does not wait yet. `held_s`: until the first turn."""
        gate, backlog = place.gate, place.backlog
        pace = self._paces.get(gate) or _new_pace(place)
        if gate.starts_of or backlog is None:
            own_turn_s = place.answer_s if gate.starts_of else self._usual.answer_s or place.answer_s
            turns = float(place.queued + comes)
            if gate.starts_of and backlog is not None:
                turns = _starts_before(backlog, request) + 1.0
            wait_s = turns * pace.turn_s(place.running, own_turn_s) * pace.passed
        else:
            turns, wait_s = self._among_members(request, place, backlog, pace, now, comes=comes)
        wait_s = min(WAIT_S_MAX, held_s + wait_s * place.queues)
        return Expected(wait_s, now, turns, pace.gone, gate, pace.is_learned)

    def _among_members(
        self, request: Request, place: GateState, backlog: Backlog, pace: _Pace, now: float, *, comes: bool
    ) -> tuple[float, float]:
        """Return the known turns until a request goes whose tenant takes turns with others, and their seconds."""
        answer_s = self._usual.answer_s or place.answer_s
        turn_s = pace.turn_s(place.running, answer_s)
        tenant, own = backlog.tenant(request.flow.tenant), backlog.flow(request.flow)
        usual = self._usual.usual or backlog.usual or float(request.prompt_tokens)
        own_s = (tenant.answer_s if tenant is not None else 0.0) or answer_s
        first = float((own.queued if own is not None else 0) + comes)
        line = _line_at(backlog, place.gate)
        turns, wait_s = first, inf
        for _ in range(2):  # how much comes meanwhile depends on the wait: at first, all that may go before is counted
            turns = first
            if tenant is not None:
                flows = _line_of(tenant.flows)
                turns += _before(flows, own, 1.0, first, backlog.usual_of_flow or 1.0, own_s, wait_s, now)[0]
            others, others_s = _before(line, tenant, request.weight, turns, usual, answer_s, wait_s, now)
            all_s = turns * own_s + others_s
            turns += others
            known = all_s / pace.answer_s() if pace.answer_s() and all_s else turns
            wait_s = known * turn_s * pace.passed
        if request.can_wait:  # what waits that cannot goes first
            gate = Gate(False, place.gate.node)
            others_pace = self._paces.get(gate) or _new_pace(place)
            wait_s += (
                _line_at(backlog, gate).queued() * others_pace.turn_s(place.running, answer_s) * others_pace.passed
            )
        return turns, wait_s

    def counts(self) -> dict[str, int]:
        """How many waits of more than `COUNTED_S_MIN` were as long as expected, longer or shorter?"""
        return {"right": self._right, "longer": self._longer, "shorter": self._shorter}

    # --- events ---

    def began(self, backlog: Backlog | None, request: Request, now: float) -> None:
        """Count the request, which is in its queue, among those that wait."""
        if backlog is not None:
            for member in (backlog.tenant(request.flow.tenant), backlog.flow(request.flow)):
                if member is not None:
                    _asks(member, now)

    def resumed(self, now: float) -> None:
        """Count no time of a turn in which no engine was in service."""
        self._resumed_s = now

    def dispatched(self, request: Request, place: GateState, oldest_s: float, now: float) -> None:
        """Count a request that left its queue for an engine. `oldest_s`: since when anything has waited in the pool."""
        wait, is_left = request.progress.wait, not place.is_empty(request.flow.tenant)
        pace = self._paces.get(place.gate)
        if wait is None and not is_left:
            if pace is not None:
                pace.is_waited_for = False
            return
        if pace is None:
            pace = self._paces[place.gate] = _new_pace(place)
            if len(self._paces) > GATES_MAX:
                self._paces.popitem(last=False)
        self._paces.move_to_end(place.gate)
        elapsed_s = 0.0
        if wait is not None:
            began_s = oldest_s if pace.is_waited_for else wait.since_s
            elapsed_s = max(0.0, now - max(began_s, pace.last_s, self._resumed_s))
            pace.last_s, pace.is_waited_for = now, is_left
        tenant = place.backlog.tenant(request.flow.tenant) if place.backlog is not None else None
        pace.went(elapsed_s, (tenant.answer_s if tenant is not None else 0.0) or self._usual.answer_s)
        if wait is not None and wait.expected is not None:
            self._compare(wait.expected, place.queues, now)

    def _compare(self, expected: Expected, queues: int, now: float) -> None:
        """Compare a wait that has ended with what was expected of it."""
        wait_s = now - expected.since_s
        if wait_s <= COUNTED_S_MIN:
            return
        pace = self._paces.get(expected.gate)
        turns = (pace.gone - expected.gone) / queues if pace is not None else 0.0
        # A request that another pool handed over, or that was in no engine's queue yet, knew of none of these turns.
        if pace is not None and turns > 0.0 and expected.turns > 0.0:
            pace.learn(expected, turns)
        least_s, most_s = interval_s(expected.wait_s)
        if wait_s > most_s:
            self._longer += 1
        elif wait_s < least_s:
            self._shorter += 1
        else:
            self._right += 1

    def answered(self, backlog: Backlog | None, request: Request, answer_s: float) -> None:
        """A request that had waited was answered, so long after its dispatch."""
        _learn(self._usual, request.progress.charged, answer_s, STEADY)
        if backlog is None:
            return
        tenant, flow = backlog.tenant(request.flow.tenant), backlog.flow(request.flow)
        if tenant is not None:
            _learn(tenant, request.progress.charged, answer_s, QUICK)
        if flow is not None:
            _learn(flow, request.progress.normalised or request.progress.charged, answer_s, QUICK)


class _Line(NamedTuple):
    """Members that wait at one gate, one level of the order, or a sample of them."""

    counters: Any
    members: Sequence[Any]
    number: int
    floor: float
    """The least rank of them, where a member begins."""

    def queued(self) -> float:
        """Return how many requests of them wait."""
        queued = float(sum([member.queued for member in self.members]))
        return queued * self.number / max(1, len(self.members))


def _line_of(counters: Counters[M]) -> _Line:
    return _Line(counters, counters.some(SAMPLED), len(counters), counters.floor())


def _line_at(backlog: Backlog, gate: Gate) -> _Line:
    """Return the tenants that wait at a gate: the ones that sleep at its node, or, in the pool, the ones awake."""
    counters = backlog.batch if gate.can_wait else backlog.tenants
    if not gate.node:
        return _line_of(counters)
    asleep = [tenant for tenant in backlog.full.get(gate.node, ()) if tenant.line is counters]
    members = asleep[:: len(asleep) // SAMPLED + 1]
    floor = min([counters.rank(member) for member in members]) if members else counters.floor()
    return _Line(counters, members, len(asleep), floor)


def _new_pace(place: GateState) -> _Pace:
    """Return the pace of a gate of which nothing is known. Whoever goes in the order of arrival is passed by nobody."""
    return _Pace(1.0 if place.backlog is None or place.gate.starts_of else PASSED)


def _starts_before(backlog: Backlog, request: Request) -> int:
    """Return how many starts of its tenant that sleep go before this one."""
    starts = [one[3] for one in _starts(backlog, request.flow.tenant)]
    return starts.index(request) if request in starts else len(starts)


def _starts(backlog: Backlog, name: str) -> Sequence[Any]:
    """Return the starts of a tenant that sleep."""
    tenant = backlog.tenant(name)
    return () if tenant is None else backlog.starts.get(tenant, ())


def _asks(member: Member, now: float) -> None:
    """Note that one more request of a member waits."""
    if member.asked_s < 0.0:
        member.gap_s = WINDOW_S  # as good as any other: twice or half as long changes no row of the benchmark
    else:
        member.gap_s += QUICK * (now - member.asked_s - member.gap_s)
    member.asked_s = now


def _learn(member: Member, charged: float, answer_s: float, part: float) -> None:
    if not member.answer_s:
        part = 1.0
    member.usual += part * (charged - member.usual)
    member.answer_s += part * (answer_s - member.answer_s)


def _before(
    line: _Line, own: Member | None, weight: float, place: float, usual: float, answer_s: float, wait_s: float,
    now: float,
) -> tuple[float, float]:  # fmt: skip
    """Return the turns of other members before the request that is in this place of a member and waits for so long, and
    the seconds of their answers.
    """
    rank = line.floor
    if own is not None:
        rank = line.counters.rank(own) if own.queued else max(rank, own.counter)
    level = rank + (place - 1.0) * ((own.usual if own is not None else 0.0) or usual) / weight
    turns = seconds = 0.0
    others = [member for member in line.members if member is not own]
    for member in others:
        rounds = (level - line.counters.rank(member)) * member.weight / (member.usual or usual)
        if rounds < 0.0:
            continue
        rounds += 0.5  # of those that are level with it, half go first
        if wait_s < inf:
            rounds = min(rounds, member.queued + wait_s / max(member.gap_s, now - member.asked_s, SHORT_S))
        turns += rounds
        seconds += rounds * (member.answer_s or answer_s)
    scale = (line.number - (len(line.members) > len(others))) / max(1, len(others))
    return turns * scale, seconds * scale
