"""How long will the answer be? Output lengths are learned from similar requests.

There are two answers. What is *charged* ahead is a mean. What is *reserved* of the KV cache is a high quantile, because
too small a reserve ends in preemption, and too large a one only wastes a little memory.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from typing import Final, Protocol

from policies.request import Request

APPS_MAX: Final = 4096
"""Apps whose usual requests are remembered."""
WINDOW: Final = 64
"""Answers remembered per population. Older ones are forgotten."""
ENOUGH: Final = 8
"""Answers after which a population is used by itself, instead of the wider one."""


class OutputPredictor(Protocol):
    """How long will the answer to this request be, in tokens over all its sequences?"""

    def expected(self, request: Request) -> float:
        """Its mean, which is charged ahead."""

    def reserved(self, request: Request) -> int:
        """A cautious length, for which KV tokens are held."""

    def learn(self, request: Request, output_tokens: int) -> None:
        """An answer ended by itself after this many tokens."""


class _Population:
    """The last answers of one population, sorted by length."""

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

    def quantile(self, q: float) -> int:
        return self.lengths[min(int(q * len(self.lengths)), len(self.lengths) - 1)]


class OutputLengths:
    """How long are the answers of this tenant and app? Falls back to the whole pool, then to `unknown_tokens`.

    Bounded: at most `populations_max` (tenant, app) pairs. The least recently used is forgotten first.
    """

    def __init__(self, *, quantile: float = 0.9, unknown_tokens: int = 256, populations_max: int = APPS_MAX) -> None:
        self._quantile = quantile
        self._unknown_tokens = unknown_tokens
        self.populations_max = populations_max
        self._everybody = _Population()
        self._populations: OrderedDict[tuple[str, str], _Population] = OrderedDict()

    def _population(self, request: Request) -> _Population | None:
        own = self._populations.get(request.flow[:2])
        if own is not None and len(own.arrivals) >= ENOUGH:
            return own
        return self._everybody if len(self._everybody.arrivals) >= ENOUGH else None

    def expected(self, request: Request) -> float:
        """Mean output tokens, at most what the request allows; 0 while too few answers were seen.

        A guess that is too long is refunded when the answer ends. The refunds of a flood would take its counter below
        that of a flow that was lifted to it meanwhile. Without a guess a fresh gateway charges as plain VTC does.
        """
        population = self._population(request)
        return min(population.mean, float(request.output_tokens_max)) if population else 0.0

    def reserved(self, request: Request) -> int:
        """Output tokens that nine of ten such answers do not exceed, at most what the request allows."""
        population = self._population(request)
        cautious = population.quantile(self._quantile) if population else self._unknown_tokens
        return min(cautious, request.output_tokens_max)

    def learn(self, request: Request, output_tokens: int) -> None:
        key = request.flow[:2]
        population = self._populations.get(key)
        if population is None:
            population = self._populations[key] = _Population()
            if len(self._populations) > self.populations_max:
                self._populations.popitem(last=False)
        else:
            self._populations.move_to_end(key)
        population.learn(output_tokens)
        self._everybody.learn(output_tokens)
