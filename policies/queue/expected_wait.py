"""How long will a request wait that cannot start at once?

What stands before it is counted as the order counts. The k-th request of a flow goes when the flow has received what
k - 1 usual requests of it take. Until then, every other flow of its tenant, and every other tenant, goes first as often
as brings it up to there: `most` turns if something of it always waits, and `fewest` if no more of it comes.
How much of the difference comes true (`_returns`) is learned from waits that have ended, for it depends on how soon
clients ask again. Each turn takes an engine as long as answers of its tenant usually do, and as many answers are made
at once as run now (Little's law).

All of it is asked and learned only of requests that wait. Of many members that wait, a sample is looked at, so that an
answer costs about the same however many they are.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from policies.averages import QUICK, STEADY
from policies.queue.backlog import Backlog
from policies.queue.counters import Counters, M, Member
from policies.request import WAIT_S_MAX, Request

SAMPLED: Final = 64
"""Members of one level."""
RETURNS_MAX: Final = 1.5
"""Some come who do not wait yet, and have not been here for long."""
COUNTED_S_MIN: Final = 1.0
"""Shorter waits are not counted."""
RIGHT: Final = 0.25
"""An expected wait is right if it is off by no more than this part of the true one."""


class Expected(NamedTuple):
    """What is expected of a wait?"""

    wait_s: float
    since_s: float
    """When this was expected."""
    fewest: float
    """Turns until it goes, its own among them, if nothing else comes."""
    most: float
    """Turns until then if each member that waits always has something waiting."""
    dispatches: int
    """Dispatches of the pool until then."""


class _Others(NamedTuple):
    """The turns of the other members of a level, and the seconds of their answers."""

    fewest: float
    most: float
    fewest_s: float
    most_s: float


class ExpectedWaits:
    """Of one pool."""

    def __init__(self) -> None:
        self.dispatches = 0
        self._right = self._longer = self._shorter = 0
        self._usual = Member(())
        """What a request of any tenant takes."""
        self._deviations = self._squares = 0.0

    def _returns(self) -> float:
        """The part of the turns of those who do not wait yet that is to be expected."""
        return min(RETURNS_MAX, max(0.0, self._deviations / self._squares)) if self._squares else 0.5

    def of(
        self, backlog: Backlog | None, queued: int, request: Request, running: int, answer_s: float, now: float,
        *, comes: bool,
    ) -> Expected:  # fmt: skip
        """How long would this request wait, of so many that wait in its queue?

        `backlog`: None if all go in the order in which they came. `answer_s`: how long answers take, where none was
        seen of a request that waited. `comes`: it does not wait yet. Changes nothing.
        """
        flow, part = request.flow, self._returns()
        answer_s = self._usual.answer_s or answer_s
        if backlog is None:
            turns = float(queued + comes)
            return self._in_all(turns, turns, turns * answer_s, running, now)
        tenant, own = backlog.tenant(flow.tenant), backlog.flow(flow)
        place = float((own.queued if own is not None else 0) + comes)
        fewest = most = place
        own_s = tenant.answer_s if tenant is not None and tenant.answer_s else answer_s
        seconds = 0.0
        if tenant is not None:
            usual = backlog.usual_of_flow or 1.0
            others = _others(tenant.flows, own, 1.0, place, usual, own_s, 0)
            fewest, most = fewest + others.fewest, most + others.most
            place = _between(fewest, most, part)
        seconds = place * own_s
        usual = self._usual.usual or backlog.usual or float(request.prompt_tokens)
        line = tenant.line if tenant is not None else backlog.tenants
        others = _others(line, tenant, request.weight, place, usual, answer_s, backlog.active())
        seconds += _between(others.fewest_s, others.most_s, part)
        return self._in_all(fewest + others.fewest, most + others.most, seconds, running, now)

    def _in_all(self, fewest: float, most: float, seconds: float, running: int, now: float) -> Expected:
        return Expected(min(WAIT_S_MAX, seconds / max(1, running)), now, fewest, most, self.dispatches)

    def counts(self) -> dict[str, int]:
        """How many waits of more than `COUNTED_S_MIN` were as long as expected, longer or shorter?"""
        return {"right": self._right, "longer": self._longer, "shorter": self._shorter}

    # --- events ---

    def ended(self, expected: Expected, now: float) -> None:
        """A wait has ended with a dispatch. `expected`: when it began."""
        wait_s = now - expected.since_s
        turns = self.dispatches - expected.dispatches
        more = expected.most - expected.fewest
        weight = STEADY / max(1, turns)
        self._deviations += weight * (turns - expected.fewest) * more - STEADY * self._deviations
        self._squares += weight * more * more - STEADY * self._squares
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
