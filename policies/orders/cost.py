"""How much service is a request worth? Service functions from token counts to one number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from policies.request import ServiceTokens
from policies.settings import setting

__all__ = [
    "Cost",
    "ExtendCost",
    "LinearCost",
    "ProfiledCost",
    "cost_of",
    "cost_setting",
    "input_weight_setting",
    "output_weight_setting",
]


class Cost(Protocol):
    """What is this much service worth? Zero for nothing, and increasing in every argument except `cached`."""

    def __call__(self, service: ServiceTokens) -> float: ...


@dataclass(frozen=True, slots=True)
class LinearCost:
    """w_p * prompt + w_q * output; the paper's default weights are 1 and 2 (VTC, section 3.1)."""

    input_weight: float = 1.0
    output_weight: float = 2.0

    def __call__(self, service: ServiceTokens) -> float:
        return self.input_weight * service.prompt + self.output_weight * service.output


@dataclass(frozen=True, slots=True)
class ExtendCost:
    """w_e * extend + w_q * output: only input that was not in the engine's cache costs anything (DLPM, section 3)."""

    input_weight: float = 1.0
    output_weight: float = 2.0

    def __call__(self, service: ServiceTokens) -> float:
        extend = max(0, service.prompt - (service.cached or 0))
        return self.input_weight * extend + self.output_weight * service.output


@dataclass(frozen=True, slots=True)
class ProfiledCost:
    """Time as profiled on one engine: long answers behind long prompts cost more than their tokens (VTC, appendix B.2).

    h(p, q) = 0.21 p + 0.1 q + 0.004 p q + 0.0032 q^2 + 1.15, fitted to Llama-2-7B on an A10G. These constants give the
    paper's tables 3 and 4; the formula printed there is ten times as large.
    """

    def __call__(self, service: ServiceTokens) -> float:
        p, q = service.prompt, service.output
        if not p and not q:
            return 0.0  # a refused request took no time; the constant term is for requests that were served
        return 0.21001891 * p + (0.10075395 + 0.0039868 * p + 0.00324733 * q) * q + 1.14601454


def cost_setting() -> Any:
    return setting(
        "linear",
        "What service is: weighted tokens, or the time that one engine was measured to take for them.",
        choices=("linear", "profiled"),
    )


def input_weight_setting() -> Any:
    return setting(1.0, "What one prompt token costs its tenant; cost: linear.", least=0, most=1000)


def output_weight_setting() -> Any:
    return setting(2.0, "What one generated token costs its tenant; cost: linear.", above=0, most=1000)


def cost_of(cost: str, input_weight: float, output_weight: float) -> Cost:
    """The cost that these settings name."""
    return ProfiledCost() if cost == "profiled" else LinearCost(input_weight, output_weight)
