"""Why is a request where it is? The engine's explanation as plain data for an operator: numbers, and no content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from gateway.telemetry.access_log import hidden
from gateway.telemetry.recent_requests import RecentRequests
from policies.admission.decisions import Reject
from policies.admission.explanation import Explanation, in_seconds, join_sentence, waited_in_words

if TYPE_CHECKING:
    from gateway.pool.pool import Pool

OTHERS_MAX: Final = 10


def explain(pools: Sequence[Pool], recent: RecentRequests, request_id: str) -> dict[str, Any] | None:
    """Return the explanation as plain data; None if no pool knows the request, or if it has been forgotten.

    `request_id`: the gateway's id, or the client's own. If a client gave one id to several requests, the latest is
    explained.
    """
    found = _explain(pools, recent, request_id)
    if found is not None:
        return found
    for pool in pools:
        ids = _ids_of_client(pool, request_id)
        found = _explain((pool,), recent, ids[0]) if ids else None
        if found is not None:
            return {**found, "client_request_id": request_id, "others_of_this_id": ids[1 : 1 + OTHERS_MAX]}
    return None


def _explain(pools: Sequence[Pool], recent: RecentRequests, request_id: str) -> dict[str, Any] | None:
    """Return the explanation of a request that waits or is among the last decisions; None if no pool knows it."""
    for pool in pools:
        dispatcher = pool.dispatcher
        now = dispatcher.clock()
        found = dispatcher.engine.explain(request_id, now)
        if found is not None:
            ahead = _ahead(pool, recent, found, now)
            known = {"request_id": request_id, "pool": pool.name, "policy": pool.policy_name}
            return known | _plain(found, ahead, now)
    return None


def _ahead(pool: Pool, recent: RecentRequests, found: Explanation, now: float) -> dict[str, int]:
    """Count, by tenant, the remembered requests that an engine had while this request waited; the largest count first.

    Admission records nothing for this count: the leases and the latest ends are searched when an operator asks.
    """
    until_s = now if found.state == "queued" or found.last is None else found.last.now
    since_s = until_s - sum(found.waited_s.values())
    if not found.waited_s:
        return {}
    leases = pool.dispatcher.engine.requests.leases.values()
    counts = Counter(lease.request.flow.tenant for lease in leases if lease.dispatched_s < until_s)
    for end in recent.ended_since(since_s):
        if end.pool == pool.name and end.backend and end.dispatched_s < until_s:
            counts[end.tenant] += 1
    return dict(counts.most_common())


def _ids_of_client(pool: Pool, client_id: str) -> list[str]:
    """Return our ids of the requests to which a client gave this id: in progress or decided, the latest first."""
    if not client_id:
        return []
    waiting = [each.request for each in pool.dispatcher.exchanges() if each.request.client_id == client_id]
    decided = pool.dispatcher.engine.recent.of_client(client_id)
    return list(dict.fromkeys([*(request.id for request in reversed(waiting)), *decided]))


def _plain(found: Explanation, ahead: dict[str, int], now: float) -> dict[str, Any]:
    flow = found.flow
    waited, told = waited_in_words(found.waited_s, ahead, flow.tenant), found.expected_s
    return {
        "sentence": join_sentence(
            found.request_id, flow.tenant, found.reason, waited, f"was told {in_seconds(told)}" if told else ""
        ),
        "state": found.state,
        "reason": found.reason,
        "waited": waited,
        "ahead": ahead,
        "expected_wait_s": told,
        "waited_s": {str(obstacle): round(seconds, 6) for obstacle, seconds in found.waited_s.items()},
        "decision": _decision(found),
        "decided_s_ago": None if found.last is None else round(now - found.last.now, 3),
        "flow": {"tenant": flow.tenant, "app": flow.app, "user": hidden(flow.user)},
        "stage": found.stage,
        "inside_an_interaction": found.inside,
        "waits_for": None if found.blocked is None else found.blocked.nearest(),
        "pressure": found.pressure._asdict(),
        "limits": [limit._asdict() for limit in found.limits],
        "numbers": found.numbers,
        "kv_expected": found.kv,
    }


def _decision(found: Explanation) -> dict[str, Any] | None:
    if found.last is None:
        return None
    decision = found.last.decision
    if not isinstance(decision, Reject):
        return {
            "dispatched_to": decision.backend,
            "placed": found.last.placed,
            "tokens_cached_expected": found.last.cached_tokens,
        }
    return {"refused": decision.reason.value, "retry_after_s": round(decision.retry_after_s, 3)}
