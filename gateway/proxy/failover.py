"""Where does a request go that waits in a pool without an engine for it? To the pool that stands in, as on arrival.

It may be taken on whenever its pool has no engine in service and the other one has. So two pools that name each other
never pass a request to and fro; and it waits no longer in all than it might have waited in the first.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gateway.http.errors import ApiError
from gateway.pool.dispatcher import Admitted
from gateway.pool.pool import Pool
from gateway.proxy.exchange import Exchange
from gateway.request.body.payload import LARGE_BODY_BYTES
from gateway.request.within_context import within_context
from policies.request import Request

__all__ = ["move"]

logger = logging.getLogger("fairgate")


def move(waiting: Sequence[Admitted], pool: Pool, other: Pool, model: str) -> None:
    """These wait in `pool`, which has no engine for them: from now on they wait in `other`, for this model of it.

    As many move as find room in its queue, and few with large bodies; the rest move at a later call.
    """
    moved = body_bytes = 0
    for exchange in waiting:
        assert isinstance(exchange, Exchange)
        if body_bytes >= LARGE_BODY_BYTES or not other.dispatcher.has_place(exchange.request):
            break
        body_bytes += exchange.request.body_bytes
        exchange.payload.rename(model)
        try:
            request = _request_in(other, exchange)
        except ApiError as error:
            exchange.turn_away(error)
            continue
        other.dispatcher.take_in(exchange, request, pool.dispatcher)
        exchange.moved(request, other)
        moved += 1
    if moved:
        logger.info("pool %s has no engine for %d that wait there: they go to pool %s", pool.name, moved, other.name)
        other.dispatcher.decide()


def _request_in(pool: Pool, exchange: Exchange) -> Request:
    """What it is to this pool: what its models and engines decide is found anew, all else stays as it is.

    Raises ApiError for what no context there has room for.
    """
    before, payload, generates = exchange.request, exchange.payload, exchange.route.generates
    prompt_tokens, output_tokens_max = within_context(
        payload,
        pool.estimator.estimate(payload.prompt),
        before.sequences,
        pool.context_tokens_max(payload.model),
        generates=generates,
    )
    prefix = pool.prefix_of(payload, before.flow.tenant) if generates else ()
    return Request(
        before.id, before.flow, before.weight, prompt_tokens, output_tokens_max, before.arrived_s, before.sequences,
        before.body_bytes, before.streamed, before.system_tokens * prompt_tokens // max(1, before.prompt_tokens),
        before.claim, prefix, payload.model if pool.is_adapter(payload.model) else "", before.client_id,
        before.progress,
    )  # fmt: skip
