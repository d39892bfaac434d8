"""Which requests has one tenant at a pool? What its own key shows of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from policies.admission.engine import AdmissionEngine
from policies.queue.bounds import Waiting
from policies.request import of_batch

REQUESTS_MAX: Final = 50


class OwnRequest(msgspec.Struct):
    """One that waits or runs."""

    request_id: str
    app: str
    user: str
    state: str
    arrived_s: float


def own_waiting(engine: AdmissionEngine, tenant: str) -> dict[str, Waiting]:
    """Of each class. O(requests of the tenant)."""
    found = {leaf: engine.requests.waiting.of_tenant(leaf) for leaf in (tenant, of_batch(tenant))}
    return {
        leaf: Waiting(len(each), each[0].weight, min(one.arrived_s for one in each))
        for leaf, each in found.items()
        if each
    }


def own_requests(engine: AdmissionEngine, tenant: str) -> list[OwnRequest]:
    """The oldest of them. O(requests of the tenant, and requests that run)."""
    leaves, requests = (tenant, of_batch(tenant)), engine.requests
    found = [request for leaf in leaves for request in requests.waiting.of_tenant(leaf)]
    found += [lease.request for lease in requests.leases.values() if lease.request.flow.tenant in leaves]
    return oldest(
        OwnRequest(one.id, one.flow.app, one.flow.user, one.progress.state.value, one.arrived_s) for one in found
    )


def oldest(requests: Iterable[OwnRequest]) -> list[OwnRequest]:
    """As many as are shown."""
    return sorted(requests, key=_arrival)[:REQUESTS_MAX]


def _arrival(request: OwnRequest) -> float:
    return request.arrived_s
