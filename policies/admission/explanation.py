"""Why is a request where it is? Its last decision, or its wait, with the numbers that it rests on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from policies.admission.decisions import Decided, Decision, Reject
from policies.capacity.obstacle import Obstacle
from policies.request import Flow, Limit, Pressure, Refusal, Request

__all__ = ["Explanation", "explain_decided", "explain_queued"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why is a request where it is?

    Attributes:
        decided_s: when it was decided, by the engine's clock; None while it is queued for the first time.
        reason: one sentence.
        obstacle: what the head of the queue waits for, if the request waits.
        pressure: whether the pool was overloaded when it was decided; for one that waits: whether it is now.
        limits: where its caller stood when it was refused, and stands now with limits that always hold.
        numbers: what decides its flow's place, now: counters, weights, counts and limits by name.
        kv: by backend, the largest occupancy that what is dispatched is expected to reach (1.0 = full), now.
    """

    request_id: str
    state: Literal["queued", "dispatched", "rejected"]
    flow: Flow
    stage: int
    inside: bool
    decided_s: float | None
    decision: Decision | None
    reason: str
    obstacle: Obstacle | None
    pressure: Pressure
    limits: list[Limit] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    kv: dict[str, float] = field(default_factory=dict)


def explain_queued(
    request: Request,
    last: Decided | None,
    obstacle: Obstacle | None,
    pressure: Pressure,
    *,
    limits: list[Limit],
    numbers: dict[str, float],
    kv: dict[str, float],
) -> Explanation:
    """One that waits. `last`: its dispatch, if it came back."""
    return Explanation(
        request.id,
        "queued",
        request.flow,
        request.stage,
        request.inside,
        decided_s=last.now if last is not None else None,
        decision=last.decision if last is not None else None,
        reason=f"queued: {_OF_OBSTACLE[obstacle]}",
        obstacle=obstacle,
        pressure=pressure,
        limits=limits,
        numbers=numbers,
        kv=kv,
    )


def explain_decided(
    decided: Decided, *, limits: list[Limit], numbers: dict[str, float], kv: dict[str, float]
) -> Explanation:
    """One that was dispatched or refused."""
    decision = decided.decision
    limit = decision.limit if isinstance(decision, Reject) else None
    return Explanation(
        decision.id,
        "rejected" if isinstance(decision, Reject) else "dispatched",
        decided.flow,
        decided.stage,
        decided.inside,
        decided_s=decided.now,
        decision=decision,
        reason=_reason(decided),
        obstacle=None,
        pressure=decided.pressure,
        limits=limits if limit is None else [limit, *limits],
        numbers=numbers,
        kv=kv,
    )


_OF_OBSTACLE: dict[Obstacle | None, str] = {
    None: "it waits for its turn",
    "closed": "no backend is open for requests",
    "waiting": "the engine has more requests waiting than its target",
    "slots": "no sequence slot is free",
    "prefill": "the prompts of others are processed first",
    "kv": "the KV cache has no room for the next request in order",
    "spread": "starts are spread, so that those running do not all need their largest share of the KV cache at once",
}
_OF_REFUSAL = {
    Refusal.QUEUE_FULL: "the queue is full, and its tenant has at least its share of it",
    Refusal.QUEUE_TIMEOUT: "it waited for as long as a request may",
    Refusal.NO_BACKEND: "no backend is in service",
    Refusal.BACKEND_FAILED: "no backend could be reached, as often as may be tried",
    Refusal.RATE_LIMITED: "its tenant is beyond a limit that always holds",
    Refusal.OVER_USER_LIMIT: "under overload, at the start of an interaction, its user was beyond a limit",
    Refusal.OVER_APP_LIMIT: "under overload, at the start of an interaction, its app was beyond a limit",
}


def _reason(decided: Decided) -> str:
    decision = decided.decision
    if not isinstance(decision, Reject):
        how = f"after {decided.waited_s:.3f} s in the queue" if decided.waited_s > 0 else "at once"
        return f"dispatched to {decision.backend} {how}"
    said = f"refused: {_OF_REFUSAL[decision.reason]}"
    if decision.limit is not None:
        said += f" ({decision.limit.name} {decision.limit.limit}, {decision.limit.remaining} left)"
    return f"{said}; {decided.pressure.reason}" if decided.pressure.reason else said
