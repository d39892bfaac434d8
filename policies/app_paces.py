"""How soon does a call of an app follow an answer? What follows at an agent's pace goes on with an interaction, where
nothing better shows whether it does.

Each app teaches its own pace, by what is said to answers that seemed final: people do not read so fast as agents.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from policies.averages import USUAL
from policies.capacity.output_lengths import ENOUGH
from policies.plain_data import rows

AGENTS_REPLY_S: Final = 5.0
"""An app whose next call usually follows within this time is an agent: people do not read so fast."""
PACE_S_PEOPLE: Final = 2 * AGENTS_REPLY_S
PACE_S_UNKNOWN: Final = 2 * PACE_S_PEOPLE
PACE_S_MAX: Final = 60.0


class Median:
    """A running estimate of a median. O(1), no memory.

    Each value moves the estimate by a small part of itself (stochastic approximation). The first values move it by
    more. No single value can move it far, however large it is.
    """

    __slots__ = ("seen", "value")

    def __init__(self, value: float = 0.0, seen: int = 0) -> None:
        self.value = value
        self.seen = seen

    def learn(self, value: float) -> None:
        self.seen += 1
        if self.seen == 1:
            self.value = value
            return
        step = max(USUAL, 1.0 / self.seen) / 2 * max(self.value, 1.0)
        self.value = max(0.0, self.value + (step if value > self.value else -step))


class AppPaces:
    """The paces of every app of every tenant. Bounded: the apps that were answered longest ago are forgotten."""

    def __init__(self, apps_max: int) -> None:
        self.apps_max = apps_max
        self._apps: OrderedDict[tuple[str, str], Median] = OrderedDict()

    def pace_s(self, tenant: str, app: str) -> float:
        """Within which time must a call follow an answer to be no new question of a person?"""
        reply_s = self._apps.get((tenant, app))
        if reply_s is None or reply_s.seen < ENOUGH:
            return PACE_S_UNKNOWN
        return PACE_S_MAX if reply_s.value <= AGENTS_REPLY_S else PACE_S_PEOPLE

    def replied(self, tenant: str, app: str, pause_s: float) -> None:
        """So long after an answer that seemed final something was said to it, be it by a person or an agent."""
        reply_s = self._apps.pop((tenant, app), None) or Median()
        reply_s.learn(pause_s)
        self._apps[(tenant, app)] = reply_s
        self._forget()

    # --- what was learned ---

    def snapshot(self) -> list[list[object]]:
        """As plain data: [tenant, app, seconds, replies]."""
        return [[*app, reply_s.value, reply_s.seen] for app, reply_s in self._apps.items()]

    def read(self, learned: object) -> OrderedDict[tuple[str, str], Median]:
        """What `adopt` takes of a snapshot. ValueError if it is not valid."""
        kinds = (str, str, float, int)
        return OrderedDict(((tenant, app), Median(value, seen)) for tenant, app, value, seen in rows(learned, kinds))

    def adopt(self, theirs: OrderedDict[tuple[str, str], Median]) -> None:
        """Take over from a snapshot what was seen more of there."""
        for app, known in theirs.items():
            own = self._apps.get(app)
            if own is None or own.seen < known.seen:
                self._apps[app] = known
        self._forget()

    def _forget(self) -> None:
        while len(self._apps) > self.apps_max:
            self._apps.popitem(last=False)
