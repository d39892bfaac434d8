"""How does a tenant stand? The document that its own key gets at /fairgate/me, without data of other tenants."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, NamedTuple

from gateway.keys.identity import DEFAULT_APP, Principal
from gateway.operator.snapshots.recent_sums import Sums, TenantSums
from gateway.operator.snapshots.snapshot import PoolSnapshot
from gateway.operator.snapshots.state_document import describe_reason, ended_request
from gateway.pool.pool import Pool
from gateway.telemetry.ends import OwnMinute
from policies.admission.engine import AdmissionEngine
from policies.admission.explanation import OF_WAIT
from policies.capacity.obstacle import Obstacle
from policies.queue.expected_wait import interval_s
from policies.request import Flow, Request, is_batch, of_batch, payer
from policies.tree.terms import ROOT, GroupSettings, Tree

Data = dict[str, Any]
OWN_FIELDS: Final = ("request_id", "app", "user", "wait_s")
"""Fields of a queued request that its own tenant may see."""
OF_OTHERS: Final = frozenset({"tenant", "backend", "pool"})
"""Fields of a request that its tenant knows already or need not know."""


class RecentService(NamedTuple):
    """The state of all pools, and the service that all tenants received lately, once for all clients that ask."""

    pools: Sequence[PoolSnapshot]
    window_s: float
    sums: Mapping[str, Sums]
    """Sums of all tenants, by pool."""


def own_document(
    principal: Principal, pools: Iterable[Pool], recently: RecentService, minutes: Iterable[OwnMinute],
    usage: Data | None, hours: list[Data] | None,
) -> Data:  # fmt: skip
    """Return the document. `minutes`: those of this tenant, the earliest first."""
    seen_pools, limits = {pool.pool: pool for pool in recently.pools}, dict[str, Data]()
    place, shown = list[Data](), list[Data]()
    for pool in pools:
        engine, now = pool.dispatcher.engine, pool.dispatcher.clock()
        place = _place(engine.requests.tree.terms, principal)
        if engine.quotas is not None:
            for model in ("", *filter(principal.may_ask, pool.models())):
                names = engine.quotas.names(principal.tenant, principal.counts_as, model, principal.user)
                for name, most, left, reset_s, _ in engine.quotas.standing(principal.tenant, now, names):
                    limits[name] = {"name": name, "limit": most, "remaining": left, "reset_s": round(reset_s, 1)}
        if pool.name in seen_pools:
            shown.append(_pool(seen_pools[pool.name], recently, engine, principal, now))
    return {
        "tenant": principal.tenant,
        "place": place,
        "limits": [*limits.values()],
        "recently_s": round(recently.window_s, 1),
        "pools": shown,
        "usage": usage,
        "hours": hours,
        "minutes": _minutes(minutes),
    }


def _place(tree: Tree, principal: Principal) -> list[Data]:
    """Return the settings of each level, from the outermost group to the tenant."""
    own = tree.tenants.get(principal.tenant)
    settings, group = (own.settings, own.group) if own is not None else (GroupSettings(), ROOT)
    places = [_shown(principal.tenant, settings) | {"weight": principal.weight}]
    while group:
        places.append(_shown(group, tree.groups[group].settings))
        group = tree.groups[group].group
    return places[::-1]


def _shown(name: str, settings: GroupSettings) -> Data:
    return {"name": name, **{term: value for term, value in asdict(settings).items() if value is not None}}


def _pool(
    seen: PoolSnapshot, recently: RecentService, engine: AdmissionEngine, principal: Principal, now: float
) -> Data:
    running = Counter(each.tenant for each in seen.running)
    service = recently.sums[seen.pool].get(principal.tenant, TenantSums())
    leaves = principal.tenant, of_batch(principal.tenant)
    own, batch = (_class_summary(engine, leaf, principal.weight, seen, running[leaf], now) for leaf in leaves)
    count = sum(one["queued_requests"] + one["running_requests"] for one in (own, batch))
    queued = (one for one in seen.requests if payer(one.tenant) == principal.tenant)
    requests = [{name: getattr(one, name) for name in OWN_FIELDS} for one in queued]
    return {
        "pool": seen.pool,
        "waits_for": OF_WAIT[Obstacle(seen.obstacle)] if seen.obstacle else "",
        "ceiling": seen.ceilings.get(principal.tenant, ""),
        "recently": {"service_received": round(service.received, 1), "service_due": round(service.due, 1)},
        "interactive": own,
        "batch": batch,
        "requests": requests,
        "requests_left_out": count - len(requests),
    }


def _minutes(minutes: Iterable[OwnMinute]) -> list[Data]:
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
            "reason_is": one.reason and describe_reason(one.reason),
            "slowest": {name: value for name, value in shown.items() if name not in OF_OTHERS},
        })  # fmt: skip
    return found


def _class_summary(
    engine: AdmissionEngine, leaf: str, weight: float, seen: PoolSnapshot, running: int, now: float
) -> Data:
    """Return the request counts, waits and share of one class (interactive or batch) of a tenant in one pool."""
    requests, waiting = engine.requests, seen.waiting.get(leaf)
    own = max(requests.waiting.of_tenant(leaf), key=lambda one: one.arrived_s, default=None)
    flow = own.flow if own is not None else Flow(leaf, DEFAULT_APP)
    wait_s: float | None = 0.0
    if engine.blocked is not None:
        expected = requests.expected(Request("", flow, weight, 1, 1, now), now, comes=True)
        wait_s = round(expected.wait_s, 1) if expected.is_learned else None
    found = {
        "queued_requests": waiting.requests if waiting is not None else 0,
        "running_requests": running,
        "oldest_wait_s": round(now - waiting.oldest_s, 3) if waiting is not None else 0.0,
        "expected_wait_s": wait_s,
        "expected_wait_range_s": None if wait_s is None else interval_s(wait_s),
    }
    # Batch gets what others leave, so it has no share.
    return found if is_batch(leaf) else found | {"share": round(requests.tree.share(leaf, weight), 4)}
