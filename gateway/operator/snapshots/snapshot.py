"""What is the current state, as plain data that one process can send to another? The basis of all views.

A gateway of one process sees itself. With several workers, the hub asks each and merges their snapshots: counts are
added up, and the state of an engine is taken from the worker that sees most of it (docs/workers.md). Nothing here
changes a decision. All times are on the monotonic clock, which all processes of one machine share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypedDict

import msgspec

from gateway.telemetry.access_log import hidden
from gateway.telemetry.ends import EndedRequest
from gateway.telemetry.recent_requests import RecentRequests, service_of
from policies.capacity.obstacle import Blocked, Obstacle
from policies.queue.bounds import QueueSummary
from policies.request import Request, payer

if TYPE_CHECKING:
    from gateway.config.model import Config
    from gateway.pool.pool import Pool
    from policies.admission.engine import AdmissionEngine

REQUESTS_MAX: Final = 100
"""Limit on the oldest queued requests of a pool."""
NO_ANSWER: Final = "does not answer"


class RequestSnapshot(msgspec.Struct):
    """A queued request."""

    request_id: str
    tenant: str
    app: str
    user: str | None
    wait_s: float
    expected_wait_s: float | None
    """The whole wait, as expected when it began."""
    expires_in_s: float


class EngineSnapshot(TypedDict):
    """The state of one engine."""

    backend: str
    url: str
    in_service: bool
    reason: str
    engine: str
    """Kind of engine, its slots, and the numbers that it cannot report."""
    read_by: str
    not_by_steps_because: str
    running_sequences: int
    slots: int
    starting_requests: int
    starting_prompt_tokens: int
    kv_ratio: float
    kv_ratio_is: str
    kv_expected_ratio: float
    kv_capacity_tokens: int | None
    obstacle: Obstacle | None


class RunningRequest(NamedTuple):
    """A dispatched request, and the service that it has received up to now."""

    tenant: str
    weight: float
    dispatched_s: float
    service: float
    backend: str


class PoolSnapshot(msgspec.Struct):
    """The state of one pool."""

    pool: str
    policy: str
    models: list[str]
    is_healthy: bool
    queued_requests: int
    dispatched_requests: int
    obstacle: Obstacle | None
    next_request_id: str | None
    waiting: dict[str, QueueSummary]
    requests: list[RequestSnapshot]
    """The oldest queued requests."""
    backends: list[EngineSnapshot]
    running: list[RunningRequest]
    gateways: list[dict[str, str | int]] = []
    """Name, queued and dispatched requests of each process; empty if there is one process."""
    ceilings: dict[str, str] = {}
    """Sentence by tenant that waits at a ceiling or for a kept reserve: whose, and how much of it is used."""


class GatewaySnapshot(msgspec.Struct):
    """The state of one gateway process, or of all workers together."""

    at_s: float
    not_ready: list[str]
    state: str | None
    port: int
    pools: list[PoolSnapshot]


class SnapshotSource(Protocol):
    """A source of snapshots: of one gateway, of all workers of its hub, or of all replicas."""

    @property
    def config(self) -> Config: ...

    @property
    def recent(self) -> RecentRequests:
        """The latest ends, as of the last snapshot."""

    async def snapshot(self) -> GatewaySnapshot: ...


class GatewayProcess(SnapshotSource, Protocol):
    """The parts of one gateway process that a snapshot reads."""

    port: int

    @property
    def pools(self) -> Sequence[Pool]: ...

    def not_ready(self) -> list[str]:
        """Return the reasons why no traffic should come here; empty if it should."""

    def store_state(self) -> str | None:
        """Return how state is shared with other replicas; None if the config does not ask for it."""


def snapshot_of(gateway: GatewayProcess) -> GatewaySnapshot:
    """Return a snapshot of this process. O(dispatched requests)."""
    pools = gateway.pools
    now = pools[0].dispatcher.clock() if pools else 0.0
    found = [_snapshot_pool(pool) for pool in pools]
    return GatewaySnapshot(now, gateway.not_ready(), gateway.store_state(), gateway.port, found)


def _snapshot_pool(pool: Pool) -> PoolSnapshot:
    dispatcher = pool.dispatcher
    engine, now = dispatcher.engine, dispatcher.clock()
    waiting, blocked = engine.requests.waiting, engine.blocked if engine.queued else None
    return PoolSnapshot(
        pool=pool.name,
        policy=pool.policy_name,
        models=list(pool.models()),
        is_healthy=pool.is_healthy(),
        queued_requests=engine.queued,
        dispatched_requests=engine.dispatched,
        obstacle=blocked.nearest() if blocked is not None else None,
        next_request_id=engine.blocked.request.id if engine.blocked is not None else None,
        waiting=waiting.by_tenant(),
        requests=[_request_snapshot(request, now) for request in islice(waiting.requests.values(), REQUESTS_MAX)],
        backends=_backends(pool, blocked, now),
        running=_running(engine),
        ceilings=_ceilings(engine),
    )


def _running(engine: AdmissionEngine) -> list[RunningRequest]:
    """Return the dispatched requests. O(dispatched)."""
    found = []
    for lease in engine.requests.leases.values():
        request = lease.request
        service = service_of(request.progress.charged, request.prompt_tokens, lease.output_tokens)
        tenant = request.flow.tenant
        found.append(RunningRequest(tenant, request.weight, lease.dispatched_s, service, lease.backend))
    return found


def _ceilings(engine: AdmissionEngine) -> dict[str, str]:
    """Return the sentence on the full node that keeps a tenant waiting, by tenant."""
    tree, firsts = engine.requests.tree, engine.requests.waiting.first_of_each_tenant()
    found = [(payer(first.flow.tenant), tree.ceiling_in_words(first)) for first in firsts] if not tree.is_flat else []
    return {tenant: words for tenant, words in found if words}


def _request_snapshot(request: Request, now: float) -> RequestSnapshot:
    """Return the snapshot of a queued request."""
    flow, progress = request.flow, request.progress
    expected = None if progress.wait is None else progress.wait.expected
    return RequestSnapshot(
        request.id, flow.tenant, flow.app, hidden(flow.user), round(now - request.arrived_s, 3),
        None if expected is None else round(expected.wait_s, 3), round(progress.deadline_s - now, 3),
    )  # fmt: skip


def _backends(pool: Pool, blocked: Blocked | None, now: float) -> list[EngineSnapshot]:
    engine = pool.dispatcher.engine
    # Where each engine has its own queue, each queue head waits for its engine.
    heads = (blocked, *blocked.others) if blocked is not None else ()
    obstacles = {name: obstacle for head in heads for name, obstacle in head.obstacles.items()}
    found: list[EngineSnapshot] = []
    for name, backend in pool.backends.items():
        ledger = engine.backends[name]
        kv_ratio, known_by = ledger.occupancy(None, None, now)
        found.append(
            {
                "backend": name,
                "url": backend.url,
                "in_service": ledger.healthy,
                "reason": "" if ledger.healthy else backend.why_not,
                "engine": backend.adapter.description(),
                "read_by": backend.read_by,
                "not_by_steps_because": "" if backend.feed is None else backend.feed.why,
                "running_sequences": ledger.sequences,
                "slots": ledger.slots.count,
                "starting_requests": len(ledger.starting),
                "starting_prompt_tokens": ledger.prefill_tokens,
                "kv_ratio": round(kv_ratio, 4),
                "kv_ratio_is": known_by.removeprefix("KV cache, ").strip(","),
                "kv_expected_ratio": round(ledger.kv_fraction(), 4),
                "kv_capacity_tokens": ledger.kv.capacity_tokens,
                "obstacle": obstacles.get(name),
            }
        )
    return found


# --- of several workers ---


def together(workers: Sequence[tuple[str, GatewaySnapshot]]) -> GatewaySnapshot:
    """Merge the snapshots of one process or more, by their names."""
    named: dict[str, list[tuple[str, PoolSnapshot]]] = {}
    for name, each in workers:
        for pool in each.pools:
            named.setdefault(pool.pool, []).append((name, pool))
    return GatewaySnapshot(
        max(each.at_s for _, each in workers),
        grouped_by_text([(name, each.not_ready) for name, each in workers]),
        state_of([(name, each.state) for name, each in workers]),
        workers[0][1].port,
        [_together(processes) for processes in named.values()],
    )


def grouped_by_text(workers: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Return each text once: without names if all workers say it, else with the names of the workers that do."""
    by: dict[str, list[str]] = {}
    for name, texts in workers:
        for one in texts:
            by.setdefault(one, []).append(name)
    return [one if len(names) == len(workers) else f"{', '.join(names)}: {one}" for one, names in by.items()]


