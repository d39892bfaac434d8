"""How long will a request wait that cannot start at once?

What stands before it is counted as the order counts. The k-th request of a flow goes when the flow has received what
k - 1 usual requests of it take. Until then, every other flow of its tenant, and every other tenant, goes first as often
as brings it up to there: `most` turns if something of it always waits, and `fewest` if no more of it comes.
Each turn takes an engine as long as answers of its tenant usually do, and as many answers are made at once as run now
(Little's law). A request that can wait has those before it that cannot, and the slots that such work has.

Two factors are learned from waits that have ended: how many times as long those who come later and go first make the
wait (`passed`), and how much of the difference between most and fewest comes true (`returns`), for that depends on how
soon clients ask again. Each wait moves both, each by the part of the expected wait that it made.

All of it is asked and learned only of requests that wait. Of many members that wait, a sample is looked at, so that an
answer costs about the same however many they are.
"""

from __future__ import annotations

from math import exp, log
from typing import Final, NamedTuple

from policies.averages import QUICK, STEADY
from policies.queue.backlog import Backlog
from policies.queue.counters import Counters, M, Member
from policies.request import WAIT_S_MAX, Request

SAMPLED: Final = 64
"""Members of one level."""
RETURNS_MAX: Final = 1.5
"""Some come who do not wait yet, and have not been here for long."""
PASSED_MAX: Final = 3.0
STEP: Final = 0.03
"""What one wait changes of the factors, of the logarithm of the true wait over the expected one."""
ERROR_MAX: Final = 0.5
"""Of this logarithm: a few waits that nobody could foresee change little."""
COUNTED_S_MIN: Final = 1.0
"""Shorter waits are not counted."""
RIGHT: Final = 0.25
"""An expected wait is right if it is off by no more than this part of the true one."""


class Expected(NamedTuple):
    """What is expected of a wait?"""

    wait_s: float
    since_s: float
    """When this was expected."""
    fewest_s: float
    """How long if nothing else came."""
    more_s: float
    """How much longer if each member that waits always had something waiting."""
    fewest: float
    """Turns until it goes, its own among them, if nothing else comes."""


class _Factors:
    """What is learned of the waits of one class of work."""

    def __init__(self) -> None:
        self.passed = 1.0
        self.returns = 0.5

    def wait_s(self, fewest_s: float, more_s: float) -> float:
        return self.passed * fewest_s + self.returns * more_s

    def learn(self, expected: Expected, wait_s: float) -> None:
        of_fewest, all_s = self.passed * expected.fewest_s, self.wait_s(expected.fewest_s, expected.more_s)
        if all_s <= 0.0 or wait_s <= 0.0:
            return
        step, part = STEP * max(-ERROR_MAX, min(ERROR_MAX, log(wait_s / all_s))), of_fewest / all_s
        self.passed = max(1.0, min(PASSED_MAX, self.passed * exp(step * part)))
        self.returns = max(STEP, min(RETURNS_MAX, self.returns * exp(step * (1.0 - part))))


class _Others(NamedTuple):
    """The turns of the other members of a level, and the seconds of their answers."""

    fewest: float
    most: float
    fewest_s: float
    most_s: float


