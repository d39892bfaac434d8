"""How long will a request wait that cannot start at once?

What stands before it is counted as the order counts. The k-th request of a flow goes when the flow has received what
k - 1 usual requests of it take. Until then, every other flow of its tenant, and every other tenant, goes first as often
as brings it up to there, but no more often than requests of it wait and come at its usual rate. These are the known
turns. Tenants that do not wait yet will come and go first, too: the true number of turns over the known one (`passed`)
is learned from waits that have ended.

How long a turn takes is measured of each class of work: the time in which something of the class waited, over what went
of it then. If the tenants before a request have longer answers than the tenants that went lately, a turn takes so much
longer.

All of it is asked and learned only of requests that wait. Of many members that wait, a sample is looked at, so that an
answer costs about the same however many they are.
"""

from __future__ import annotations

from math import exp, inf, log
from typing import Final, NamedTuple

from policies.averages import QUICK, STEADY
from policies.queue.backlog import Backlog
from policies.queue.counters import Counters, M, Member
from policies.queue.tenants_and_flows import TenantMember
from policies.request import WAIT_S_MAX, Request

SAMPLED: Final = 64
"""Members of one level."""
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


class Expected(NamedTuple):
    """An expected wait."""

    wait_s: float
    since_s: float
    """When this was expected."""
    turns: float
    """Known turns until the request goes, its own among them."""
    gone: int
    """Requests of its class that had been dispatched by then."""


class _Pace:
    """How fast does one class of work go while some of it waits?"""

    def __init__(self) -> None:
        self.passed = PASSED
        self.gone = 0
        """Requests dispatched."""
        self.since_s = -1.0
        """Since when something has waited and nothing gone; -1: nothing waits."""
        self._turns = self._seconds = self._answers_s = 0.0
        """While something waited: requests dispatched, seconds, and the sum of their tenants' `answer_s`."""

    @property
    def is_learned(self) -> bool:
        return self._turns > 0.0

    def turn_s(self, running: int, answer_s: float) -> float:
        """By Little's law while nothing is known, which counts as one turn."""
        return (self._seconds + answer_s / max(1, running)) / (self._turns + 1.0)

    def answer_s(self) -> float:
        """Usual seconds of the answers of the tenants whose requests went lately; 0: none is known."""
        return self._answers_s / self._turns if self._turns else 0.0

    def went(self, answer_s: float, now: float) -> None:
        """A request of a tenant with such answers was dispatched while something waited."""
        elapsed_s = now - self.since_s
        kept = exp(-elapsed_s / WINDOW_S)
        self._turns = self._turns * kept + 1.0
        self._seconds = self._seconds * kept + elapsed_s
        self._answers_s = self._answers_s * kept + answer_s

    def learn(self, expected: Expected, turns: float) -> None:
        """A wait has ended after so many turns."""
        error = log(turns / (self.passed * expected.turns))
        self.passed *= exp(STEP * max(-ERROR_MAX, min(ERROR_MAX, error)))
        self.passed = max(1.0, min(PASSED_MAX, self.passed))


