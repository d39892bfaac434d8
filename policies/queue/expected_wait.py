"""How long will a request wait that cannot start at once?

A request waits at one gate: for its turn in the pool; below a full node of the tree; or, as a start, for room in the
working set. The tree and the working set decide at which gate. The expected wait is the number of turns until the
request passes the gate, times the seconds that a turn took lately while something waited there.

The *known turns* follow the order's counters. The k-th request of a flow goes when the flow has received the service of
k - 1 of its usual requests. Until then every other flow of the tenant, and every other tenant at the gate, goes first
until its counter has reached that level, but no more often than its requests wait and arrive at its usual rate. The
starts of a tenant enter the working set one after another. Tenants that do not wait yet will come and go first, too:
the ratio of true to known turns (`passed`) is learned from waits that have ended.

Turns take proportionally longer if the tenants before a request have longer answers than those that went lately.

Estimates are made for waiting requests only, and learned only from requests that waited. They read a sample of the
waiting members, so the cost of an estimate is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import exp, fsum, inf, log, sqrt
from typing import Any, Final, NamedTuple

from policies.averages import QUICK, STEADY
from policies.queue.backlog import Backlog
from policies.queue.counters import CounterHeap, CounterMember, M
from policies.request import WAIT_S_MAX, Request

SAMPLED: Final = 64
"""Most members of one level that an estimate reads."""
GATES_MAX: Final = 1000
"""Gates whose pace is remembered: those with the latest turns."""
WINDOW_S: Final = 15.0
"""Time constant of the pace: a turn of this age has weight 1/e."""
PASSED: Final = 1.5
"""True turns over known ones, until it is learned: `bench.expected_waits` finds 1.4 to 1.6 in each kind of traffic."""
PASSED_MAX: Final = 3.0
STEP: Final = 0.003
"""Part of the logarithm of true turns over expected ones by which one wait changes `passed`."""
ERROR_MAX: Final = 0.5
"""Bound of this logarithm, so that a few unforeseeable waits change little."""
GUESSED: Final = 1.0 / STEADY
"""Observed turns as which the guess counts where the answers are known: as many as a pace remembers. The quick turns
that fill the free slots of an engine at the beginning of a burst then count half."""
SHORT_S: Final = 1e-3
"""Least gap between two requests of a member in an estimate."""
COUNTED_S_MIN: Final = 1.0
"""Shorter waits are neither counted nor learned from."""
BAND: Final = 2.0
"""An expected wait of N seconds is reported as N / BAND to N * BAND seconds, and counts as right within these."""


def interval_s(wait_s: float) -> tuple[float, float]:
    """Return the bounds within which an expected wait of `wait_s` seconds counts as right."""
    return wait_s / BAND, wait_s * BAND


class Gate(NamedTuple):
    """The place where requests of one class wait: the pool, a full node of the tree, or the working set."""

    is_batch: bool
    """True for batch work."""
    node: str = ""
    """Name of the full node; "" for the pool and for the working set."""
    starts_of: str = ""
    """Tenant whose starts wait for the working set; "" at the other gates."""


class WaitEstimate(NamedTuple):
    """An expected wait."""

    wait_s: float
    since_s: float
    """Time of the estimate."""
    turns: float
    """Known turns until the request goes, including its own."""
    gone: int
    """Requests that had passed the gate at the time of the estimate."""
    gate: Gate
    is_learned: bool
    """True if a turn at the gate has been seen; otherwise the length of a turn is a guess."""

    @property
    def late_s(self) -> float:
        """Return the wait plus one standard deviation, if turns are exponentially distributed."""
        return min(WAIT_S_MAX, self.wait_s * (1.0 + 1.0 / sqrt(max(1.0, self.turns))))


class GateState(NamedTuple):
    """Inputs of a wait estimate: the gate, its queue, and the number of requests that run behind the gate."""

    gate: Gate
    backlog: Backlog | None
    """None if requests go in order of arrival."""
    queued: int
    """Requests in the queue of this request."""
    queues: int
    """Queues of the pool, which take turns."""
    running: int
    """Requests that run behind the gate; at the working set, contexts of the tenant that count."""
    answer_s: float
    """Mean seconds of an answer; at the working set, the seconds for which an idle context counts."""

    def is_empty(self, tenant: str) -> bool:
        """Return whether nothing waits at the gate. `tenant`: that of a request that passed the gate."""
        gate, backlog = self.gate, self.backlog
        if backlog is None:
            return self.queued == 0
        if gate.starts_of:
            return not backlog.has_sleeping_starts(gate.starts_of)
        own = backlog.tenant(tenant)
        if gate.node:
            return gate.node not in backlog.full and (own is None or own.queued == 0)
        return len(backlog.batch if gate.is_batch else backlog.tenants) == 0


class _Pace:
    """The rate at which requests pass one gate while something waits there."""

    __slots__ = ("_answers_s", "_seconds", "_turns", "gone", "is_waited_for", "last_s", "passed")

    def __init__(self, passed: float) -> None:
        self.passed = passed
        self.gone = 0
        """Requests that passed the gate while others waited, or after they had waited."""
        self.last_s = -inf
        """Time at which the last request that had waited passed the gate."""
        self.is_waited_for = False
        """True if others still waited at that time."""
        self._turns = self._seconds = self._answers_s = 0.0
        """Decaying sums over the turns: their number, their seconds, and the `answer_s` of their tenants."""

    @property
    def is_learned(self) -> bool:
        return self._seconds > 0.0

    def turn_s(self, running: int, answer_s: float, guessed: float = 1.0) -> float:
        """Return the seconds of a turn. A guess by Little's law counts as this many observed turns (`guessed`)."""
        return (self._seconds + guessed * answer_s / max(1, running)) / (self._turns + guessed)

    def answer_s(self) -> float:
        """Return the mean answer time of the tenants that went lately, in seconds; 0 if none is known."""
        return self._answers_s / self._turns if self._turns else 0.0

    def went(self, elapsed_s: float, answer_s: float) -> None:
        """Count a turn that took `elapsed_s`, of a tenant whose answers usually take `answer_s`."""
        kept = max(exp(-elapsed_s / WINDOW_S), 1.0 - STEADY)
        self.gone += 1
        self._turns = self._turns * kept + 1.0
        self._seconds = self._seconds * kept + elapsed_s
        self._answers_s = self._answers_s * kept + answer_s

    def learn(self, expected: WaitEstimate, turns: float) -> None:
        """Learn from a wait that ended after this many turns."""
        error = log(turns / (self.passed * expected.turns))
        self.passed *= exp(STEP * max(-ERROR_MAX, min(ERROR_MAX, error)))
        self.passed = max(1.0, min(PASSED_MAX, self.passed))


