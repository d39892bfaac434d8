"""Answers break: is the engine at fault, or who asks? Judged from the latest answers of each tenant at each engine.

An engine is at fault if its answers break for more tenants than it has answered meanwhile, and not for one of several
alone. A tenant whose answers break at another engine as well says nothing of either. So what succeeds speaks for an
engine, and nobody stops one that others use. A tenant is at fault while its answers break wherever it asks: then one
request of it now and then shows whether they still do.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf
from typing import Final

BREAKS_MIN: Final = 5
RECENT: Final = 2 * BREAKS_MIN - 1
"""Of the answers of one tenant at one engine: so many breaks are most of them."""
WINDOW_S: Final = 30.0
"""After this time without another answer, the answers of a tenant at an engine say nothing."""
PACE_S: Final = 2.0
"""Between two requests of a tenant at fault. Engines are probed as often."""
TENANTS_MAX: Final = 1000
"""At one engine, those that asked last."""


class _Latest:
    """The latest ones of one tenant at one engine."""

    __slots__ = ("bits", "break_s", "count", "incident_s", "last_s", "whole_s")

    def __init__(self, now: float) -> None:
        self.bits = 0
        """One for each, the latest one lowest: 1 if it broke."""
        self.count = 0
        self.last_s = self.break_s = now
        """`break_s`: of the first break after the last one that was whole, which came at `whole_s`."""
        self.whole_s = self.incident_s = -inf
        """`incident_s`: of the latest break that counts."""

    def broken(self) -> int:
        return self.bits.bit_count()

    def mostly_break(self) -> bool:
        return 2 * self.broken() > self.count


class Breaks:
    """The judge of one pool."""

    def __init__(self) -> None:
        self.latest: dict[str, OrderedDict[str, _Latest]] = {}
        """By engine and tenant. The tenant that asked last is the last one."""
        self.paced: dict[str, float] = {}
        """By tenant that is at fault, as of its last answer, when its next request may go."""

    def answered(self, engine: str, tenant: str, now: float, *, broke: bool, began_s: float = inf) -> None:
        """Note an answer that came whole, or broke, to a request that was dispatched at `began_s`.

        Answers that were under way when one broke are part of that incident: an engine that crashes breaks all of them.
        """
        known = self.latest.get(engine)
        if known is None:
            known = self.latest[engine] = OrderedDict()
        answers = known.get(tenant)
        if answers is None or now - answers.last_s > WINDOW_S:
            answers = known[tenant] = _Latest(now)
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
        """Do its answers break, and not only for one of those who ask? `is_shared`: requests of several run there."""
        heard: list[_Latest] = []
        well: list[_Latest] = []
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
        """It is out of service: what broke there says nothing of who asked."""
        for tenant in self.latest.pop(engine, ()):
            self.paced.pop(tenant, None)

    def waits_s(self, tenant: str, now: float) -> float:
        """For how long is no request of this tenant sent? 0.0: this one is, and shows whether answers still break."""
        due_s = self.paced.get(tenant) if self.paced else None
        if due_s is None:
            return 0.0
        if now < due_s:
            return due_s - now
        del self.paced[tenant]
        if self._is_at_fault(tenant, now):
            self.paced[tenant] = now + PACE_S
        return 0.0

    def _of(self, tenant: str, now: float) -> list[_Latest]:
        """Its latest answers at each engine."""
        found = [known[tenant] for known in self.latest.values() if tenant in known]
        return [answers for answers in found if now - answers.last_s <= WINDOW_S]

    def _is_at_fault(self, tenant: str, now: float) -> bool:
        recent = self._of(tenant, now)
        breaks = sum([answers.broken() for answers in recent])
        return breaks >= BREAKS_MIN and all([answers.mostly_break() for answers in recent])
