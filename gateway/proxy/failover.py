"""Where does a request go that waits in a pool without an engine for it? To the pool that stands in, as on arrival.

It may be taken on whenever its pool has no engine in service and the other one has. So two pools that name each other
never pass a request to and fro; and it waits no longer in all than it might have waited in the first.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from gateway.http.errors import ApiError
from gateway.pool.dispatcher import Admitted
from gateway.pool.pool import Pool
from gateway.proxy.admission_request import admission_request
from gateway.proxy.exchange import Exchange
from gateway.proxy.refusals import refusal_error
from policies.admission.decisions import Reject
from policies.request import Refusal

logger = logging.getLogger("fairgate")

MOVED_BYTES_MAX: Final = 1 << 18
"""Bodies that are read anew at one go."""


def move(waiting: Sequence[Admitted], pool: Pool, other: Pool, model: str) -> None:
    """These wait in `pool`, which has no engine for them: from now on they wait in `other`, for this model of it.

    As many move as find room in its queue, and few with large bodies; the rest move at a later call.
    """
    moved = body_bytes = 0
    for exchange in waiting:
        assert isinstance(exchange, Exchange)
        if body_bytes >= MOVED_BYTES_MAX or not other.dispatcher.has_place(exchange.request):
            break
        if not other.takes(exchange.request):  # its engine went away with it, too
            why = Reject(exchange.request.id, Refusal.BACKEND_FAILED, 1.0)
            exchange.turn_away(refusal_error(why, other.again_s()))
            continue
        body_bytes += exchange.request.body_bytes
        exchange.context.payload.rename(model)
        try:
            request = admission_request(exchange.context, other)
        except ApiError as error:
            exchange.turn_away(error)
            continue
        other.dispatcher.take_in(exchange, request, pool.dispatcher)
        exchange.moved(request, other)
        moved += 1
    if moved:
        logger.info("pool %s has no engine for %d that wait there: they go to pool %s", pool.name, moved, other.name)
        other.dispatcher.decide()
