"""Which policies are there? One entry each: an order with its settings, and the placement that belongs to it."""

from __future__ import annotations

from typing import Any, NamedTuple

from policies.orders.dlpm import Dlpm, DlpmParams
from policies.orders.fairserve import FairServe, FairServeParams
from policies.orders.fcfs import Fcfs, FcfsParams
from policies.orders.rr import Rr, RrParams
from policies.orders.vtc import Vtc, VtcParams
from policies.orders.wsc import Wsc, WscParams


class PolicyEntry(NamedTuple):
    """The class of an order, its settings, and its placement. The fields of `params` are the settings."""

    summary: str
    """Description for an operator, in one sentence."""
    order: Any
    """Class of the order. The constructor takes the settings, `flows_max`, and `prefixes` if the order reads them."""
    params: type
    placement: str | None = None
    """Name of the placement if the configuration names none; None for `USUAL_PLACEMENT`."""


POLICIES: dict[str, PolicyEntry] = {
    "fairserve": PolicyEntry(
        "fair; throttles only under overload, and never inside an interaction", FairServe, FairServeParams
    ),
    "wsc": PolicyEntry("as fairserve, never throttled", Wsc, WscParams),
    "vtc": PolicyEntry("fair by weighted tokens (virtual token counter)", Vtc, VtcParams),
    "dlpm": PolicyEntry("longest cached prefix first, within turns that keep it fair", Dlpm, DlpmParams, "prefix"),
    "d2lpm": PolicyEntry("as dlpm, with a queue for each of several engines", Dlpm, DlpmParams, "deficits"),
    "rr": PolicyEntry("vtc in turns (deficit round robin)", Rr, RrParams),
    "fcfs": PolicyEntry("first come, first served", Fcfs, FcfsParams),
}
