"""How does a tenant stand? The document that its own key gets at /fairgate/me, without data of other tenants."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Final

import msgspec

from gateway.keys.identity import DEFAULT_APP, Principal
from gateway.operator.snapshots.snapshot import PoolSnapshot, RequestSnapshot
from gateway.operator.snapshots.state_document import ended_request, reason_in_words
from gateway.pool.pool import Pool
from gateway.telemetry.ends import OwnMinute
from policies.admission.engine import AdmissionEngine
from policies.admission.explanation import OF_WAIT
from policies.capacity.obstacle import Obstacle
from policies.queue.expected_wait import interval_s
from policies.request import Flow, Request, is_batch, of_batch, payer
from policies.tree.terms import ROOT, GroupSettings, Tree

Numbers = dict[str, float | int | None]
Shares = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Service received and due, by pool and tenant."""
NOTHING: Final = {"service_received": 0.0, "service_due": 0.0}
OF_OTHERS: Final = frozenset({"tenant", "backend", "pool"})
"""Fields of a request that its tenant knows already or need not know."""


class RecentService(msgspec.Struct):
    """The state of all pools, and the service that all tenants received lately, once for all clients that ask."""

    pools: list[PoolSnapshot] = []
    window_s: float = 0.0
    shares: Shares = {}


class OwnLimit(msgspec.Struct):
    """One limit of the caller's tenant, and what remains of it."""

    name: str
    limit: int
    remaining: int
    reset_s: float


class OwnClass(msgspec.Struct, omit_defaults=True):
    """A tenant's requests of one class (interactive or batch) in one pool."""

    queued_requests: int
    running_requests: int
    oldest_wait_s: float
    expected_wait_s: float | None
    """Wait of a request that comes now, of the app of the newest waiting one; None until turns are learned."""
    expected_wait_range_s: tuple[float, float] | None
    share: float | None = None
    """Part of the pool that the tenant is entitled to now; None for batch, which gets what others leave."""


class OwnPool(msgspec.Struct):
    """The caller's tenant in one pool: its requests, its service, and the reason why it waits."""

    pool: str
    waits_for: str
    """Obstacle of the next request in order, in words; "" if each request starts as it comes."""
    ceiling: str
    """Sentence that says which ceiling or kept reserve makes requests of this tenant wait; "" if none does."""
    recently: Mapping[str, float]
    """Service received and due within `recently_s`, in the unit of the policy."""
    interactive: OwnClass
    batch: OwnClass
    requests: list[dict[str, Any]]
    """The tenant's queued requests that are among the oldest of the pool."""
    requests_left_out: int


class OwnStanding(msgspec.Struct):
    """The answer to a tenant that asks about itself: place, limits, pools and usage."""

    tenant: str
    place: list[dict[str, Any]]
    """Settings of each level, from the outermost group to the tenant."""
    limits: list[OwnLimit]
    recently_s: float
    pools: list[OwnPool]
    usage: dict[str, Numbers] | None
    """Usage of the last day and the last month; None if usage is not counted or the database cannot be asked."""
    hours: list[dict[str, Any]] | None
    """The last 24 hours, each hour with requests; None as `usage`."""
    minutes: list[dict[str, Any]]
    """The minutes with requests, the latest first: how long they waited, and why the slowest did."""


def own_standing(
    principal: Principal, pools: Iterable[Pool], recently: RecentService, minutes: Iterable[OwnMinute],
    usage: dict[str, Numbers] | None, hours: list[dict[str, Any]] | None,
) -> OwnStanding:  # fmt: skip
    """Return the document. `minutes`: those of this tenant, the earliest first."""
    found = OwnStanding(principal.tenant, [], [], round(recently.window_s, 1), [], usage, hours, _minutes(minutes))
    seen_pools, limits = {pool.pool: pool for pool in recently.pools}, dict[str, OwnLimit]()
    for pool in pools:
        engine, now = pool.dispatcher.engine, pool.dispatcher.clock()
        found.place = _place(engine.requests.tree.terms, principal)
        if engine.quotas is not None:
            for model in ("", *filter(principal.may_ask, pool.models())):
                names = engine.quotas.names(principal.tenant, principal.counts_as, model, principal.user)
                for limit in engine.quotas.standing(principal.tenant, now, names):
                    limits[limit.name] = OwnLimit(*limit[:3], round(limit.reset_s, 1))
        if pool.name in seen_pools:
            found.pools.append(_pool(seen_pools[pool.name], recently, engine, principal, now))
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
    seen: PoolSnapshot, recently: RecentService, engine: AdmissionEngine, principal: Principal, now: float
) -> OwnPool:
    running = Counter(each.tenant for each in seen.running)
    leaves = principal.tenant, of_batch(principal.tenant)
    own, batch = (_class(engine, leaf, principal.weight, seen, running[leaf], now) for leaf in leaves)
    count = sum(one.queued_requests + one.running_requests for one in (own, batch))
    requests = [_request(one) for one in seen.requests if payer(one["tenant"]) == principal.tenant]
    return OwnPool(
        seen.pool,
        OF_WAIT[Obstacle(seen.obstacle)] if seen.obstacle else "",
        seen.ceilings.get(principal.tenant, ""),
        recently.shares.get(seen.pool, {}).get(principal.tenant) or NOTHING,
        own,
        batch,
        requests,
        count - len(requests),
    )


def _request(one: RequestSnapshot) -> dict[str, Any]:
    """Return the fields of a queued request that its own tenant may see."""
    return {"request_id": one["request_id"], "app": one["app"], "user": one["user"], "wait_s": one["wait_s"]}


def _minutes(minutes: Iterable[OwnMinute]) -> list[dict[str, Any]]:
    """Return the minutes as plain data, the latest first."""
    epoch_s, found = time.time() - time.monotonic(), []
    for one in reversed([*minutes]):
        end = one.slowest
        shown = ended_request(end, epoch_s)
        found.append({
            "at_s": one.at_s,
            "requests": one.requests,
            "wait_s_mean": round(one.queue_s / one.requests, 4),
            "not_served": one.not_served,
            "reason_is": one.reason and reason_in_words(one.reason),
            "slowest": {name: value for name, value in shown.items() if name not in OF_OTHERS},
        })  # fmt: skip
    return found


def _class(engine: AdmissionEngine, leaf: str, weight: float, seen: PoolSnapshot, running: int, now: float) -> OwnClass:
    requests = engine.requests
    own = max(requests.waiting.of_tenant(leaf), key=lambda one: one.arrived_s, default=None)
    flow = own.flow if own is not None else Flow(leaf, DEFAULT_APP)
    wait_s: float | None = 0.0
    if engine.blocked is not None:
        coming = Request("", flow, weight, 1, 1, now)
        expected = requests.expected(coming, now, comes=True)
        wait_s = round(expected.wait_s, 1) if expected.is_learned else None
    share = None
    if not is_batch(leaf):
        share = round(requests.tree.share(leaf, weight), 4)
    waiting = seen.waiting.get(leaf)
    queued, oldest_s = (waiting.requests, now - waiting.oldest_s) if waiting is not None else (0, 0.0)
    range_s = None if wait_s is None else interval_s(wait_s)
    return OwnClass(queued, running, round(oldest_s, 3), wait_s, range_s, share)
