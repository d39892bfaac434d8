"""What is the current state? One document of all pools, which the page, `top` and metrics show; units in the names.

Every list is bounded, and says how much it leaves out. Nothing here changes a decision.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from gateway.operator.snapshots.recent_sums import Sums, TenantSums, sums_of_pools
from gateway.operator.snapshots.snapshot import GatewaySnapshot, PoolSnapshot
from gateway.telemetry.ends import EndedRequest
from gateway.telemetry.recent_requests import RecentRequests
from policies.admission.explanation import OF_OBSTACLE, OF_REFUSAL, OF_WAIT, waited_in_words
from policies.capacity.obstacle import Obstacle
from policies.request import RejectReason
from simulation.statistics import percentile

if TYPE_CHECKING:
    from gateway.config.model import Config

TENANTS_MAX: Final = 200
RUNNING_LISTED: Final = 8
"""Limit on the tenants listed for an engine: those with most requests there."""
ENDS_LISTED: Final = 60
OF_POOL: Final = (
    "pool", "policy", "models", "queued_requests", "dispatched_requests", "next_request_id", "gateways", "requests",
)  # fmt: skip
"""Fields that the document takes from a pool's snapshot as they are."""
OF_END: Final = (
    "request_id", "pool", "tenant", "app", "model", "reason", "backend", "prompt_tokens", "output_tokens",
)  # fmt: skip


def state(snapshot: GatewaySnapshot, recent: RecentRequests, config: Config) -> Callable[[], dict[str, Any]]:
    """Return a function that makes the document. Call it in a thread: it sums up a minute, which takes milliseconds.

    `config`: names the groups, and the tenants that asked for nothing.
    """
    epoch_s = time.time() - time.monotonic()
    sums, window_s = sums_of_pools(snapshot, recent)
    ended = [ended_request(end, epoch_s) for end in recent.latest(ENDS_LISTED)]

    def document() -> dict[str, Any]:
        found = sums()
        return {
            "at_s": round(time.time(), 1),
            "window_s": round(window_s, 1),
            "not_ready": snapshot.not_ready,
            "state": snapshot.state,
            "pools": [_pool(pool, found[pool.pool], snapshot.at_s, config) for pool in snapshot.pools],
            "ended": ended,
        }

    return document


def _pool(pool: PoolSnapshot, asked: Sums, now: float, config: Config) -> dict[str, Any]:
    total = sum(one.received for one in asked.values())
    configured = {one.name: one for one in config.tenants}
    busiest = sorted(asked.items(), key=lambda item: (-item[1].queued_requests, -item[1].received, item[0]))
    listed = busiest + [(name, TenantSums(one.weight)) for name, one in configured.items() if name not in asked]
    running: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for each in pool.running:
        running[each.backend][each.tenant] += 1
    tenants = []
    for name, one in listed[:TENANTS_MAX]:
        own = configured.get(name)
        # Where groups divide the pool, the weight of a request says what its tenant's part is just now.
        weight = own.weight if own is not None else None if config.groups else one.weight
        known = {"tenant": name, "group": own and own.group, "weight": weight, "is_active": name in asked}
        known["ceiling"] = pool.ceilings.get(name, "")
        tenants.append({**known, **_tenant(one, total, now)})
    return {
        **{name: getattr(pool, name) for name in OF_POOL},
        "limited_by": pool.obstacle,
        "limited_by_is": limited_by(pool),
        "waits_for": OF_WAIT[Obstacle(pool.obstacle)] if pool.obstacle else "",
        "requests_left_out": pool.queued_requests - len(pool.requests),
        "groups": [*_groups(config, asked, total)],
        "tenants": tenants,
        "tenants_left_out": max(0, len(listed) - TENANTS_MAX),
        "refusals": _refusals(asked),
        "backends": [
            {
                **one,
                "obstacle_is": OF_OBSTACLE[one["obstacle"]] if one["obstacle"] else "",
                "running_by_tenant": dict(running[one["backend"]].most_common(RUNNING_LISTED)),
            }
            for one in pool.backends
        ],
    }


