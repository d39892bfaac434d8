"""How does it stand just now, as plain data that a process can send to another? What all views of the present show.

A gateway of one process sees itself. Of several workers the hub asks each, and puts together what they see: counts are
added up, and what every worker sees of the same engine is taken from whoever sees most (docs/workers.md). Nothing here
changes a decision. All times are on the monotonic clock, which the processes of one machine have in common.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from gateway.operator.spans import Running, running
from gateway.telemetry.access_log import hidden
from gateway.telemetry.lately import End, Lately
from policies.capacity.obstacle import Blocked, Obstacle
from policies.queue.bounds import Waiting
from policies.request import Request, State

if TYPE_CHECKING:
    from gateway.app import Gateway
    from gateway.config.model import Config
    from gateway.pool.pool import Pool

__all__ = ["REQUESTS_MAX", "Here", "Look", "Seen", "SeenPool", "decoded", "encoded", "seen", "together"]

REQUESTS_MAX: Final = 100
"""Of a pool's queue, the oldest."""


class SeenPool(msgspec.Struct):
    """One pool."""

    pool: str
    policy: str
    models: list[str]
    is_healthy: bool
    queued_requests: int
    queued_bytes: int
    dispatched_requests: int
    obstacle: str | None
    next_request_id: str | None
    waiting: dict[str, Waiting]
    """By tenant."""
    requests: list[dict[str, Any]]
    """The oldest that wait."""
    backends: list[dict[str, Any]]
    running: list[Running]
    """Empty unless it was asked for."""


class Seen(msgspec.Struct):
    """One gateway process, or all workers together."""

    at_s: float
    not_ready: list[str]
    state: str | None
    port: int
    pools: list[SeenPool]


class Look(Protocol):
    """Who can say how it stands: a gateway of itself, or the hub of all workers."""

    @property
    def config(self) -> Config: ...

    @property
    def lately(self) -> Lately:
        """The latest ends, as of the last look."""

    async def look(self, *, with_running: bool = False) -> Seen: ...


