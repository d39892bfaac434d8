"""How does a tenant stand? What its own key shows it at /fairgate/me, and nothing of anybody else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Final

import msgspec

from gateway.keys.identity import Principal
from gateway.operator.snapshots.own_requests import OwnRequest
from gateway.operator.snapshots.snapshot import GatewaySnapshot, PoolSnapshot
from gateway.pool.pool import Pool
from policies.admission.engine import AdmissionEngine
from policies.request import Flow, Request, is_batch, of_batch
from policies.tree.terms import ROOT, GroupSettings, Tree

Numbers = dict[str, float | int | None]
Shares = Mapping[str, Mapping[str, Mapping[str, float]]]
"""By pool and tenant: what it received and was due."""
NOTHING: Final = {"service_received": 0.0, "service_due": 0.0}


class OwnLimit(msgspec.Struct):
    name: str
    limit: int
    remaining: int
    reset_s: float


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
    recently: Mapping[str, float]
    """What it received and was due within `recently_s`, in the unit of the policy."""
    interactive: OwnClass
    batch: OwnClass
    requests: list[dict[str, Any]]
    """The oldest that wait or run."""
    requests_left_out: int


class OwnStanding(msgspec.Struct):
    tenant: str
    place: list[dict[str, Any]]
    """What is set of each, from the outermost group to the tenant."""
    limits: list[OwnLimit]
    recently_s: float
    pools: list[OwnPool]
    usage: dict[str, Numbers] | None
    """Of the last day and the last month. None: it is not counted, or the database cannot be asked."""


def own_standing(
    principal: Principal, pools: Iterable[Pool], seen: GatewaySnapshot, recently: tuple[float, Shares],
    usage: dict[str, Numbers] | None,
) -> OwnStanding:  # fmt: skip
    """`seen`: at all processes, with the requests of this tenant. `recently`: within so many seconds."""
    found = OwnStanding(principal.tenant, [], [], round(recently[0], 1), [], usage)
    seen_pools, limits = {pool.pool: pool for pool in seen.pools}, dict[str, OwnLimit]()
    for pool in pools:
        engine, now = pool.dispatcher.engine, pool.dispatcher.clock()
        found.place = _place(engine.requests.tree.terms, principal)
        if engine.quotas is not None:
            for model in ("", *filter(principal.may_ask, pool.models())):
                names = engine.quotas.names(principal.tenant, principal.counts_as, model)
                for limit in engine.quotas.standing(principal.tenant, now, names):
                    limits[limit.name] = OwnLimit(*limit[:3], round(limit.reset_s, 1))
        if pool.name in seen_pools:
            received = recently[1].get(pool.name, {}).get(principal.tenant) or NOTHING
            found.pools.append(_pool(seen_pools[pool.name], received, engine, principal, seen.at_s))
    found.limits = [*limits.values()]
    return found


def _place(tree: Tree, principal: Principal) -> list[dict[str, Any]]:
    own = tree.tenants.get(principal.tenant)
    settings, group = (own.settings, own.group) if own is not None else (GroupSettings(), ROOT)
    places = [_shown(principal.tenant, settings) | {"weight": principal.weight}]
    while group:
        places.append(_shown(group, tree.groups[group].settings))
        group = tree.groups[group].group
    return places[::-1]


def _shown(name: str, settings: GroupSettings) -> dict[str, Any]:
    return {"name": name, **{term: value for term, value in asdict(settings).items() if value is not None}}


def _pool(
    seen: PoolSnapshot, received: Mapping[str, float], engine: AdmissionEngine, principal: Principal, now: float
) -> OwnPool:
    running = Counter(each.tenant for each in seen.running)
    leaves = principal.tenant, of_batch(principal.tenant)
    own, batch = (_class(engine, leaf, principal.weight, seen, running[leaf], now) for leaf in leaves)
    count = own.queued_requests + batch.queued_requests + running.total()
    return OwnPool(seen.pool, received, own, batch, [_request(one, now) for one in seen.own], count - len(seen.own))


def _request(one: OwnRequest, now: float) -> dict[str, Any]:
    shown = {name: getattr(one, name) for name in ("request_id", "app", "user", "state")}
    return {**shown, "age_s": round(now - one.arrived_s, 3)}


def _class(engine: AdmissionEngine, leaf: str, weight: float, seen: PoolSnapshot, running: int, now: float) -> OwnClass:
    coming, requests = Request("", Flow(leaf), weight, 1, 1, now), engine.requests
    wait_s = requests.expected(coming, now, comes=True).wait_s if engine.blocked is not None else 0.0
    share = None
    if not is_batch(leaf):
        tree = requests.tree
        share = round(requests.tenants.part_of(leaf, weight) if tree.is_flat else tree.share(leaf), 4)
    waiting = seen.waiting.get(leaf)
    queued, oldest_s = (waiting.requests, now - waiting.oldest_s) if waiting is not None else (0, 0.0)
    return OwnClass(queued, running, round(oldest_s, 3), round(wait_s, 1), share)
