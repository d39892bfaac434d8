"""How much service is a request worth? Service functions from token counts to one number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from policies.base import ServiceTokens

__all__ = ["Cost", "LinearCost"]


class Cost(Protocol):
    """What is this much service worth? Increasing in every argument but `cached`."""

    def __call__(self, service: ServiceTokens) -> float: ...


@dataclass(frozen=True, slots=True)
class LinearCost:
    """w_p * prompt + w_q * output, the paper's default of 1 and 2 (VTC, section 3.1)."""

    input_weight: float = 1.0
    output_weight: float = 2.0

    def __call__(self, service: ServiceTokens) -> float:
        return self.input_weight * service.prompt + self.output_weight * service.output
