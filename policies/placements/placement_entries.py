"""Which placements are there? One entry each: what an operator gets, the class, and its settings."""

from __future__ import annotations

from typing import Final, NamedTuple

from policies.placements.deficits import ByDeficits, DeficitParams
from policies.placements.least_loaded import LeastLoaded
from policies.placements.placement import Placement
from policies.placements.prefix import ByPrefix


class PlacementEntry(NamedTuple):
    """How is a placement made? The fields of `params` are its settings."""

    summary: str
    """What an operator gets with this placement, in one sentence."""
    placement: type[Placement]
    params: type | None = None


PLACEMENTS: Final[dict[str, PlacementEntry]] = {
    "prefix": PlacementEntry("where the request is done soonest, by what each engine has cached of it", ByPrefix),
    "least_loaded": PlacementEntry("where fewest sequences run, for the size of the engine", LeastLoaded),
    "deficits": PlacementEntry(
        "a queue for each engine, by cached prefix within a quantum for each tenant (D2LPM)", ByDeficits, DeficitParams
    ),
}


USUAL_PLACEMENT: Final = "prefix"
"""Where none is named. With one engine, too: what that engine has cached goes first within the order's window."""
