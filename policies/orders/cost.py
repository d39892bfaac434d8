"""How much service is a request worth? Service functions from token counts to one number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from policies.request import ServiceTokens
from policies.settings import setting

LONG_PROMPT: Final = 20_000.0
"""About the cost of computing one long document. A smaller window or quantum evicts prompts before they are used."""


Cost = Callable[[ServiceTokens], float]
"""A service function. Zero for no service; never falls as prompt or output grow."""


@dataclass(frozen=True, slots=True)
class LinearCost:
    """w_p * prompt + w_q * output; the paper's default weights are 1 and 2 (VTC, section 3.1).

    `cached_weight`: cost of a cached prompt token, as a part of `input_weight`. With 0 only input that the engine had
    to compute costs anything (extend service; DLPM, section 3).
    """

    input_weight: float = 1.0
    output_weight: float = 2.0
    cached_weight: float = 1.0

    def __call__(self, service: ServiceTokens) -> float:
        prompt = charged_input(service, self.cached_weight) if service.cached else service.prompt
        return self.input_weight * prompt + self.output_weight * service.output


def charged_input(service: ServiceTokens, cached_weight: float) -> float:
    """Return the prompt tokens to charge. An engine that reports no cached tokens is taken to have computed all."""
    return service.prompt - (1.0 - cached_weight) * (service.cached or 0)


@dataclass(frozen=True, slots=True)
class ProfiledCost:
    """Time as profiled on one engine: long answers to long prompts cost more than their tokens (VTC, appendix B.2).

    h(p, q) = 0.21 p + 0.1 q + 0.004 p q + 0.0032 q^2 + 1.15, fitted to Llama-2-7B on an A10G. These constants give the
    paper's tables 3 and 4; the formula printed there is ten times as large.
    """

    def __call__(self, service: ServiceTokens) -> float:
        p, q = service.prompt, service.output
        if not p and not q:
            return 0.0  # a rejected request took no time; the constant term is for requests that were served
        return 0.21001891 * p + (0.10075395 + 0.0039868 * p + 0.00324733 * q) * q + 1.14601454


CACHED_WEIGHT: Final = "Cost of a cached prompt token, relative to input_weight, with cost: linear."


@dataclass(frozen=True, slots=True)
class ServiceParams:
    """Settings of every order with counters: what a token costs, and the parts of batch work and of prefill."""

    input_weight: float = setting(1.0, "Cost of a prompt token, with cost: linear.", least=0, most=1000)
    output_weight: float = setting(2.0, "Cost of a generated token, with cost: linear.", above=0, most=1000)
    cached_weight: float = setting(0.1, CACHED_WEIGHT, least=0, most=1)
    # Enough for batch work to end, and too little for other work to feel.
    batch_guaranteed_share: float = setting(
        0.05, "Part of the service that class batch gets while other work waits.", above=0, most=0.5
    )
    prefill_parts: bool = setting(
        False, "Limit a tenant that is ahead to its part of an engine's prefill while others' answers run there."
    )

    def charges(self) -> Cost:
        """Return the cost function that these settings name."""
        return LinearCost(self.input_weight, self.output_weight, self.cached_weight)


@dataclass(frozen=True, slots=True)
class CostParams(ServiceParams):
    """Settings of orders whose unit of service may be chosen."""

    cost: str = setting(
        "linear",
        "Unit of service: weighted tokens, or the time that one engine was measured to take for the tokens.",
        choices=("linear", "profiled"),
    )

    def charges(self) -> Cost:
        """Return the cost function that these settings name."""
        return ProfiledCost() if self.cost == "profiled" else ServiceParams.charges(self)