class ExpectedWaits:
    """Of one pool."""

    def __init__(self) -> None:
        self._right = self._longer = self._shorter = 0
        self._usual = Member(())
        """What a request of any tenant takes."""
        self._at_once = 0.0
        """Usually run when a request goes that had to wait."""
        self._factors = _Factors(), _Factors()
        """Of work that cannot wait, and of work that can."""

    def of(
        self, backlog: Backlog | None, queued: int, request: Request, running: tuple[int, int], queues: int,
        answer_s: float, now: float, *, comes: bool,
    ) -> Expected:  # fmt: skip
        """How long would this request wait, of so many that wait in its queue?

        `backlog`: None if all go in the order in which they came. `running`: requests, and those of them that can wait,
        of so many queues. `answer_s`: how long answers take, where none was seen of a request that waited. `comes`: it
        does not wait yet. Changes nothing.
        """
        flow, factors = request.flow, self._factors[request.can_wait]
        at_once = max(1.0, max(running[0], self._at_once) / queues)
        answer_s = self._usual.answer_s or answer_s
        if backlog is None:
            return _expected(factors, (queued + comes) * answer_s / at_once, 0.0, queued + comes, now)
        tenant, own = backlog.tenant(flow.tenant), backlog.flow(flow)
        place = float((own.queued if own is not None else 0) + comes)
        own_s = tenant.answer_s if tenant is not None and tenant.answer_s else answer_s
        if tenant is not None:
            others = _others(tenant.flows, own, 1.0, place, backlog.usual_of_flow or 1.0, own_s, 0)
            place += _between(others.fewest, others.most, factors.returns)
        usual = self._usual.usual or backlog.usual or float(request.prompt_tokens)
        line = backlog.batch if request.can_wait else backlog.tenants
        others = _others(line, tenant, request.weight, place, usual, answer_s, backlog.active())
        fewest_s, more_s = place * own_s + others.fewest_s, others.most_s - others.fewest_s
        fewest = place + others.fewest
        if not request.can_wait:
            return _expected(factors, fewest_s / at_once, more_s / at_once, fewest, now)
        # At least what is guaranteed runs; else what other work leaves, once that which waits has gone.
        least, before_s = backlog.batch_share * at_once, _waiting_s(backlog.tenants, answer_s) / at_once
        here = running[1] / queues or at_once
        if least and before_s + fewest_s / here > fewest_s / least:
            here, before_s = least, 0.0
        return _expected(factors, before_s + fewest_s / here, more_s / here, fewest, now)

    def counts(self) -> dict[str, int]:
        """How many waits of more than `COUNTED_S_MIN` were as long as expected, longer or shorter?"""
        return {"right": self._right, "longer": self._longer, "shorter": self._shorter}

    # --- events ---

    def ended(self, request: Request, expected: Expected, running: int, now: float) -> None:
        """A wait has ended with a dispatch. `expected`: when it began. `running`: before it."""
        wait_s = now - expected.since_s
        self._at_once += (QUICK if self._at_once else 1.0) * (running - self._at_once)
        self._factors[request.can_wait].learn(expected, wait_s)
        if wait_s <= COUNTED_S_MIN:
            return
        if abs(expected.wait_s - wait_s) <= RIGHT * wait_s:
            self._right += 1
        elif expected.wait_s < wait_s:
            self._longer += 1
        else:
            self._shorter += 1

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


def _expected(factors: _Factors, fewest_s: float, more_s: float, fewest: float, now: float) -> Expected:
    return Expected(min(WAIT_S_MAX, factors.wait_s(fewest_s, more_s)), now, fewest_s, more_s, fewest)


def _waiting_s(counters: Counters[M], answer_s: float) -> float:
    """The seconds of the answers of all that waits on a level."""
    members = counters.some(SAMPLED)
    seconds = sum([member.queued * (member.answer_s or answer_s) for member in members])
    return seconds * len(counters) / max(1, len(members))


def _between(fewest: float, most: float, part: float) -> float:
    return fewest + part * (most - fewest) if part <= 1.0 else most * part


def _learn(member: Member, charged: float, answer_s: float, part: float) -> None:
    if not member.answer_s:
        part = 1.0
    member.usual += part * (charged - member.usual)
    member.answer_s += part * (answer_s - member.answer_s)


def _others(
    counters: Counters[M], own: M | None, weight: float, place: float, usual: float, answer_s: float, active: int
) -> _Others:
    """What goes before the request that is in this place of a member? `active`: members that have something waiting or
    running.
    """
    rank = counters.floor()
    if own is not None:
        rank = counters.rank(own) if own.queued else max(rank, own.counter)
        usual_of_own = own.usual or usual
    else:
        usual_of_own = usual
    level = rank + (place - 1.0) * usual_of_own / weight
    fewest = most = fewest_s = most_s = 0.0
    seen = 0
    for member in counters.some(SAMPLED):
        if member is own:
            continue
        seen += 1
        rounds = (level - counters.rank(member)) * member.weight / (member.usual or usual)
        if rounds < 0.0:
            continue
        rounds += 0.5  # of those that are level with it, half go first
        few, seconds = min(float(member.queued), rounds), member.answer_s or answer_s
        fewest += few
        most += rounds
        fewest_s += few * seconds
        most_s += rounds * seconds
    if not seen:
        return _Others(0.0, 0.0, 0.0, 0.0)
    waiting = len(counters) - (own is not None and own.queued > 0)
    scale = waiting / seen
    of_all = max(waiting, active - 1) / seen
    return _Others(fewest * scale, most * of_all, fewest_s * scale, most_s * of_all)