def state_of(workers: Sequence[tuple[str, str | None]]) -> str | None:
    """Return "shared", or the faults of workers that do not share state; None if the config does not ask for it."""
    faults = [(name, [state]) for name, state in workers if state is not None and state != "shared"]
    return "; ".join(grouped_by_text(faults)) if faults else next((state for _, state in workers if state), None)


def _together(processes: Sequence[tuple[str, PoolSnapshot]]) -> PoolSnapshot:
    """Merge the snapshots that several processes have of one pool."""
    pools = [pool for _, pool in processes]
    if len(pools) == 1:
        return pools[0]
    fullest = max(pools, key=lambda pool: pool.queued_requests)
    sums = {name: sum(getattr(pool, name) for pool in pools) for name in ("queued_requests", "dispatched_requests")}
    return msgspec.structs.replace(
        fullest,
        models=list(dict.fromkeys(model for pool in pools for model in pool.models)),
        is_healthy=any(pool.is_healthy for pool in pools),
        waiting=_tenants(pool.waiting for pool in pools),
        requests=sorted((one for pool in pools for one in pool.requests), key=lambda one: -one.wait_s)[:REQUESTS_MAX],
        backends=_engines(pools, fullest),
        running=[one for pool in pools for one in pool.running],
        gateways=[
            {"gateway": name, "queued_requests": one.queued_requests, "dispatched_requests": one.dispatched_requests}
            for name, one in processes
        ],
        ceilings={tenant: words for pool in pools for tenant, words in pool.ceilings.items()},
        **sums,
    )


