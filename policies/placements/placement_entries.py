"""Which placements are there? One entry each: what an operator gets, the class, and its settings."""

from __future__ import annotations

from typing import Final, NamedTuple

from policies.placements.deficits import ByDeficits, DeficitParams
from policies.placements.least_loaded import LeastLoaded
from policies.placements.placement import Placement
from policies.placements.prefix import ByPrefix


class PlacementEntry(NamedTuple):
    """The class of a placement, and its settings: the fields of `params`."""

    summary: str
    """Description for an operator, in one sentence."""
    placement: type[Placement]
    params: type | None = None


PLACEMENTS: Final[dict[str, PlacementEntry]] = {
    "prefix": PlacementEntry("the engine that finishes the request first, by its cached part of the prompt", ByPrefix),
    "least_loaded": PlacementEntry("the engine with fewest running sequences for its size", LeastLoaded),
    "deficits": PlacementEntry(
        "a queue for each engine, by cached prefix within a quantum for each tenant (D2LPM)", ByDeficits, DeficitParams
    ),
}


USUAL_PLACEMENT: Final = "prefix"
"""Placement if none is named. With one engine as well: cached prompts then go first within the order's window."""
