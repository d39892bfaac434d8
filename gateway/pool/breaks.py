"""Judge of broken answers: is the engine at fault, or the tenant?

The judge uses the latest answers of each tenant at each engine. An engine is at fault if its answers break for more
tenants than it has answered meanwhile, and for several tenants if several use it. A tenant whose answers also break at
another engine testifies against neither. So successes speak for an engine, and no single tenant can stop an engine that
others use. A tenant is at fault while its answers break at every engine that it asks. Its requests are then paced, and
show whether answers still break.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf
from typing import Final

BREAKS_MIN: Final = 5
RECENT: Final = 2 * BREAKS_MIN - 1
"""Answers remembered of a tenant at an engine. BREAKS_MIN of them are the majority."""
WINDOW_S: Final = 30.0
"""Lifetime of the answers of a tenant at an engine without a further answer."""
PACE_S: Final = 2.0
"""Interval of the requests of a tenant at fault, which is also that of probes."""
TENANTS_MAX: Final = 1000
"""Tenants remembered per engine, those that asked last."""


class _RecentAnswers:
    """The latest answers of one tenant at one engine."""

    __slots__ = ("bits", "break_s", "count", "incident_s", "last_s", "whole_s")

    def __init__(self, now: float) -> None:
        self.bits = 0
        """A bit per answer, the latest one lowest; 1 for a broken answer."""
        self.count = 0
        self.last_s = self.break_s = now
        """`break_s` is the time of the first break after the last complete answer, which came at `whole_s`."""
        self.whole_s = self.incident_s = -inf
        """`incident_s` is the time of the latest break that counts."""

    def broken(self) -> int:
        return self.bits.bit_count()

    def mostly_break(self) -> bool:
        return 2 * self.broken() > self.count


class Breaks:
    """The judge of the broken answers of one pool, with the latest answers of each tenant at each engine."""

    def __init__(self) -> None:
        self.latest: dict[str, OrderedDict[str, _RecentAnswers]] = {}
        """Latest answers by engine and tenant, in the order in which tenants asked last."""
        self.paced: dict[str, float] = {}
        """Time of the next request of each tenant at fault, as of its last answer."""

    def answered(self, engine: str, tenant: str, now: float, *, broke: bool, began_s: float = inf) -> None:
        """Record a complete or broken answer to a request dispatched at `began_s`.

        A break among requests that were running at an earlier break belongs to that incident: a crash breaks them all.
        """
        known = self.latest.get(engine)
        if known is None:
            known = self.latest[engine] = OrderedDict()
        answers = known.get(tenant)
        if answers is None or now - answers.last_s > WINDOW_S:
            answers = known[tenant] = _RecentAnswers(now)
            if len(known) > TENANTS_MAX:
                known.popitem(last=False)
        if broke:
            if began_s <= answers.incident_s:
                return
            answers.incident_s = now
            if not answers.bits & 1:
                answers.break_s = now
        else:
            answers.whole_s = now
        answers.bits = (answers.bits << 1 | broke) & ((1 << RECENT) - 1)
        answers.count = min(RECENT, answers.count + 1)
        answers.last_s = now
        known.move_to_end(tenant)
        if not broke:
            if self.paced:
                self.paced.pop(tenant, None)
        elif self._is_at_fault(tenant, now):
            self.paced[tenant] = now + PACE_S
            if len(self.paced) > TENANTS_MAX:
                del self.paced[next(iter(self.paced))]

    def is_engine_at_fault(self, engine: str, now: float, *, is_shared: bool) -> bool:
        """Return whether the engine is at fault, rather than one of its tenants. `is_shared`: requests of several
        tenants run there."""
        heard: list[_RecentAnswers] = []
        well: list[_RecentAnswers] = []
        for tenant, answers in self.latest.get(engine, {}).items():
            if now - answers.last_s > WINDOW_S:
                continue
            if not answers.mostly_break():
                well.append(answers)
            elif sum([each.mostly_break() for each in self._of(tenant, now)]) == 1:
                heard.append(answers)
        if sum([answers.broken() for answers in heard]) < BREAKS_MIN or (len(heard) == 1 and (well or is_shared)):
            return False
        since_s = min([answers.break_s for answers in heard])
        return len(heard) > sum([answers.whole_s >= since_s for answers in well])

    def forget(self, engine: str) -> None:
        """Forget an engine that is out of service: its breaks say nothing about tenants."""
        for tenant in self.latest.pop(engine, ()):
            self.paced.pop(tenant, None)

    def waits_s(self, tenant: str, now: float) -> float:
        """Return for how long a tenant's requests are held; 0.0 admits one that tests whether answers still break."""
        due_s = self.paced.get(tenant) if self.paced else None
        if due_s is None:
            return 0.0
        if now < due_s:
            return due_s - now
        del self.paced[tenant]
        if self._is_at_fault(tenant, now):
            self.paced[tenant] = now + PACE_S
        return 0.0

    def _of(self, tenant: str, now: float) -> list[_RecentAnswers]:
        """Return a tenant's latest answers at all engines."""
        found = [known[tenant] for known in self.latest.values() if tenant in known]
        return [answers for answers in found if now - answers.last_s <= WINDOW_S]

    def _is_at_fault(self, tenant: str, now: float) -> bool:
        recent = self._of(tenant, now)
        breaks = sum([answers.broken() for answers in recent])
        return breaks >= BREAKS_MIN and all([answers.mostly_break() for answers in recent])
