"""How does it stand just now? The queue, the tenants and the engines of each pool as plain data, units in the names.

Every list is bounded, and says how much it leaves out. Nothing here changes a decision.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Final

from gateway.operator.shares import due
from gateway.operator.spans import Usual, part_within, percentile, running
from gateway.pool.pool import Pool
from gateway.telemetry.access_log import hidden
from gateway.telemetry.lately import End, Lately
from gateway.telemetry.record import Outcome
from policies.admission.explanation import OF_OBSTACLE
from policies.capacity.obstacle import Blocked, Obstacle
from policies.request import Request, State

__all__ = ["REQUESTS_MAX", "backends", "limited_by", "queue", "tenants"]

REQUESTS_MAX: Final = 100
TENANTS_MAX: Final = 200


def queue(pools: Iterable[Pool], requests_max: int) -> dict[str, Any]:
    """Who waits, and for what?"""
    return {"pools": [_queue(pool, requests_max) for pool in pools]}


def _queue(pool: Pool, requests_max: int) -> dict[str, Any]:
    dispatcher = pool.dispatcher
    engine, now = dispatcher.engine, dispatcher.clock()
    waiting = engine.books.waiting
    by_tenant = sorted(waiting.by_tenant().items(), key=lambda item: (-item[1].requests, item[0]))
    oldest = [_waiting(request, now) for request in islice(waiting.requests.values(), requests_max)]
    return {
        "pool": pool.name,
        "policy": pool.policy_name,
        "queued_requests": engine.queued,
        "queued_bytes": engine.queued_bytes,
        "dispatched_requests": engine.dispatched,
        **_limit(pool),
        "next_request_id": engine.blocked.request.id if engine.blocked is not None else None,
        "tenants": [
            {"tenant": name, "queued_requests": one.requests, "oldest_wait_s": _seconds(now - one.oldest_s)}
            for name, one in by_tenant[:TENANTS_MAX]
        ],
        "tenants_left_out": max(0, len(by_tenant) - TENANTS_MAX),
        "requests": oldest,
        "requests_left_out": engine.queued - len(oldest),
    }


def _waiting(request: Request, now: float) -> dict[str, Any]:
    flow, progress = request.flow, request.progress
    return {
        "request_id": request.id,
        "client_request_id": request.client_id,
        "tenant": flow.tenant,
        "app": flow.app,
        "user": hidden(flow.user),
        "wait_s": _seconds(now - request.arrived_s),
        "expires_in_s": _seconds(progress.deadline_s - now),
        "inside_an_interaction": progress.inside,
        "asks_other_gateways": progress.state is not State.QUEUED,
        "prompt_tokens_estimated": request.prompt_tokens,
    }


class _Tenant:
    """What is known of one tenant in one pool, within the window."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.queued_requests = 0
        self.running_requests = 0
        self.received = 0.0
        self.waiting = 0.0
        """Service of the requests that wait, as far as can be told."""
        self.waits_s: list[float] = []
        self.outcomes: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()


class _Taken:
    """The requests of one pool as they are now: taken on the loop, since that costs little, and summed up beside it."""

    def __init__(self, pool: Pool, ends: Sequence[End], window_s: float) -> None:
        engine = pool.dispatcher.engine
        self.pool = pool.name
        self.policy = pool.policy_name
        self.ends = ends
        self.now = pool.dispatcher.clock()
        self.since_s = self.now - window_s
        self.waiting = engine.books.waiting.by_tenant()
        self.running = running(engine)

    def answer(self) -> dict[str, Any]:
        found = self._sums()
        total = sum(one.received for one in found.values())
        shares = due({name: (one.received, one.weight, one.waiting) for name, one in found.items()})
        shown = sorted(found.items(), key=lambda item: (-item[1].queued_requests, -item[1].received, item[0]))
        return {
            "pool": self.pool,
            "policy": self.policy,
            "tenants": [_tenant(name, one, total, shares[name]) for name, one in shown[:TENANTS_MAX]],
            "tenants_left_out": max(0, len(shown) - TENANTS_MAX),
        }

    def _sums(self) -> dict[str, _Tenant]:
        found: defaultdict[str, _Tenant] = defaultdict(_Tenant)
        usual = Usual()
        for end in reversed(self.ends):
            if end.pool != self.pool:
                continue
            one = found[end.tenant]
            one.weight = end.weight
            one.received += end.service * part_within(self.since_s, self.now, end.dispatched_s, end.ended_s)
            usual.note(end.tenant, end.service)
            one.waits_s.append(end.queue_s)
            one.outcomes[end.outcome] += 1
            if end.outcome == Outcome.REFUSED:
                one.refused[end.reason] += 1
        for each in self.running:
            one = found[each.tenant]
            one.weight = each.weight
            one.running_requests += 1
            one.received += each.service * part_within(self.since_s, self.now, each.dispatched_s, self.now)
        for name, waiting in self.waiting.items():
            one = found[name]
            one.weight, one.queued_requests = waiting.weight, waiting.requests
            one.waiting = usual.of(name, waiting.requests)
        return found


