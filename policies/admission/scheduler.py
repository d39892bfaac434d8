"""Which request goes next, when, and where? One decision, in one place.

WHO is answered by the order: the head of its queue (`orders`). WHEN is answered by the engines: those that can start
the head now, or the obstacle at each engine (`admission.room`). WHERE is answered by the placement: one of the engines
with room (`placements`). A request that lacks room for a reason of its own sleeps in the backlog, so that it holds up
no other request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from policies.capacity.ledger import BackendLedger
from policies.capacity.obstacle import Blocked, Obstacle
from policies.orders.order import Order, Selection
from policies.placements.homes import Homes, is_local
from policies.placements.least_loaded import LeastLoaded
from policies.placements.placement import Placement
from policies.placements.prefix_index import tokens_of_blocks
from policies.queue.backlog import Backlog
from policies.request import PlacementReason, Request

LEAST_LOADED: Final = LeastLoaded()


class PoolEngines(Protocol):
    """The engines of a pool, and the requests that they can start now."""

    def find_room(self, request: Request, but: str | None = None) -> Sequence[BackendLedger] | Blocked:
        """Return the engines that can start a request now, at least one; or the obstacle at each engine.

        `but`: an engine to leave out.
        """

    def blocked_at(self, request: Request, engine: str) -> Blocked | None:
        """Return the obstacle that keeps this engine from starting a request now, or None."""

    def reserve(self, blocked: Blocked) -> str | None:
        """Return an engine to keep free for the head, which no engine can start now.

        None if no other request could start at another engine.
        """

    def may_begin(self, request: Request) -> bool:
        """Return whether the working set has room for this start."""

    def may_wake(self, request: Request, engine: str | None) -> bool:
        """Return whether the tree nodes and the prefill part of a sleeping tenant have room, at this engine or any."""

    def loads(self) -> dict[str, int]:
        """Return the number of requests dispatched to each engine in service."""


def schedule(
    order: Order,
    engines: PoolEngines,
    *,
    placement: Placement = LEAST_LOADED,
    homes: Homes | None = None,
    only: str | None = None,
) -> Selection | Blocked | None:
    """Take from the queue the next request that can start, and return it with its engine.

    Return `Blocked` if no request can start, and None if the queue is empty. `homes`: requests that may pass the head
    where their prompts are cached. `only`: the engine that owns the queue.
    """
    backlog = order.backlog
    if backlog is not None:
        if backlog.starts:
            backlog.wake_starts(engines.may_begin)
        if backlog.full:
            _wake(backlog, engines, only)
    while (head := order.head()) is not None:  # WHO
        placed = _place(head, engines, placement, only)  # WHEN and WHERE
        if not isinstance(placed, Blocked):
            if homes is not None and backlog is not None and backlog.queued > 1:
                head = _cached_first(head, placed, backlog, homes, engines)
            order.take(head)
            return Selection(head, placed)
        if backlog is None:
            return placed
        why = placed.nearest()
        if why is Obstacle.CEILING or why is Obstacle.PREFILL_PART:
            backlog.sleep_at(head, placed.ceiling)
        elif why is Obstacle.WORKING_SET:
            backlog.sleep_start(head)
            if backlog.full:  # the next tenant at a full node may go instead
                _wake(backlog, engines, only)
        else:
            return _beside(order, backlog, placed, engines, placement, only)
    # All requests sleep. The first one starts if there is room by now, and otherwise shows the obstacle.
    asleep = backlog.asleep() if backlog is not None else None
    if asleep is None:
        return None
    placed = _place(asleep, engines, placement, only)
    if isinstance(placed, Blocked):
        return placed
    order.take(asleep)
    return Selection(asleep, placed)


def _place(
    request: Request, engines: PoolEngines, placement: Placement, only: str | None, but: str | None = None
) -> str | Blocked:
    """Return the engine that gets the request now, or the obstacle at each engine.

    `but`: an engine that is reserved for another request.
    """
    if only is not None:  # WHERE was decided when the request arrived
        return engines.blocked_at(request, only) or only
    found = engines.find_room(request, but)
    if isinstance(found, Blocked):
        return found
    if len(found) > 1:
        engine, request.progress.placed = placement.choose(request, found)
    else:
        engine, request.progress.placed = found[0].name, PlacementReason.ONLY
    return engine


def _wake(backlog: Backlog, engines: PoolEngines, only: str | None) -> None:
    """Wake the tenants that sleep in `backlog.full` and have room now, at engine `only` or any."""
    backlog.wake_at(lambda request: engines.may_wake(request, only))


def _beside(
    order: Order, backlog: Backlog, blocked: Blocked, engines: PoolEngines, placement: Placement, only: str | None
) -> Selection | Blocked:
    """Reserve an engine for a head that fits nowhere, and take from the queue a request that fits elsewhere.

    With the reservation other requests cannot delay the start of the head (EASY backfilling, Lifka 1995).
    """
    reserved = engines.reserve(blocked) if order.reserves and only is None else None
    blocked.others = ()
    if reserved is None and order.reserves:
        return blocked
    for request in backlog.others(blocked.request):
        placed = _place(request, engines, placement, only, reserved)
        if not isinstance(placed, Blocked):
            order.take(request)
            return Selection(request, placed)
        if reserved is not None and not blocked.others and not request.is_batch:
            blocked.others = (placed.without(reserved),)
    return blocked


def _cached_first(head: Request, engine: str, backlog: Backlog, homes: Homes, engines: PoolEngines) -> Request:
    """Return the head, or a request that may pass the head because the engine has its prompt cached.

    The head goes if the engine has half of its prompt. Otherwise the request with the longest cached prompt goes, of
    those that have half of their prompt there and can start.
    """
    prefixes = homes.prefixes
    if homes.is_alone(head) or is_local(prefixes.depth(head.prefix, engine), head.prefix):
        return head
    found: list[tuple[int, int, Request]] = []
    for request in homes.at(engine):
        depth = prefixes.depth(request.prefix, engine)
        if is_local(depth, request.prefix) and backlog.may_pass(request, head):
            tokens = tokens_of_blocks(depth, request.prefix, request.prompt_tokens)
            found.append((-tokens, len(found), request))
    found.sort()
    for _, _, request in found:
        if engines.blocked_at(request, engine) is None:
            request.progress.placed = PlacementReason.PASSED
            return request
    return head
