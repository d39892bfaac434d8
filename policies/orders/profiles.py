"""What does a call of this app at this stage normally cost? The weights of WSC (FairServe, section 4.3, equation 2).

    w(app, stage) = alpha * mean input + beta * mean system tokens + gamma * mean output

The means slowly follow what complete answers took. After the first `ENOUGH` answers, each moves a mean by a small part,
and an extreme one counts as `OUTLIER` times the mean. A stage with fewer answers uses the mean of its app, then of all
apps in its scope, then of the pool, then `NEUTRAL`: equal weights favour nobody.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from policies.averages import MovingAverage
from policies.capacity.output_lengths import ENOUGH
from policies.plain_data import fields, rows
from policies.recent import adopt, touch

NEUTRAL: Final = 1000.0
"""Cost assumed for a call of an app without a profile."""
OUTLIER: Final = 4.0
"""Limit of one answer's cost, in multiples of the mean, once the mean has `ENOUGH` answers."""
CLAMP: Final = OUTLIER**2
"""The weight of an app or stage is between 1 / CLAMP and CLAMP times the mean of its scope: as far as two outliers in a
row take an answer."""
STAGES_MAX: Final = 32
"""Last stage with a mean of its own. Later stages count as this one."""
ANY_STAGE: Final = 0
ANY_APP, WHOLE_SCOPE = "", STAGES_MAX + 1


class _MeanCost(MovingAverage):
    """Mean cost of the calls of one (scope, app, stage), and `norm`, that mean within the clamp."""

    # One mean of costs suffices: the sum of the three means in FairServe's equation 2 is the mean of the summed cost.
    __slots__ = ("norm",)

    def __init__(self, seen: int = 0, value: float = 0.0) -> None:
        super().__init__(value, seen)
        self.norm = max(1.0, value)
        """Mean as of the last answer, clamped by `CLAMP`; not clamped between a restart and the next answer."""


class CostProfiles:
    """Expected cost of a call, by (scope, app, stage): the weights of FairServe's WSC.

    Scopes learn from each other only through the pool's mean. Beyond `populations_max` means, the one that has gone
    longest without an answer is forgotten.
    """

    def __init__(self, units: tuple[float, float, float] = (1.0, 2.0, 1.0), *, populations_max: int = 16_384) -> None:
        """Create empty profiles. `units`: alpha, beta and gamma."""
        self.units = units
        self._populations_max = populations_max
        self._means: OrderedDict[tuple[str, str, int], _MeanCost] = OrderedDict()
        self._pool = _MeanCost()

    def __len__(self) -> int:
        return len(self._means)

    def cost(self, prompt: int, system: int, output: int) -> float:
        """Return alpha * (prompt - system) + beta * system + gamma * output: system tokens are part of the prompt."""
        alpha, beta, gamma = self.units
        return alpha * (prompt - system) + beta * system + gamma * output

    def norm(self, scope: str, app: str, stage: int) -> float:
        """Return the cost of a normal call of this app at this stage, greater than 0."""
        costs = self._means
        own = costs.get((scope, app, stage if stage < STAGES_MAX else STAGES_MAX))
        if own is not None and own.seen >= ENOUGH:
            return own.norm
        for wider in (costs.get((scope, app, ANY_STAGE)), costs.get((scope, ANY_APP, WHOLE_SCOPE)), self._pool):
            if wider is not None and wider.seen >= ENOUGH:
                return wider.norm
        return NEUTRAL

    def learn(self, scope: str, app: str, stage: int, cost: float) -> None:
        """Learn the cost of a call that got its complete answer."""
        costs, most = self._means, self._populations_max
        whole = touch(costs, (scope, ANY_APP, WHOLE_SCOPE), _MeanCost, most)
        of_app = touch(costs, (scope, app, ANY_STAGE), _MeanCost, most)
        of_stage = touch(costs, (scope, app, min(stage, STAGES_MAX)), _MeanCost, most)
        for own in (self._pool, whole, of_app, of_stage):
            own.learn(cost if own.seen < ENOUGH else min(cost, OUTLIER * own.value + 1.0))
        self._pool.norm = max(1.0, self._pool.value)
        usual = whole.norm = max(1.0, whole.value)
        for own in (of_app, of_stage):
            own.norm = max(1.0, min(max(own.value, usual / CLAMP), usual * CLAMP))

    # --- across restarts ---

    def snapshot(self) -> dict[str, object]:
        """Return plain data: by scope, app and stage, the number of calls and their mean cost."""
        means, pool = [[*key, own.seen, own.value] for key, own in self._means.items()], self._pool
        return {"units": list(self.units), "worths": means, "pool": [[pool.seen, pool.value]]}

    def read(self, learned: object) -> tuple[dict[tuple[str, str, int], _MeanCost], _MeanCost]:
        """Parse a snapshot for `adopt`. Raise ValueError if the snapshot is invalid or has other units."""
        units, means, pool = fields(learned, "units", "worths", "pool")
        if units != list(self.units):
            raise ValueError(
                f"learned with alpha, beta, gamma of {units!r:.60}, but the configuration has other values now"
            )
        if len(rows(pool, (int, float))) != 1:
            raise ValueError("the pool has one row")
        kinds = (str, str, int, int, float)
        costs = {(scope, app, stage): _MeanCost(*own) for scope, app, stage, *own in rows(means, kinds)}
        return costs, _MeanCost(*pool[0])

    def adopt(self, theirs: tuple[dict[tuple[str, str, int], _MeanCost], _MeanCost]) -> None:
        """Take over each mean that a snapshot has from more calls."""
        costs, pool = theirs
        adopt(self._means, costs, self._populations_max)
        if self._pool.seen < pool.seen:
            self._pool = pool
