"""Why is a request where it is? The engine's explanation as an operator reads it: numbers, and no content."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gateway.telemetry.access_log import hidden
from policies.admission.decisions import Reject
from policies.admission.explanation import Explanation

if TYPE_CHECKING:
    from gateway.pool.pool import Pool

__all__ = ["explain"]


def explain(pools: Iterable[Pool], request_id: str) -> dict[str, Any] | None:
    """The explanation as plain data; None if no pool knows the request, or knows it no longer."""
    for pool in pools:
        dispatcher = pool.dispatcher
        now = dispatcher.clock()
        found = dispatcher.engine.explain(request_id, now)
        if found is not None:
            return {"request_id": request_id, "pool": pool.name, "policy": pool.policy_name, **_plain(found, now)}
    return None


def _plain(found: Explanation, now: float) -> dict[str, Any]:
    flow = found.flow
    return {
        "state": found.state,
        "reason": found.reason,
        "decision": _decision(found),
        "decided_s_ago": None if found.decided_s is None else round(now - found.decided_s, 3),
        "flow": {"tenant": flow.tenant, "app": flow.app, "user": hidden(flow.user)},
        "stage": found.stage,
        "inside_an_interaction": found.inside,
        "waits_for": found.obstacle,
        "pressure": found.pressure._asdict(),
        "limits": [limit._asdict() for limit in found.limits],
        "numbers": found.numbers,
        "kv_expected": found.kv,
    }


def _decision(found: Explanation) -> dict[str, Any] | None:
    decision = found.decision
    if decision is None:
        return None
    if not isinstance(decision, Reject):
        return {
            "dispatched_to": decision.backend,
            "placed": found.placed,
            "tokens_cached_expected": found.cached_tokens,
        }
    return {"refused": decision.reason.value, "retry_after_s": round(decision.retry_after_s, 3)}
