"""How does it stand just now? The queue, the tenants and the engines of each pool as plain data, units in the names.

Every list is bounded, and says how much it leaves out. Nothing here changes a decision.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from gateway.operator.snapshots.snapshot import GatewaySnapshot, PoolSnapshot
from gateway.operator.snapshots.spans import Taken, TenantSums, percentile, shares_due, sums
from gateway.telemetry.recent_requests import RecentRequests
from policies.admission.explanation import OF_OBSTACLE
from policies.capacity.obstacle import Obstacle

if TYPE_CHECKING:
    from gateway.config.model import TenantConfig

TENANTS_MAX: Final = 200
RUNNING_LISTED: Final = 8
"""Of an engine, the tenants with most requests there."""


def queue(snapshot: GatewaySnapshot, requests_max: int) -> dict[str, Any]:
    """Who waits, and for what?"""
    return {"pools": [_queue(pool, snapshot.at_s, requests_max) for pool in snapshot.pools]}


def _queue(pool: PoolSnapshot, now: float, requests_max: int) -> dict[str, Any]:
    by_tenant = sorted(pool.waiting.items(), key=lambda item: (-item[1].requests, item[0]))
    oldest = pool.requests[:requests_max]
    return {
        "pool": pool.pool,
        "policy": pool.policy,
        "queued_requests": pool.queued_requests,
        "queued_bytes": pool.queued_bytes,
        "dispatched_requests": pool.dispatched_requests,
        **_limit(pool),
        "next_request_id": pool.next_request_id,
        "expected_waits": pool.expected_waits,
        "tenants": [
            {"tenant": name, "queued_requests": one.requests, "oldest_wait_s": round(now - one.oldest_s, 3)}
            for name, one in by_tenant[:TENANTS_MAX]
        ],
        "tenants_left_out": max(0, len(by_tenant) - TENANTS_MAX),
        "gateways": pool.gateways,
        "requests": oldest,
        "requests_left_out": pool.queued_requests - len(oldest),
    }


def tenants(
    snapshot: GatewaySnapshot, recent: RecentRequests, configured: Sequence[TenantConfig] = ()
) -> Callable[[], dict[str, Any]]:
    """Who received how much of the engines within the last minute, who was due how much, and how long did they wait?

    `snapshot` with what runs. `configured`: tenants of the config; the ones that asked for nothing are named too, and
    come last. What runs is taken on the loop, since that costs little. The function that is returned sums all up, which
    takes milliseconds: call it beside the loop.
    """
    ends, window_s = recent.within(time.monotonic())
    now = snapshot.at_s
    pools = [(pool.policy, Taken(pool.pool, now, ends, pool.running, pool.waiting)) for pool in snapshot.pools]
    return lambda: {
        "window_s": round(window_s, 1),
        "pools": [_served(policy, taken, sums(taken, now - window_s, now), configured) for policy, taken in pools],
    }


def _served(
    policy: str, taken: Taken, asked: dict[str, TenantSums], configured: Sequence[TenantConfig]
) -> dict[str, Any]:
    total = sum(one.received for one in asked.values())
    weights = sum(one.weight for one in asked.values())
    shares = shares_due(asked)
    idle = {one.name: TenantSums(one.weight) for one in configured if one.name not in asked}
    busiest = sorted(asked.items(), key=lambda item: (-item[1].queued_requests, -item[1].received, item[0]))
    running: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for each in taken.running:
        running[each.backend][each.tenant] += 1
    return {
        "pool": taken.pool,
        "policy": policy,
        "tenants": [
            _tenant(name, one, total, shares.get(name, 0.0), one.weight / weights if name in asked else 0.0)
            for name, one in [*busiest, *idle.items()][:TENANTS_MAX]
        ],
        "tenants_left_out": max(0, len(asked) + len(idle) - TENANTS_MAX),
        "running_by_backend": {name: dict(counts.most_common(RUNNING_LISTED)) for name, counts in running.items()},
    }


def _tenant(name: str, one: TenantSums, total: float, share_due: float, by_weight: float) -> dict[str, Any]:
    waits_s = one.waits_s + one.refused_after_s
    return {
        "tenant": name,
        "weight": one.weight,
        "share_received": round(one.received / total, 4) if total else 0.0,
        "share_due": round(share_due, 4),
        "share_by_weight": round(by_weight, 4),
        "service_received": round(one.received, 1),
        "service_due": round(share_due * total, 1),
        "queued_requests": one.queued_requests,
        "running_requests": one.running_requests,
        "wait_p50_s": percentile(waits_s, 0.5),
        "wait_p95_s": percentile(waits_s, 0.95),
        "ended_requests": dict(one.outcomes),
        "refused_requests": dict(one.refused),
    }


def backends(snapshot: GatewaySnapshot) -> dict[str, Any]:
    """How full is each engine, and what keeps the next request in order from starting there?"""
    return {"pools": [{"pool": pool.pool, **_limit(pool), "backends": _backends(pool)} for pool in snapshot.pools]}


def _backends(pool: PoolSnapshot) -> list[dict[str, Any]]:
    return [{**one, "obstacle_is": OF_OBSTACLE[one["obstacle"]] if one["obstacle"] else ""} for one in pool.backends]


def _limit(pool: PoolSnapshot) -> dict[str, Any]:
    return {"limited_by": pool.obstacle, "limited_by_is": limited_by(pool)}


def limited_by(pool: PoolSnapshot) -> str:
    """One sentence: what limits the pool just now?"""
    queued = _queued(pool)
    if not pool.is_healthy:
        reasons = "; ".join(f"{one['backend']}: {one['reason']}" for one in pool.backends)
        return f"No engine is in service ({reasons or 'none is known'}); {queued}."
    if pool.obstacle is None:
        if pool.queued_requests:
            return f"{queued}: other gateways are asked about a limit."
        if pool.dispatched_requests:
            return (
                f"Nothing limits the pool: {_requests(pool.dispatched_requests)} running, and each starts as it comes."
            )
        return "Nothing limits the pool: no request waits or runs."
    in_service = [one for one in pool.backends if one["in_service"]]
    level = {
        Obstacle.SLOTS: f" ({sum(one['running_sequences'] for one in in_service)} sequences run,"
        f" {sum(one['slots'] for one in in_service)} slots)",
        Obstacle.KV: f" (expected at {max([one['kv_expected_ratio'] for one in in_service], default=0.0):.0%} of it)",
        Obstacle.PREFILL: f" ({sum(one['starting_prompt_tokens'] for one in in_service)} prompt tokens)",
    }.get(Obstacle(pool.obstacle), "")
    return f"{queued}: {OF_OBSTACLE[Obstacle(pool.obstacle)]}{level}."


def _queued(pool: PoolSnapshot) -> str:
    """62 requests in the queue, 48 of batch"""
    requests = _requests(pool.queued_requests)
    if not pool.waiting:
        return f"{requests} in the queue"
    name, most = max(pool.waiting.items(), key=lambda item: (item[1].requests, item[0]))
    if most.requests == pool.queued_requests:
        return f"{requests} of {name} in the queue"
    return f"{requests} in the queue, {most.requests} of {name}"


def _requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"