def _tenants(workers: Iterable[dict[str, QueueSummary]]) -> dict[str, QueueSummary]:
    """Merge the summaries of waiting requests of several processes, by tenant."""
    found: dict[str, QueueSummary] = {}
    for waiting in workers:
        for name, one in waiting.items():
            known = found.get(name, QueueSummary(0, one.weight, inf))
            found[name] = QueueSummary(known.requests + one.requests, one.weight, min(known.oldest_s, one.oldest_s))
    return found


_ADDED: Final = ("running_sequences", "starting_requests", "starting_prompt_tokens")
"""Fields of an engine that are added up: each worker has a part. Other fields describe the engine itself."""
_MOST: Final = ("slots", "kv_expected_ratio", "kv_capacity_tokens")


def _engines(pools: Sequence[PoolSnapshot], fullest: PoolSnapshot) -> list[Any]:
    """Merge the engine snapshots of several processes, by name. The obstacles are those of the `fullest` queue."""
    named: dict[str, list[Any]] = {}
    for pool in pools:
        for one in pool.backends:
            named.setdefault(one["backend"], []).append(one)
    obstacles = {one["backend"]: one["obstacle"] for one in fullest.backends}
    found = []
    for name, each in named.items():
        down = next((one for one in each if not one["in_service"]), None)
        newest = max(each, key=lambda one: one["kv_ratio"])
        added = {field: sum(one[field] for one in each) for field in _ADDED}
        most = {field: max(one[field] or 0 for one in each) for field in _MOST}
        service = {"in_service": down is None, "reason": "" if down is None else down["reason"]}
        found.append({**newest, **added, **most, **service, "obstacle": obstacles.get(name)})
    return found


# --- between processes ---


class ReplicaAnswer(msgspec.Struct):
    """A snapshot of one of several processes, with the ends that the asking process does not know."""

    name: str
    """Name of the process, for people."""
    epoch_s: float
    """Seconds by which the common clock is ahead of the monotonic clock of the process."""
    snapshot: GatewaySnapshot
    ends: list[EndedRequest]
    ends_count: int
    """Number of all ends of the process."""

    def move(self, epoch_s: float) -> None:
        """Convert the times for a process whose monotonic clock is this far behind the common clock."""
        by_s, self.epoch_s = self.epoch_s - epoch_s, epoch_s
        self.snapshot.at_s += by_s
        for pool in self.snapshot.pools:
            pool.waiting = {name: each._replace(oldest_s=each.oldest_s + by_s) for name, each in pool.waiting.items()}
            pool.running = [each._replace(dispatched_s=each.dispatched_s + by_s) for each in pool.running]
        for end in self.ends:
            end.dispatched_s += by_s
            end.ended_s += by_s
