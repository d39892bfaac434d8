"""Requests, rooms and small queues for the tests of policies."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import count
from types import FrameType
from typing import Any

from policies.admission.decisions import Decision, Dispatch, Reject
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.admission.policy import Policy
from policies.capacity.gauges import CapacitySettings
from policies.capacity.ledger import BackendLedger
from policies.capacity.obstacle import Blocked, Obstacle
from policies.capacity.pace import Pace
from policies.orders.policy_entries import POLICIES
from policies.placements.placement_entries import PLACEMENTS
from policies.placements.prefix_index import PrefixIndex
from policies.queue.bounds import QueueLimits
from policies.queue.expected_wait import WaitEstimate
from policies.request import NO_CLAIM, Claim, Flow, Progress, RejectReason, Request

LIMITS = QueueLimits(
    queue_requests_max=8, queue_bytes_max=400, queue_wait_s_max=2.0, attempts_max=3, queue_wait_s_max_inside=4.0
)
"""A few requests fill it."""

_serial = count()


def make_request(
    tenant: str = "a",
    *,
    id: str | None = None,
    app: str = "",
    user: str = "",
    weight: float = 1.0,
    prompt: int = 10,
    output_max: int = 100,
    arrived_s: float = 0.0,
    body_bytes: int = 0,
    sequences: int = 1,
    streamed: bool = True,
    expected: float = 0.0,
    reserved: int = 0,
    claim: Claim = NO_CLAIM,
    system: int = 0,
    prefix: tuple[int, ...] = (),
    adapter: str = "",
    quota_names: tuple[str, ...] = (),
    engine: str = "",
) -> Request:
    progress = Progress()
    progress.output_tokens_expected, progress.output_tokens_reserved = expected, reserved
    return Request(
        id if id is not None else f"{tenant}-{next(_serial)}",
        Flow(tenant, app, user),
        weight,
        prompt,
        output_max,
        arrived_s,
        sequences=sequences,
        body_bytes=body_bytes,
        streamed=streamed,
        claim=claim,
        system_tokens=system,
        prefix=prefix,
        adapter=adapter,
        progress=progress,
        engine=engine,
        quota_names=quota_names,
    )


def policy_with(name: str, *, flows_max: int = 100_000, prefixes: PrefixIndex | None = None, **settings: Any) -> Policy:
    """The policy of this name with those of the settings that it has."""
    entry = POLICIES[name]
    of_placement = PLACEMENTS[entry.placement].params if entry.placement is not None else None
    structs = [struct for struct in (entry.params, of_placement) if struct is not None]
    known = {field.name for struct in structs for field in fields(struct)}
    settings = {one: value for one, value in settings.items() if one in known}
    return named_policy(name, flows_max=flows_max, prefixes=prefixes, **settings)


def pool_of(
    *engines: str, policy: str | Policy = "vtc", slots: int | None = 2, healthy: bool = True, **parts: Any
) -> AdmissionEngine:
    """A pool before these engines, each with as many slots. `parts`: of the admission engine, such as its limits."""
    pool = AdmissionEngine(named_policy(policy) if isinstance(policy, str) else policy, **parts)
    for name in engines:
        pool.add_backend(name, max_num_seqs=slots, healthy=healthy)
    return pool


def ledger_of(
    name: str = "b",
    running: int = 0,
    *,
    slots: int | None = None,
    prefill_tokens: int = 0,
    pace: Pace | None = None,
    kv: float = 0.0,
    adapters: Mapping[str, int] | None = None,
    usual: float | None = None,
) -> BackendLedger:
    """A ledger that is this full, and this fast."""
    ledger = BackendLedger(name, CapacitySettings(waiting_target=0), max_num_seqs=slots)
    ledger.sequences, ledger.prefill_tokens = running, prefill_tokens
    ledger.pace = pace or ledger.pace
    ledger.usual.ran(running if usual is None else usual, math.inf)
    ledger.kv.capacity_tokens, ledger.kv.held_tokens = 1000, round(1000 * kv)
    ledger.adapters = dict(adapters or {})
    return ledger


class Room:
    """An engine in which everything fits, as an order and as a policy see it."""

    def reserve(self, blocked: Blocked) -> str | None:
        return None

    def may_begin(self, request: Request) -> bool:
        return True

    def may_wake(self, request: Request, engine: str | None) -> bool:
        return True

    def find_room(self, request: Request, but: str | None = None) -> Sequence[BackendLedger] | Blocked:
        return (ledger_of(),)

    def blocked_at(self, request: Request, engine: str) -> Blocked | None:
        return None

    def loads(self) -> dict[str, int]:
        return {"b": 0}


class NoRoom(Room):
    """An engine in which nothing fits."""

    def find_room(self, request: Request, but: str | None = None) -> Sequence[BackendLedger] | Blocked:
        return Blocked(request, {"b": Obstacle.SLOTS})

    def blocked_at(self, request: Request, engine: str) -> Blocked | None:
        return Blocked(request, {engine: Obstacle.SLOTS})


class Engines(Room):
    """Engines by name, each with what runs there, of which some may be full."""

    def __init__(self, running: Mapping[str, int], *, full: Collection[str] = ()) -> None:
        self.running = running
        self.full = full

    def find_room(self, request: Request, but: str | None = None) -> Sequence[BackendLedger] | Blocked:
        found = [ledger_of(name, running) for name, running in self.running.items() if name not in self.full]
        return found or Blocked(request, dict.fromkeys(self.running, Obstacle.SLOTS))

    def blocked_at(self, request: Request, engine: str) -> Blocked | None:
        return Blocked(request, {engine: Obstacle.SLOTS}) if engine in self.full else None

    def loads(self) -> dict[str, int]:
        return dict(self.running)


class SilentGateways:
    """Other gateways that must be asked about the requests of a tenant, or of all (""), and do not answer."""

    def __init__(self, tenant: str = "") -> None:
        self.tenant = tenant

    def must_ask(self, request: Request, now: float, *, is_calm: bool) -> bool:
        return self.tenant in ("", request.flow.tenant)

    def ask(self, engine: object, request: Request) -> None: ...

    def forget(self, request: Request) -> None: ...


def dispatched(decisions: Sequence[Decision]) -> list[str]:
    """The requests that these decisions send to a backend."""
    return [decision.id for decision in decisions if isinstance(decision, Dispatch)]


def rejected(decisions: Sequence[Decision]) -> list[tuple[str, RejectReason]]:
    """The requests that these decisions refuse, and why."""
    return [(decision.id, decision.reason) for decision in decisions if isinstance(decision, Reject)]


def told_wait(request: Request) -> WaitEstimate:
    """The wait that a queued request was told."""
    return request.progress.wait.expected


@contextmanager
def lines_counted() -> Iterator[list[int]]:
    """Lines of Python executed inside `policies`: work, without a clock."""
    lines = [0]

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if "policies" not in frame.f_code.co_filename:
            return None
        if event == "line":
            lines[0] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)
