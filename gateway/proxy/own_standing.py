"""How does a tenant stand? What its own key shows it at /fairgate/me, and nothing of anybody else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from gateway.keys.identity import Principal
from gateway.pool.pool import Pool
from policies.admission.engine import AdmissionEngine
from policies.limits.entitlements import ROOT, GroupSettings, Tree
from policies.request import Flow, Request, is_batch, of_batch

REQUESTS_MAX: Final = 50


class OwnPlace(msgspec.Struct, omit_defaults=True):
    """A group around the tenant, or the tenant itself: what is set of it."""

    name: str
    weight: float
    guaranteed_share: float | None = None
    max_share: float | None = None
    max_running: int | None = None
    lending_limit: float | None = None
    borrowing_limit: float | None = None


class OwnLimit(msgspec.Struct):
    name: str
    limit: int
    remaining: int
    reset_s: float


class OwnRequest(msgspec.Struct):
    """One of its requests that wait or run, the oldest first."""

    request_id: str
    app: str
    user: str
    state: str
    age_s: float


class OwnClass(msgspec.Struct, omit_defaults=True):
    """Of its work of one class in one pool."""

    queued_requests: int
    running_requests: int
    oldest_wait_s: float
    expected_wait_s: float
    """Of a request that comes now."""
    share: float | None = None
    """The part of the pool that it is entitled to now. None: of work that can wait it is what others leave."""


class OwnPool(msgspec.Struct):
    pool: str
    interactive: OwnClass
    batch: OwnClass
    requests: list[OwnRequest]
    requests_left_out: int


class OwnStanding(msgspec.Struct):
    tenant: str
    place: list[OwnPlace]
    """From the outermost group to the tenant."""
    limits: list[OwnLimit]
    pools: list[OwnPool]


def own_standing(principal: Principal, pools: Iterable[Pool]) -> bytes:
    """As JSON. O(requests of the tenant, and requests that run)."""
    tenant, found = principal.tenant, []
    place: list[OwnPlace] = []
    limits: list[OwnLimit] = []
    for pool in pools:
        engine, now = pool.dispatcher.engine, pool.dispatcher.clock()
        place = _place(engine.requests.entitlements.tree, principal)
        if engine.quotas is not None:
            limits = [OwnLimit(*limit[:3], round(limit.reset_s, 1)) for limit in engine.quotas.standing(tenant, now)]
        found.append(_pool(pool.name, engine, principal, now))
    return msgspec.json.encode(OwnStanding(tenant, place, limits, found))


def _place(tree: Tree, principal: Principal) -> list[OwnPlace]:
    own = tree.tenants.get(principal.tenant)
    settings, group = (own.settings, own.group) if own is not None else (GroupSettings(), ROOT)
    places = [_shown(principal.tenant, settings, principal.weight)]
    while group:
        around = tree.groups[group]
        places.append(_shown(group, around.settings, around.settings.weight))
        group = around.group
    return places[::-1]


def _shown(name: str, settings: GroupSettings, weight: float) -> OwnPlace:
    return OwnPlace(
        name, weight, settings.guaranteed_share, settings.max_share, settings.max_running, settings.lending_limit,
        settings.borrowing_limit,
    )  # fmt: skip


def _pool(name: str, engine: AdmissionEngine, principal: Principal, now: float) -> OwnPool:
    leaves = principal.tenant, of_batch(principal.tenant)
    waiting = [request for leaf in leaves for request in engine.requests.waiting.of_tenant(leaf)]
    running = [lease.request for lease in engine.requests.leases.values() if lease.request.flow.tenant in leaves]
    oldest = sorted([*waiting, *running], key=_arrival)[:REQUESTS_MAX]
    requests = [
        OwnRequest(one.id, one.flow.app, one.flow.user, one.progress.state.value, round(now - one.arrived_s, 3))
        for one in oldest
    ]
    own, batch = (_class(engine, leaf, principal.weight, waiting, running, now) for leaf in leaves)
    return OwnPool(name, own, batch, requests, len(waiting) + len(running) - len(oldest))


def _class(
    engine: AdmissionEngine, leaf: str, weight: float, waiting: list[Request], running: list[Request], now: float
) -> OwnClass:
    queued = [request for request in waiting if request.flow.tenant == leaf]
    coming = Request("", Flow(leaf), weight, 1, 1, now)
    waits_s = engine.requests.expected(coming, now, comes=True).wait_s if engine.blocked is not None else 0.0
    requests = engine.requests
    share = None
    if not is_batch(leaf):
        tree = requests.entitlements
        share = round(requests.tenants.part_of(leaf, weight) if tree.is_flat else tree.share(leaf), 4)
    return OwnClass(
        len(queued),
        sum([request.flow.tenant == leaf for request in running]),
        round(now - min([request.arrived_s for request in queued], default=now), 3),
        round(waits_s, 1),
        share,
    )


def _arrival(request: Request) -> float:
    return request.arrived_s
