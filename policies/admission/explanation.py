"""Why does a request wait, or why was it dispatched or rejected? The reason in words, with the numbers behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from policies.admission.decisions import DecisionRecord, Reject
from policies.capacity.obstacle import Blocked, Obstacle
from policies.request import Flow, Limit, PlacementReason, Pressure, RejectReason, Request, State, Wait


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of the state of one request.

    Attributes:
        last: latest decision; None while the request is queued for the first time.
        blocked: for a waiting request, the next request in order and its obstacle at each engine.
        reason: one sentence.
        waited_s: seconds of the wait by obstacle, so far or in all.
        expected_s: expected wait at its beginning in seconds; None if none was estimated.
        pressure: overload of the pool now for a waiting request, else as recorded with the decision.
        limits: the exceeded limit of a rejected request, then the present rest of the limits that always hold.
        numbers: the numbers that decide the flow's place, by name: counters, weights, counts and limits.
        kv: by engine, the largest occupancy that the dispatched requests are expected to reach (1.0 = full).
    """

    request_id: str
    state: Literal["queued", "dispatched", "rejected"]
    flow: Flow
    stage: int
    inside: bool
    last: DecisionRecord | None
    blocked: Blocked | None
    reason: str
    waited_s: Mapping[str, float]
    expected_s: float | None
    pressure: Pressure
    limits: list[Limit]
    numbers: dict[str, float]
    kv: dict[str, float]


OF_OBSTACLE: Final = {
    Obstacle.CLOSED: "no backend is open for requests",
    Obstacle.WAITING: "the engine has more requests waiting than its target",
    Obstacle.SLOTS: "no sequence slot is free",
    Obstacle.PREFILL: "the prompts of others are processed first",
    Obstacle.KV: "the KV cache has no room for the next request in order",
    Obstacle.SPREAD: (
        "starts are spread, so that those running do not all need their largest share of the KV cache at once"
    ),
    Obstacle.CEILING: "its tenant or group has as much running as it may",
    Obstacle.WORKING_SET: "interactions under way fill the KV cache, and it would begin another one",
    Obstacle.PREFILL_PART: "its tenant has begun more prefill than its part, and answers of other tenants run",
    Obstacle.TURN: "a request of another gateway goes first, or the room is kept for interactive work",
    Obstacle.ASKED: "other gateways are asked about a limit that all of them count, or about its interaction",
    Obstacle.RETURNED: "an engine had it, and gave it back until later, or was not reached",
}
OF_WAIT: Final = {
    Obstacle.CLOSED: "for an engine in service",
    Obstacle.WAITING: "for the engine's own queue to shorten",
    Obstacle.SLOTS: "for a sequence slot",
    Obstacle.PREFILL: "for the prompts of others to be processed",
    Obstacle.KV: "for KV",
    Obstacle.SPREAD: "since starts are spread",
    Obstacle.CEILING: "for requests of its own tenant or group to end",
    Obstacle.WORKING_SET: "for the contexts of interactions under way",
    Obstacle.PREFILL_PART: "for its tenant's part of the prefill",
    Obstacle.TURN: "for its turn",
    Obstacle.ASKED: "for the answer of other gateways",
    Obstacle.RETURNED: "at an engine that gave it back or was not reached",
}
"""Words for a part of a wait, after its seconds."""
SHOWN_S_MIN: Final = 0.001
"""Shortest part of a wait that is mentioned."""
AHEAD_SHOWN: Final = 3
"""Tenants that are named; the others are summed up."""
OF_PLACED: Final = {
    PlacementReason.ONLY: "no other engine had room",
    PlacementReason.CACHED: "no engine has more of its prompt cached, and it is done soonest there",
    PlacementReason.SPREAD: "another engine has more of its prompt cached, but it is done sooner there",
    PlacementReason.RENDEZVOUS: "no engine has its prompt cached, and prompts that begin like this one go there",
    PlacementReason.LEAST_LOADED: "it ran least for its size",
    PlacementReason.PASSED: "it went before the next in order, because of what the engines have cached",
    PlacementReason.ASSIGNED: "it was assigned there when it came",
    PlacementReason.TAKEN: "that engine ran nothing, and took it from the queue of another",
}
OF_REFUSAL: Final = {
    RejectReason.QUEUE_FULL: "the queue is full, and its tenant has at least its fair share of it",
    RejectReason.QUEUE_TIMEOUT: "it waited for as long as a request may",
    RejectReason.NO_BACKEND: "no backend is in service, or none could be reached",
    RejectReason.BACKEND_FAILED: "a backend had it and went away, and no other one can take it",
    RejectReason.SERVER_BUSY: "the backends refuse it, and take others",
    RejectReason.WORKING_SET: "interactions under way fill the KV cache, and a start would have to wait for too long",
    RejectReason.RATE_LIMITED: "its tenant is beyond a limit that always holds",
    RejectReason.OVER_USER_LIMIT: "under overload, at the start of an interaction, its user was beyond a limit",
    RejectReason.OVER_APP_LIMIT: "under overload, at the start of an interaction, its app was beyond a limit",
    RejectReason.INTERNAL_ERROR: "the gateway failed on it, and its log has the fault",
    RejectReason.WAIT_TOO_LONG: "it would have waited for longer than its client is willing to",
}