class ExpectedWaits:
    """The estimator of waits in one pool, which learns from the waits that have ended."""

    def __init__(self) -> None:
        self._counts = {"right": 0, "longer": 0, "shorter": 0}
        self._unknown = CounterMember(())
        """Means over requests in order of arrival, or of tenants that are forgotten."""
        self._members, self._answers_s = 0, 0.0
        """Tenants with an answer so far, and the sum of their `answer_s`."""
        self._paces: OrderedDict[Gate, _Pace] = OrderedDict()
        self._resumed_s = -inf
        """Time at which the pool last had an engine in service again. No turn is counted from before."""

    def of(self, request: Request, place: GateState, now: float, *, comes: bool, held_s: float = 0.0) -> WaitEstimate:
        """Return the expected wait.

        `comes`: the request is not queued yet. `held_s`: seconds until the first turn.
        """
        gate, backlog = place.gate, place.backlog
        pace = self._paces.get(gate) or _new_pace(place)
        if gate.starts_of or backlog is None:
            turns = float(place.queued + comes)
            if gate.starts_of and backlog is not None:
                turns = _starts_before(backlog, request) + 1.0
            wait_s = turns * pace.turn_s(place.running, place.answer_s) * pace.passed
        else:
            turns, wait_s = self._among_members(request, place, backlog, pace, now, comes=comes)
        wait_s = min(WAIT_S_MAX, held_s + wait_s * place.queues)
        return WaitEstimate(wait_s, now, turns, pace.gone, gate, pace.is_learned)

    def _among_members(
        self, request: Request, place: GateState, backlog: Backlog, pace: _Pace, now: float, *, comes: bool
    ) -> tuple[float, float]:
        """Return the known turns until the request goes, and the expected seconds, where tenants take turns."""
        answer_s = place.answer_s
        usual_s = pace.answer_s() or answer_s
        turn_s = pace.turn_s(place.running, usual_s, GUESSED)
        tenant, own = backlog.tenant(request.flow.tenant), backlog.flow(request.flow)
        usual = backlog.usual or float(request.prompt_tokens)
        own_s = (tenant.answer_s if tenant is not None else 0.0) or answer_s
        first = float((own.queued if own is not None else 0) + comes)
        line = _line_at(backlog, place.gate)
        turns, wait_s = first, inf
        for _ in range(2):  # arrivals depend on the wait, so the first round sets no bound to them
            turns = first
            if tenant is not None:
                flows = _line_of(tenant.flows)
                turns += _before(flows, own, 1.0, first, backlog.usual_of_flow or 1.0, own_s, wait_s, now)[0]
            others, others_s = _before(line, tenant, request.weight, turns, usual, answer_s, wait_s, now)
            all_s = turns * own_s + others_s
            turns += others
            known = all_s / usual_s if usual_s else turns
            wait_s = known * turn_s * pace.passed
        if request.is_batch:  # interactive work goes first
            gate = Gate(False, place.gate.node)
            pace = self._paces.get(gate) or _new_pace(place)
            turn_s = pace.turn_s(place.running, pace.answer_s() or answer_s, GUESSED)
            wait_s += _line_at(backlog, gate).queued() * turn_s * pace.passed
        return turns, wait_s

    def answer_s(self) -> float:
        """Return the mean answer time of a tenant, in seconds; 0 before the first answer to a request that had waited.

        Each tenant counts once, so that a tenant without an answer yet is not taken for the one with most requests.
        """
        return self._answers_s / self._members if self._members else 0.0

    def counts(self) -> dict[str, int]:
        """Return how many waits above `COUNTED_S_MIN` were as long as expected, longer, or shorter."""
        return self._counts.copy()

    # --- events ---

    def count_arrival(self, backlog: Backlog | None, request: Request, now: float) -> None:
        """Count the arrival of a queued request that waits."""
        if backlog is not None:
            for member in (backlog.tenant(request.flow.tenant), backlog.flow(request.flow)):
                if member is not None:
                    _asks(member, now)

    def resumed(self, now: float) -> None:
        """Exclude the time without an engine in service from the present turns."""
        self._resumed_s = now

    def dispatched(self, request: Request, place: GateState, oldest_s: float, now: float) -> None:
        """Count the turn of a dispatched request. `oldest_s`: time since which anything has waited in the pool."""
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
        pace.went(elapsed_s, (tenant.answer_s if tenant is not None else 0.0) or self.answer_s())
        if wait is not None and wait.expected is not None:
            self._compare(wait.expected, place.queues, now)

    def _compare(self, expected: WaitEstimate, queues: int, now: float) -> None:
        """Compare a wait that has ended with its estimate, and learn from the difference."""
        wait_s = now - expected.since_s
        if wait_s <= COUNTED_S_MIN:
            return
        pace = self._paces.get(expected.gate)
        turns = (pace.gone - expected.gone) / queues if pace is not None else 0.0
        # For a request from another pool, or one that no engine's queue had yet, the estimate knew none of these turns.
        if pace is not None and turns > 0.0 and expected.turns > 0.0:
            pace.learn(expected, turns)
        least_s, most_s = interval_s(expected.wait_s)
        self._counts["longer" if wait_s > most_s else "shorter" if wait_s < least_s else "right"] += 1

    def answered(self, backlog: Backlog | None, request: Request, answer_s: float) -> None:
        """Learn from the answer of a request that had waited. `answer_s`: seconds since its dispatch."""
        flow = backlog.flow(request.flow) if backlog is not None else None
        member: CounterMember = flow.tenant if flow is not None else self._unknown
        before_s = member.answer_s
        _learn(member, request.progress.charged, answer_s)
        self._answers_s += member.answer_s - before_s
        self._members += before_s == 0.0 < member.answer_s
        if flow is not None:
            _learn(flow, request.progress.normalised or request.progress.charged, answer_s)


