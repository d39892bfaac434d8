"""How long will the answer be, if somebody knows? The oracle of VTC (section 4.4), for the experiments."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from policies.request import Request


class KnownLengths:
    """What would a predictor say that knows the lengths? For simulation: `expected_tokens` by request id.

    With the true lengths this is the oracle of VTC (section 4.4). If the caller multiplies each by a random factor from
    0.5 to 1.5, it is the paper's noisy oracle. It learns nothing and draws nothing at random: the same table gives the
    same answers.
    """

    def __init__(self, expected_tokens: Mapping[str, float]) -> None:
        self._expected_tokens = expected_tokens

    def estimate(self, request: Request) -> tuple[float, int]:
        """Return the request's entry, at most what the request allows. Raise KeyError for an unknown request."""
        expected = min(self._expected_tokens[request.id], float(request.output_tokens_max))
        return expected, ceil(expected)

    def learn(self, request: Request, output_tokens: int) -> None:
        """Nothing to learn."""