def queued_in_words(request: Request, blocked: Blocked | None, ceiling: str) -> str:
    """Return why a waiting request waits.

    `blocked`: next request in order, and its obstacle at each engine. `ceiling`: sentence on the full group or tenant
    that keeps the request from starting; "" if there is none.
    """
    why = None if blocked is None else blocked.nearest()
    if request.progress.rests or request.progress.state is not State.QUEUED:
        why = Obstacle.RETURNED if request.progress.rests else Obstacle.ASKED
    return f"queued: {ceiling or ('it waits for its turn' if why is None else OF_OBSTACLE[why])}"


def expected_s(wait: Wait | None) -> float | None:
    return None if wait is None or wait.expected is None else round(wait.expected.wait_s, 3)


def dispatched_in_words(backend: str, placed: str | None, *, at_once: bool) -> str:
    why = next((f": {text}" for one, text in OF_PLACED.items() if one == placed), "")
    return f"dispatched to {backend}{' at once' if at_once else ''}{why}"


def join_sentence(request_id: str, tenant: str, *parts: str) -> str:
    """Join the parts of an explanation to a sentence, such as:

    req_1 of chat was dispatched to gpu-1: no other engine had room; it waited 2.05 s behind 48 requests of batch.
    """
    verb = "is" if parts[0].startswith("queued") else "was"
    whose = f" of {tenant}" if tenant else ""
    return f"{request_id}{whose} {verb} {'; it '.join(part for part in parts if part)}."


def decided_in_words(decided: DecisionRecord) -> str:
    decision = decided.decision
    if not isinstance(decision, Reject):
        return dispatched_in_words(decision.backend, decided.placed, at_once=decided.wait is None)
    said = f"refused: {OF_REFUSAL[decision.reason]}"
    if decision.ceiling:
        said += f" ({decision.ceiling})"
    if decision.limit is not None:
        said += f" ({decision.limit.name} {decision.limit.limit}, {decision.limit.remaining} left)"
    return f"{said}; {decided.pressure.reason}" if decided.pressure.reason else said


def waited_in_words(by: Mapping[str, float], ahead: Mapping[str, int], own: str) -> str:
    """Return a wait in words; "" if there was none. Example:

    waited 2.05 s behind 48 requests of batch, 14 of its own tenant: 1.9 s for its turn, 0.15 s for KV

    `by`: seconds by obstacle. `ahead`: by tenant, the requests that an engine had during the wait of a request of the
    tenant `own`.
    """
    if not by:
        return ""
    most_first = [item for item in sorted(by.items(), key=lambda item: -item[1]) if item[1] >= SHOWN_S_MIN]
    said = [f"{in_seconds(seconds)} {OF_WAIT[Obstacle(obstacle)]}" for obstacle, seconds in most_first]
    return f"waited {in_seconds(sum(by.values()))}{_behind(ahead, own)}{': ' if said else ''}{', '.join(said)}"


def _behind(ahead: Mapping[str, int], own: str) -> str:
    """Return a phrase on the requests ahead, by tenant, the tenants with most first."""
    most_first = sorted(ahead.items(), key=lambda item: (-item[1], item[0]))
    said: list[str] = []
    for name, count in most_first[:AHEAD_SHOWN]:
        noun = "" if said else " request" if count == 1 else " requests"
        said.append(f"{count}{noun} of {'its own tenant' if name == own else name}")
    if others := most_first[AHEAD_SHOWN:]:
        said.append(f"{sum([count for _, count in others])} of {len(others)} more")
    return f" behind {', '.join(said)}" if said else ""


def in_seconds(seconds: float) -> str:
    digits = f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.3f}"
    return f"{digits.rstrip('0').rstrip('.')} s"