class ExpectedWaits:
    """Of one pool."""

    def __init__(self) -> None:
        self._right = self._longer = self._shorter = 0
        self._usual = Member(())
        """What a request of any tenant takes."""
        self._paces = _Pace(), _Pace()
        """Of interactive work and of class batch. Where one queue holds both, the first is of both."""

    def of(
        self, backlog: Backlog | None, queued: int, request: Request, running: int, queues: int,
        answer_s: float, now: float, *, comes: bool,
    ) -> Expected:  # fmt: skip
        """How long would this request wait, of so many that wait in its queue, one of so many queues?

        `backlog`: None if all go in the order in which they came. `running`: requests at the engines. `answer_s`: how
        long answers take, where none was seen of a request that waited. `comes`: it does not wait yet. Changes nothing.
        """
        flow, pace = request.flow, self._pace(backlog, request)
        answer_s = self._usual.answer_s or answer_s
        turn_s = pace.passed * pace.turn_s(running, answer_s) * queues
        if backlog is None:
            turns = float(queued + comes)
            return Expected(min(WAIT_S_MAX, turns * turn_s), now, turns, pace.gone)
        tenant, own = backlog.tenant(flow.tenant), backlog.flow(flow)
        usual = self._usual.usual or backlog.usual or float(request.prompt_tokens)
        own_s = (tenant.answer_s if tenant is not None else 0.0) or answer_s
        place = float((own.queued if own is not None else 0) + comes)
        turns, wait_s = place, inf
        for _ in range(2):  # how much comes meanwhile depends on the wait: at first, all that may go before is counted
            turns = place
            if tenant is not None:
                turns += _before(tenant.flows, own, 1.0, place, backlog.usual_of_flow or 1.0, own_s, wait_s, now)[0]
            line = _line(backlog, request)
            others, others_s = _before(line, tenant, request.weight, turns, usual, answer_s, wait_s, now)
            all_s = turns * own_s + others_s
            turns += others
            wait_s = turn_s * (all_s / pace.answer_s() if pace.answer_s() and all_s else turns)
        if request.can_wait:  # what waits that cannot goes first
            wait_s += _queued(backlog.tenants) * self._paces[False].turn_s(running, answer_s) * queues
        return Expected(min(WAIT_S_MAX, wait_s), now, turns, pace.gone)

    def is_learned(self, *, can_wait: bool) -> bool:
        """Has a request of this class gone while another waited? Until then nobody knows how long a turn takes."""
        return self._paces[can_wait].is_learned

    def counts(self) -> dict[str, int]:
        """How many waits of more than `COUNTED_S_MIN` were as long as expected, longer or shorter?"""
        return {"right": self._right, "longer": self._longer, "shorter": self._shorter}

    def has_clock_running(self, backlog: Backlog | None, request: Request) -> bool:
        """Is the time counted in which requests of this class wait?"""
        return self._pace(backlog, request).since_s >= 0.0

    # --- events ---

    def began(self, backlog: Backlog | None, request: Request, now: float) -> None:
        """Count the request, which is in its queue, among those that wait."""
        pace = self._pace(backlog, request)
        if pace.since_s < 0.0:
            pace.since_s = now
        if backlog is not None:
            for member in (backlog.tenant(request.flow.tenant), backlog.flow(request.flow)):
                if member is not None:
                    _asks(member, now)

    def left(self, backlog: Backlog | None, queued: int, request: Request) -> None:
        """Count no longer a request that left its queue without a dispatch; `queued` requests are left there."""
        if not _waits(backlog, queued, request):
            self._pace(backlog, request).since_s = -1.0

    def dispatched(self, backlog: Backlog | None, queued: int, request: Request, queues: int, now: float) -> None:
        """Count a request that left its queue for an engine, had it waited or not; `queued` requests are left there."""
        pace, wait = self._pace(backlog, request), request.progress.wait
        pace.gone += 1
        if pace.since_s >= 0.0:
            tenant = backlog.tenant(request.flow.tenant) if backlog is not None else None
            pace.went((tenant.answer_s if tenant is not None else 0.0) or self._usual.answer_s, now)
            pace.since_s = now if _waits(backlog, queued, request) else -1.0
        if wait is None or wait.expected is None:
            return
        expected = wait.expected
        wait_s = now - expected.since_s
        if wait_s <= COUNTED_S_MIN:
            return
        turns = (pace.gone - expected.gone) / queues
        # A request that another pool handed over, or that was in no engine's queue yet, knew of none of these turns.
        if turns > 0.0 and expected.turns > 0.0:
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

    def _pace(self, backlog: Backlog | None, request: Request) -> _Pace:
        return self._paces[backlog is not None and request.can_wait]


def _line(backlog: Backlog, request: Request) -> Counters[TenantMember]:
    return backlog.batch if request.can_wait else backlog.tenants


def _waits(backlog: Backlog | None, queued: int, request: Request) -> bool:
    """Does anything of its class wait?"""
    return queued > 0 if backlog is None else len(_line(backlog, request)) > 0


def _queued(counters: Counters[M]) -> float:
    """Requests that wait on a level."""
    members = counters.some(SAMPLED)
    return sum([member.queued for member in members]) * len(counters) / max(1, len(members))


def _asks(member: Member, now: float) -> None:
    """Something more of it waits."""
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
    counters: Counters[M], own: M | None, weight: float, place: float, usual: float, answer_s: float, wait_s: float,
    now: float,
) -> tuple[float, float]:  # fmt: skip
    """The turns of other members before the request that is in this place of a member and waits for so long, and the
    seconds of their answers.
    """
    rank = counters.floor()
    if own is not None:
        rank = counters.rank(own) if own.queued else max(rank, own.counter)
    level = rank + (place - 1.0) * ((own.usual if own is not None else 0.0) or usual) / weight
    turns = seconds = 0.0
    seen = 0
    for member in counters.some(SAMPLED):
        if member is own:
            continue
        seen += 1
        rounds = (level - counters.rank(member)) * member.weight / (member.usual or usual)
        if rounds < 0.0:
            continue
        rounds += 0.5  # of those that are level with it, half go first
        if wait_s < inf:
            rounds = min(rounds, member.queued + wait_s / max(member.gap_s, now - member.asked_s, SHORT_S))
        turns += rounds
        seconds += rounds * (member.answer_s or answer_s)
    scale = (len(counters) - (own is not None and own.queued > 0)) / max(1, seen)
    return turns * scale, seconds * scale
