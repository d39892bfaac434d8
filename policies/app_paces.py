"""How soon does the next call of an app follow an answer?

A call without better evidence continues the last interaction if the call follows at an agent's pace. The pace of each
app is learned from the calls that follow the last answer of an interaction: agents reply faster than people can read.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from policies.averages import USUAL
from policies.capacity.output_lengths import ENOUGH
from policies.plain_data import rows
from policies.recent import adopt, touch

AGENTS_REPLY_S: Final = 5.0
"""An app whose next call usually follows within this time is an agent: people read more slowly."""
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
    """The paces of every app of every tenant.

    Bounded by `apps_max`: the apps that have replied least recently are forgotten.
    """

    def __init__(self, apps_max: int) -> None:
        self.apps_max = apps_max
        self._apps: OrderedDict[tuple[str, str], Median] = OrderedDict()

    def pace_s(self, tenant: str, app: str) -> float:
        """Return the seconds within which a call must follow an answer to continue its interaction."""
        reply_s = self._apps.get((tenant, app))
        if reply_s is None or reply_s.seen < ENOUGH:
            return PACE_S_UNKNOWN
        return PACE_S_MAX if reply_s.value <= AGENTS_REPLY_S else PACE_S_PEOPLE

    def replied(self, tenant: str, app: str, pause_s: float) -> None:
        """Learn from a reply of a person or an agent, `pause_s` seconds after an interaction's last answer."""
        touch(self._apps, (tenant, app), Median, self.apps_max).learn(pause_s)

    # --- snapshots ---

    def snapshot(self) -> list[list[object]]:
        """Return rows of [tenant, app, seconds, replies]."""
        return [[*app, reply_s.value, reply_s.seen] for app, reply_s in self._apps.items()]

    def read(self, learned: object) -> OrderedDict[tuple[str, str], Median]:
        """Parse a snapshot for `adopt`. Raise ValueError if the snapshot is not valid."""
        kinds = (str, str, float, int)
        return OrderedDict(((tenant, app), Median(value, seen)) for tenant, app, value, seen in rows(learned, kinds))

    def adopt(self, theirs: OrderedDict[tuple[str, str], Median]) -> None:
        """Replace the pace of each app that has more replies in the snapshot."""
        adopt(self._apps, theirs, self.apps_max)
