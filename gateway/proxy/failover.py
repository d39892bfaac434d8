"""Failover of waiting requests, from a pool without an engine for them to its fallback pool.

A request may move if the fallback has an engine in service, and its own pool has none besides one that went away with
the request. So two pools that name each other never pass a request to and fro. A moved request keeps its deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from gateway.http.errors import ApiError
from gateway.pool.pool import Pool
from gateway.proxy.admission_request import admission_request
from gateway.proxy.exchange import Exchange
from gateway.proxy.refusals import refusal_error
from policies.admission.decisions import Reject
from policies.admission.takeover import has_place
from policies.request import RejectReason

logger = logging.getLogger("fairgate")

MOVED_BYTES_MAX: Final = 1 << 18
"""Bytes of bodies that are rewritten in one go."""


def fail_over(pool: Pool, waiting: Sequence[Exchange]) -> None:
    """Fail over requests that wait in a pool without an engine for them. A request that cannot move waits for the start
    of an engine, or is refused."""
    other = pool.healthy_fallback()
    if other is not None:
        _move(waiting, pool, other, str(pool.config.fallback))
    for each in waiting:
        is_moved = other is not None and not each.request.progress.rests
        if not is_moved and not pool.awaits_start(each.request):
            each.reject(refusal_error(Reject(each.request.id, RejectReason.NO_BACKEND, 1.0), pool.again_s()))


def _move(waiting: Sequence[Exchange], pool: Pool, other: Pool, model: str) -> None:
    """Move requests that wait in `pool`, which has no engine for them, to `other`, where `model` serves them.

    Requests move as far as the queue of `other` has room, few at a time if their bodies are large. The rest moves at a
    later call.
    """
    moved = body_bytes = 0
    for exchange in waiting:
        if body_bytes >= MOVED_BYTES_MAX or not has_place(other.dispatcher.engine, exchange.request):
            break
        if not other.takes(exchange.request):  # an engine of `other` went away with this request before
            why = Reject(exchange.request.id, RejectReason.BACKEND_FAILED, 1.0)
            exchange.reject(refusal_error(why, other.again_s()))
            continue
        body_bytes += exchange.request.body_bytes
        exchange.context.payload.rename(model)
        try:
            request = admission_request(exchange.context, other)
        except ApiError as error:
            exchange.reject(error)
            continue
        other.dispatcher.take_in(exchange, request, pool.dispatcher)
        exchange.moved(request, other)
        moved += 1
    if moved:
        logger.info(
            "pool %s has no engine in service: of its queue %d requests move to pool %s", pool.name, moved, other.name
        )
        other.dispatcher.decide()