def tenants(pools: Iterable[Pool], lately: Lately) -> Callable[[], dict[str, Any]]:
    """Who received how much of the engines within the last minute, who was due how much, and how long did they wait?

    Taken now. What is returned sums it up, which takes milliseconds: call it beside the loop.
    """
    ends, window_s = lately.within(time.monotonic())
    taken = [_Taken(pool, ends, window_s) for pool in pools]
    return lambda: {"window_s": round(window_s, 1), "pools": [one.answer() for one in taken]}


def _tenant(name: str, one: _Tenant, total: float, share_due: float) -> dict[str, Any]:
    waits_s = sorted(one.waits_s)
    return {
        "tenant": name,
        "weight": one.weight,
        "share_received": round(one.received / total, 4) if total else 0.0,
        "share_due": round(share_due, 4),
        "service_received": round(one.received, 1),
        "service_due": round(share_due * total, 1),
        "queued_requests": one.queued_requests,
        "running_requests": one.running_requests,
        "wait_p50_s": percentile(waits_s, 0.5),
        "wait_p95_s": percentile(waits_s, 0.95),
        "ended_requests": dict(one.outcomes),
        "refused_requests": dict(one.refused),
    }


def backends(pools: Iterable[Pool]) -> dict[str, Any]:
    """How full is each engine, and what keeps the next request in order from starting there?"""
    return {"pools": [{"pool": pool.name, **_limit(pool), "backends": _backends(pool)} for pool in pools]}


def _backends(pool: Pool) -> list[dict[str, Any]]:
    engine, now = pool.dispatcher.engine, pool.dispatcher.clock()
    obstacles = _obstacles(engine.blocked if engine.queued else None)
    answer = []
    for name, ledger in engine.backends.items():
        backend = pool.backends.get(name)
        kv_ratio, known_by = ledger.occupancy(None, None, now)
        obstacle = obstacles.get(name)
        answer.append(
            {
                "backend": name,
                "url": backend.url if backend is not None else "",
                "in_service": ledger.healthy,
                "reason": backend.why_not if backend is not None and not ledger.healthy else "",
                "running_sequences": ledger.sequences,
                "slots": ledger.slots.count,
                "starting_requests": len(ledger.starting),
                "starting_prompt_tokens": ledger.prefill_tokens,
                "kv_ratio": round(kv_ratio, 4),
                "kv_ratio_is": known_by.removeprefix("KV cache, ").strip(","),
                "kv_expected_ratio": round(ledger.kv_fraction(), 4),
                "kv_capacity_tokens": ledger.kv.capacity_tokens,
                "obstacle": obstacle,
                "obstacle_is": OF_OBSTACLE[obstacle] if obstacle is not None else "",
            }
        )
    return answer


def _obstacles(blocked: Blocked | None) -> dict[str, Obstacle]:
    """By engine. Where each engine has a queue of its own, each next one waits for its own engine."""
    if blocked is None:
        return {}
    found = dict(blocked.obstacles)
    for other in blocked.others:
        found.update(other.obstacles)
    return found


def _limit(pool: Pool) -> dict[str, Any]:
    engine = pool.dispatcher.engine
    obstacle = engine.blocked.nearest() if engine.queued and engine.blocked is not None else None
    return {"limited_by": obstacle, "limited_by_is": limited_by(pool, obstacle)}


def limited_by(pool: Pool, obstacle: Obstacle | None) -> str:
    """One sentence: what limits the pool just now?"""
    engine = pool.dispatcher.engine
    if not pool.is_healthy():
        reasons = "; ".join(f"{backend.name}: {backend.why_not}" for backend in pool.backends.values())
        return f"No engine is in service ({reasons}); {_requests(engine.queued)} in the queue."
    if obstacle is None:
        if engine.queued:
            return f"{_requests(engine.queued)} in the queue: other gateways are asked about a limit."
        if engine.dispatched:
            return f"Nothing limits the pool: {_requests(engine.dispatched)} running, and each starts as it comes."
        return "Nothing limits the pool: no request waits or runs."
    in_service = [ledger for ledger in engine.backends.values() if ledger.healthy]
    level = {
        Obstacle.SLOTS: f" ({sum(one.sequences for one in in_service)} sequences run,"
        f" {sum(one.slots.count for one in in_service)} slots)",
        Obstacle.KV: f" (expected at {max([one.kv_fraction() for one in in_service], default=0.0):.0%} of it)",
        Obstacle.PREFILL: f" ({sum(one.prefill_tokens for one in in_service)} prompt tokens)",
    }.get(obstacle, "")
    return f"{_requests(engine.queued)} in the queue: {OF_OBSTACLE[obstacle]}{level}."


def _requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"


def _seconds(seconds: float) -> float:
    return round(seconds, 3)
