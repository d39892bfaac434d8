"""How many prompt tokens does an engine compute in a second? Measured by what each more of them costs.

The time to a first token is a + u / R: u are the prompt tokens that the engine has not cached, R is the rate, and a is
what every request takes. An answer that comes whole takes c more for each token of the answer. So 1 / R is the slope of
the time over u at equal outputs: a least-squares fit with two regressors, over the last requests. Where the engine
reports each of its steps, u are the tokens of the step, and the time is that of the step.
"""

from __future__ import annotations

from typing import Final

__all__ = ["PrefillRate"]

RATE: Final = 0.02
"""Weight of one request in the moments: about the last fifty count."""
SEEN_MIN: Final = 20
"""The first guess of a moving average weighs too much before."""
EXPLAINED_MIN: Final = 0.5
"""The part of the variance of the times that the tokens must explain (r squared), or the slope is noise."""


class PrefillRate:
    """The moments of (uncached prompt tokens, output tokens, seconds), of late."""

    __slots__ = ("_mean", "_moments", "_seen", "tokens_per_s")

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None
        """R, as of the last time that it could be told; None: too little was seen, or prompts differed too little."""
        self._seen = 0
        self._mean = [0.0, 0.0, 0.0]
        self._moments = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
        """Of uu, uo, us, oo, os, ss."""

    def observed(self, uncached_tokens: float, output_tokens: float, seconds: float) -> None:
        """A request that found nobody's prompt before it took so long."""
        self._seen += 1
        share = max(RATE, 1.0 / self._seen)
        mean = self._mean
        u, o, s = uncached_tokens - mean[0], output_tokens - mean[1], seconds - mean[2]
        for place, delta in enumerate((u, o, s)):
            mean[place] += share * delta
        products = (u * u, u * o, u * s, o * o, o * s, s * s)
        self._moments = [
            (1.0 - share) * (moment + share * product) for moment, product in zip(self._moments, products, strict=True)
        ]
        if self._seen >= SEEN_MIN:
            self._fit()

    def _fit(self) -> None:
        uu, uo, us, oo, os, ss = self._moments
        if oo > 0:  # what outputs explain is taken out
            uu, us, ss = uu - uo * uo / oo, us - uo * os / oo, ss - os * os / oo
        if uu > 0 and us > 0 and us * us >= EXPLAINED_MIN * uu * ss:
            self.tokens_per_s = uu / us
