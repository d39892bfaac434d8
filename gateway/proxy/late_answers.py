"""How is a request answered that needs no engine, but something that takes time, such as a database?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from gateway.background import Background
from gateway.http.errors import ApiError, Reason
from gateway.http.headers import Header
from gateway.proxy.pipeline import JSON
from gateway.proxy.request_context import RequestContext
from gateway.request.unqueued import Unqueued
from gateway.storage.store_errors import StoreError
from gateway.telemetry.record import NO_SERVICE, Outcome, RequestRecord

NO_STORE: Final[Header] = (b"cache-control", b"no-store")


class LateAnswers:
    """Answers what the pipeline has for it, only so many at once for a tenant."""

    def __init__(
        self, unqueued: Unqueued, settled: Callable[[RequestRecord, str], None],
        answer: Callable[[RequestContext], Awaitable[Any]],
    ) -> None:  # fmt: skip
        """`answer`: what becomes JSON; None: it was answered in pieces. Raises ApiError or StoreError."""
        self.tasks = Background()
        self._unqueued = unqueued
        self._settled = settled
        self._answer = answer

    def begin(self, context: RequestContext) -> None:
        """Raises ApiError where its tenant asks too much at once."""
        self._unqueued.begin(context.tenant)
        task = self.tasks.start(self._run(context))
        context.responder.on_disconnect = lambda: _cancel(task)

    async def _run(self, context: RequestContext) -> None:
        outcome, reason, responder = Outcome.COMPLETED, "", context.responder
        try:
            answer = await self._answer(context)
            if answer is not None:
                responder.respond(200, [JSON, NO_STORE, context.id_field()], msgspec.json.encode(answer))
        except asyncio.CancelledError:
            outcome, reason = Outcome.ABANDONED, "client_disconnected"
        except (ApiError, StoreError) as error:
            if isinstance(error, StoreError):
                error = ApiError(Reason.SERVER_BUSY, "the database cannot be asked now; try again", retry_after_s=1.0)
            outcome, reason = Outcome.REFUSED, error.code.value
            context.error(error, is_within=True)
        finally:
            responder.on_disconnect = responder.on_pause = responder.on_resume = None
            self._unqueued.end(context.tenant)
            context.ended(outcome, reason, NO_SERVICE, time.monotonic())
            self._settled(context, "")


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