class _WaitingLine(NamedTuple):
    """Waiting tenants, or flows of a tenant, that a wait estimate compares; a sample if there are many."""

    counters: CounterHeap[Any]
    members: Sequence[CounterMember]
    number: int
    """Members that wait, not only those of the sample."""
    floor: float
    """Rank at which a new member begins."""

    def queued(self) -> float:
        """Return the estimated number of requests that wait."""
        queued = float(sum([member.queued for member in self.members]))
        return queued * self.number / max(1, len(self.members))


def _line_of(counters: CounterHeap[M]) -> _WaitingLine:
    return _WaitingLine(counters, counters.some(SAMPLED), len(counters), counters.find_floor())


def _line_at(backlog: Backlog, gate: Gate) -> _WaitingLine:
    """Return the tenants that wait at a gate: those that sleep at its node, or, for the pool, those awake."""
    counters = backlog.batch if gate.is_batch else backlog.tenants
    if not gate.node:
        return _line_of(counters)
    asleep = [tenant for tenant in backlog.full.get(gate.node, ()) if tenant.line is counters]
    members = asleep[:: len(asleep) // SAMPLED + 1]
    floor = min([counters.rank(member) for member in members]) if members else counters.find_floor()
    return _WaitingLine(counters, members, len(asleep), floor)


def _new_pace(place: GateState) -> _Pace:
    """Return the pace of an unknown gate. In order of arrival nothing passes, so all turns are known."""
    return _Pace(1.0 if place.backlog is None or place.gate.starts_of else PASSED)


def _starts_before(backlog: Backlog, request: Request) -> int:
    """Return the number of sleeping starts of the tenant that go before this request."""
    tenant = backlog.tenant(request.flow.tenant)
    starts = [one[-1] for one in backlog.starts.get(tenant, ())] if tenant is not None else []
    return starts.index(request) if request in starts else len(starts)


def _asks(member: CounterMember, now: float) -> None:
    """Update a member's gap between arrivals with an arrival now."""
    if member.asked_s < 0.0:
        member.gap_s = WINDOW_S  # arbitrary: twice or half of it changes no row of the benchmark
    else:
        member.gap_s += QUICK * (now - member.asked_s - member.gap_s)
    member.asked_s = now


def _learn(member: CounterMember, charged: float, answer_s: float) -> None:
    part = QUICK if member.answer_s else 1.0
    member.usual += part * (charged - member.usual)
    member.answer_s += part * (answer_s - member.answer_s)


def _before(
    line: _WaitingLine, own: CounterMember | None, weight: float, place: float, usual: float, answer_s: float,
    wait_s: float, now: float,
) -> tuple[float, float]:  # fmt: skip
    """Estimate how many requests of other tenants or flows go before one request, and the sum of their answer times.

    `place`: of the request among those of `own`, from 1. `wait_s`: its expected wait, during which others arrive; inf
    sets no bound to arrivals.
    """
    rank = line.floor
    if own is not None:
        rank = line.counters.rank(own) if own.queued else max(rank, own.counter)
    level = rank + (place - 1.0) * ((own.usual if own is not None else 0.0) or usual) / weight
    turns: list[float] = []
    seconds: list[float] = []
    others = 0
    for member in line.members:
        if member is own:
            continue
        others += 1
        rounds = (level - line.counters.rank(member)) * member.weight / (member.usual or usual)
        if rounds < 0.0:
            continue
        rounds += 0.5  # half of the members with an equal rank go first
        if wait_s < inf:
            gap_s = max(member.gap_s, now - member.asked_s)
            rounds = min(rounds, member.queued + wait_s / max(gap_s, SHORT_S))
        turns.append(rounds)
        seconds.append(rounds * (member.answer_s or answer_s))
    scale = (line.number - (len(line.members) > others)) / max(1, others)
    # Exact sums, because questions change the order of a heap, and with it that of the sample.
    return fsum(turns) * scale, fsum(seconds) * scale
