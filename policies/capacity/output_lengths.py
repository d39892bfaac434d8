"""How long will the answer be? Output lengths are learned from similar requests.

There are two estimates. A mean is *charged* at dispatch. A high quantile is *reserved* in the KV cache, because a small
reserve ends in preemption, and a large one only wastes a little memory.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from typing import Final, Protocol

from policies.recent import touch
from policies.request import Request

APPS_MAX: Final = 4096
"""Apps whose usual requests are remembered."""
WINDOW: Final = 64
"""Answers remembered per population. Older ones are forgotten."""
ENOUGH: Final = 8
"""Answers after which a population is used by itself, instead of the wider one."""


class OutputPredictor(Protocol):
    """Estimates of the length of an answer, in tokens over all sequences of its request."""

    def estimate(self, request: Request) -> tuple[float, int]:
        """Return the mean length, which is charged at dispatch, and a cautious length, which the KV cache reserves."""

    def learn(self, request: Request, output_tokens: int) -> None:
        """Learn from a complete answer of this length."""


class _Population:
    """The lengths of the last answers to one app of one tenant, in order of arrival and sorted."""

    __slots__ = ("arrivals", "lengths", "mean")

    def __init__(self) -> None:
        self.arrivals = array("q")
        self.lengths = array("q")
        self.mean = 0.0

    def learn(self, output_tokens: int) -> None:
        # The moving average of VTC's length prediction (section 4.4): p <- (4p + out) / 5.
        self.mean = (4 * self.mean + output_tokens) / 5 if self.arrivals else float(output_tokens)
        if len(self.arrivals) == WINDOW:
            oldest = self.arrivals.pop(0)
            del self.lengths[bisect_left(self.lengths, oldest)]
        self.arrivals.append(output_tokens)
        insort(self.lengths, output_tokens)


class OutputLengths:
    """Lengths of the last answers by tenant and app. Falls back to the whole pool, then to `unknown_tokens`.

    Bounded: at most `populations_max` (tenant, app) pairs. The pair longest without an answer is forgotten first.
    """

    def __init__(self, *, quantile: float = 0.9, unknown_tokens: int = 256, populations_max: int = APPS_MAX) -> None:
        self._quantile = quantile
        self._unknown_tokens = unknown_tokens
        self.populations_max = populations_max
        self._everybody = _Population()
        self._populations: OrderedDict[tuple[str, str], _Population] = OrderedDict()

    def estimate(self, request: Request) -> tuple[float, int]:
        """Return the mean output tokens, and the tokens that most such answers do not exceed.

        Both are at most what the request allows. While too few answers were seen, the mean is 0: a guess that is too
        long is refunded when the answer ends, and the refunds of a flood would take its counter below that of a flow
        that was lifted to it meanwhile. So a fresh gateway guesses nothing, and charges as plain VTC.
        """
        most, population = request.output_tokens_max, self._populations.get(request.flow[:2])
        if population is None or len(population.lengths) < ENOUGH:
            population = self._everybody
        lengths = population.lengths
        if len(lengths) < ENOUGH:
            return 0.0, min(self._unknown_tokens, most)
        cautious = lengths[min(int(self._quantile * len(lengths)), len(lengths) - 1)]
        return min(population.mean, float(most)), min(cautious, most)

    def learn(self, request: Request, output_tokens: int) -> None:
        touch(self._populations, request.flow[:2], _Population, self.populations_max).learn(output_tokens)
        self._everybody.learn(output_tokens)