def _tenant(one: TenantSums, total: float, now: float) -> dict[str, Any]:
    return {
        "share_received": _share(one.received, total),
        "share_due": _share(one.due, total),
        "service_received": round(one.received, 1),
        "service_due": round(one.due, 1),
        "queued_requests": one.queued_requests,
        "oldest_wait_s": round(max(0.0, now - one.oldest_s), 3),
        "running_requests": one.running_requests,
        "wait_p50_s": _percentile_s(one.waits_s, 0.5),
        "wait_p95_s": _percentile_s(one.waits_s, 0.95),
        "first_token_p95_s": _percentile_s(one.first_tokens_s, 0.95),
        "ended_requests": dict(one.outcomes),
        "refused_requests": dict(one.refused),
    }


def _share(service: float, total: float) -> float:
    return round(service / total, 4) if total else 0.0


def _percentile_s(values_s: Sequence[float], share: float) -> float | None:
    """Return the percentile, rounded to milliseconds; None if there are no values."""
    return round(percentile(values_s, share), 3) if values_s else None


def _groups(config: Config, asked: Sums, total: float) -> Iterator[dict[str, Any]]:
    """Yield the sums and the settings of each group."""
    inside, around = defaultdict[str, list[TenantSums]](list), config.around
    for name, one in asked.items():
        for group in around.get(name, ()):
            inside[group].append(one)
    for each in config.groups:
        members = inside[each.name]
        yield {
            **each.model_dump(exclude={"name", "group", "quota"}),
            "group": each.name,
            "in": each.group,
            "share_received": _share(sum(one.received for one in members), total),
            "share_due": _share(sum(one.due for one in members), total),
            "queued_requests": sum(one.queued_requests for one in members),
            "running_requests": sum(one.running_requests for one in members),
        }


def _refusals(asked: Sums) -> list[dict[str, Any]]:
    """List the refusals by reason, the most frequent first, each with the tenant that it hit most."""
    by: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, one in asked.items():
        for reason, count in one.refused.items():
            by[reason][name] += count
    return [
        {
            "reason": reason,
            "reason_is": describe_reason(reason),
            "requests": counts.total(),
            "most": counts.most_common(1)[0][0],
        }
        for reason, counts in sorted(by.items(), key=lambda item: -item[1].total())
    ]


def describe_reason(reason: str) -> str:
    return OF_REFUSAL[RejectReason(reason)] if reason in OF_REFUSAL else reason.replace("_", " ")


def ended_request(end: EndedRequest, epoch_s: float) -> dict[str, Any]:
    """Describe one ended request."""
    return {
        **{name: getattr(end, name) for name in OF_END},
        "state": end.outcome,
        "reason_is": describe_reason(end.reason),
        "arrived_at_s": round(epoch_s + end.dispatched_s - end.queue_s, 2),
        "wait_s": round(end.queue_s, 4),
        "waited": waited_in_words(end.waited_s, {}, ""),
        "first_token_s": None if end.first_token_s is None else round(end.first_token_s, 4),
        "total_s": round(end.ended_s - end.dispatched_s + end.queue_s, 4),
    }


def limited_by(pool: PoolSnapshot) -> str:
    """Say in one sentence what limits the pool now."""
    queued = _queue_in_words(pool)
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
    ceiling = next(iter(pool.ceilings.values()), "") if pool.obstacle is Obstacle.CEILING else ""
    return f"{queued}: {ceiling or OF_OBSTACLE[Obstacle(pool.obstacle)]}{level}."


def _queue_in_words(pool: PoolSnapshot) -> str:
    """Return words such as "62 requests in the queue, 48 of batch"."""
    requests = _requests(pool.queued_requests)
    if not pool.waiting:
        return f"{requests} in the queue"
    name, most = max(pool.waiting.items(), key=lambda item: (item[1].requests, item[0]))
    if most.requests == pool.queued_requests:
        return f"{requests} of {name} in the queue"
    return f"{requests} in the queue, {most.requests} of {name}"


def _requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"