class Here:
    """A gateway of one process."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @property
    def config(self) -> Config:
        return self._gateway.config

    @property
    def lately(self) -> Lately:
        return self._gateway.lately

    async def look(self, *, with_running: bool = False) -> Seen:
        return seen(self._gateway, with_running=with_running)


def seen(gateway: Gateway, *, with_running: bool) -> Seen:
    """`with_running`: each request that is dispatched, too; O(dispatched)."""
    pools = gateway.pools
    now = pools[0].dispatcher.clock() if pools else 0.0
    found = [_pool(pool, with_running=with_running) for pool in pools]
    return Seen(now, gateway.not_ready(), gateway.state(), gateway.port, found)


def _pool(pool: Pool, *, with_running: bool) -> SeenPool:
    dispatcher = pool.dispatcher
    engine, now = dispatcher.engine, dispatcher.clock()
    waiting, blocked = engine.books.waiting, engine.blocked if engine.queued else None
    return SeenPool(
        pool=pool.name,
        policy=pool.policy_name,
        models=list(pool.models()),
        is_healthy=pool.is_healthy(),
        queued_requests=engine.queued,
        queued_bytes=engine.queued_bytes,
        dispatched_requests=engine.dispatched,
        obstacle=blocked.nearest() if blocked is not None else None,
        next_request_id=engine.blocked.request.id if engine.blocked is not None else None,
        waiting=waiting.by_tenant(),
        requests=[_waiting(request, now) for request in islice(waiting.requests.values(), REQUESTS_MAX)],
        backends=_backends(pool, blocked, now),
        running=running(engine) if with_running else [],
    )


def _waiting(request: Request, now: float) -> dict[str, Any]:
    flow, progress = request.flow, request.progress
    return {
        "request_id": request.id,
        "client_request_id": request.client_id,
        "tenant": flow.tenant,
        "app": flow.app,
        "user": hidden(flow.user),
        "wait_s": round(now - request.arrived_s, 3),
        "expires_in_s": round(progress.deadline_s - now, 3),
        "inside_an_interaction": progress.inside,
        "asks_other_gateways": progress.state is not State.QUEUED,
        "prompt_tokens_estimated": request.prompt_tokens,
    }


def _backends(pool: Pool, blocked: Blocked | None, now: float) -> list[dict[str, Any]]:
    engine = pool.dispatcher.engine
    obstacles = _obstacles(blocked)
    found = []
    for name, ledger in engine.backends.items():
        backend = pool.backends.get(name)
        kv_ratio, known_by = ledger.occupancy(None, None, now)
        found.append(
            {
                "backend": name,
                "url": backend.url if backend is not None else "",
                "in_service": ledger.healthy,
                "reason": backend.why_not if backend is not None and not ledger.healthy else "",
                "read_by": backend.read_by if backend is not None else "",
                "not_by_steps_because": backend.feed.why if backend is not None and backend.feed is not None else "",
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


def _obstacles(blocked: Blocked | None) -> dict[str, Obstacle]:
    """By engine. Where each engine has a queue of its own, each next one waits for its own engine."""
    if blocked is None:
        return {}
    found = dict(blocked.obstacles)
    for other in blocked.others:
        found.update(other.obstacles)
    return found


# --- of several workers ---


def together(workers: Sequence[tuple[str, Seen]]) -> Seen:
    """What several see, by their names; at least one."""
    named: dict[str, list[SeenPool]] = {}
    for _, each in workers:
        for pool in each.pools:
            named.setdefault(pool.pool, []).append(pool)
    first = workers[0][1]
    return Seen(
        max(each.at_s for _, each in workers),
        said_by([(name, each.not_ready) for name, each in workers]),
        state_of([(name, each.state) for name, each in workers]),
        first.port,
        [_together(pools) for pools in named.values()],
    )


def said_by(workers: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """What several say: once if all say it, else with the names of those that do."""
    by: dict[str, list[str]] = {}
    for name, said in workers:
        for one in said:
            by.setdefault(one, []).append(name)
    return [one if len(names) == len(workers) else f"{', '.join(names)}: {one}" for one, names in by.items()]


def state_of(workers: Sequence[tuple[str, str | None]]) -> str | None:
    """Is state shared? Where not, of which worker."""
    faults = [(name, [state]) for name, state in workers if state is not None and state != "shared"]
    return "; ".join(said_by(faults)) if faults else next((state for _, state in workers if state), None)


def _together(pools: Sequence[SeenPool]) -> SeenPool:
    fullest = max(pools, key=lambda pool: pool.queued_requests)
    return SeenPool(
        pool=fullest.pool,
        policy=fullest.policy,
        models=list(dict.fromkeys(model for pool in pools for model in pool.models)),
        is_healthy=any(pool.is_healthy for pool in pools),
        queued_requests=sum(pool.queued_requests for pool in pools),
        queued_bytes=sum(pool.queued_bytes for pool in pools),
        dispatched_requests=sum(pool.dispatched_requests for pool in pools),
        obstacle=fullest.obstacle,
        next_request_id=fullest.next_request_id,
        waiting=_tenants(pool.waiting for pool in pools),
        requests=sorted((one for pool in pools for one in pool.requests), key=lambda one: -one["wait_s"])[
            :REQUESTS_MAX
        ],
        backends=_engines(pools, fullest),
        running=[one for pool in pools for one in pool.running],
    )


def _tenants(workers: Iterable[dict[str, Waiting]]) -> dict[str, Waiting]:
    found: dict[str, Waiting] = {}
    for waiting in workers:
        for name, one in waiting.items():
            known = found.get(name)
            if known is not None:
                one = Waiting(known.requests + one.requests, one.weight, min(known.oldest_s, one.oldest_s))
            found[name] = one
    return found


_ADDED: Final = ("running_sequences", "starting_requests", "starting_prompt_tokens")
"""Of one engine: each worker has its own there. All else each sees of the engine itself."""
_MOST: Final = ("slots", "kv_expected_ratio", "kv_capacity_tokens")


def _engines(pools: Sequence[SeenPool], fullest: SeenPool) -> list[dict[str, Any]]:
    named: dict[str, list[dict[str, Any]]] = {}
    for pool in pools:
        for one in pool.backends:
            named.setdefault(one["backend"], []).append(one)
    obstacles = {one["backend"]: one["obstacle"] for one in fullest.backends}
    found = []
    for name, each in named.items():
        down = next((one for one in each if not one["in_service"]), None)
        newest = max(each, key=lambda one: one["kv_ratio"])
        added = {field: sum(one[field] for one in each) for field in _ADDED}
        most = {field: max(one[field] for one in each) for field in _MOST}
        service = {"in_service": down is None, "reason": "" if down is None else down["reason"]}
        found.append({**newest, **added, **most, **service, "obstacle": obstacles.get(name)})
    return found


# --- between processes ---


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


def encoded(one: Seen, ends: Sequence[End], ends_count: int) -> bytes:
    """What a worker tells the hub: how it stands, its latest ends, and how many it had in all."""
    return _encode((one, ends, ends_count))


def decoded(content: bytes) -> tuple[Seen, list[End], int]:
    """The same at the hub."""
    plain, ends, ends_count = _decode(content)
    for pool in plain["pools"]:
        pool["waiting"] = {name: Waiting(*one) for name, one in pool["waiting"].items()}
        pool["running"] = [Running(*one) for one in pool["running"]]
    found = Seen(**{**plain, "pools": [SeenPool(**pool) for pool in plain["pools"]]})
    return found, [End(*one) for one in ends], ends_count
