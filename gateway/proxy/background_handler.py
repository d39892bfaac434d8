"""Tasks that answer requests from a database or the like, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from gateway.http.errors import ApiError, Reason
from gateway.http.headers import Header
from gateway.proxy.pipeline import JSON, Pipeline
from gateway.proxy.request_context import RequestContext
from gateway.storage.store_errors import StoreError
from gateway.telemetry.background import Tasks
from gateway.telemetry.record import Outcome

NO_STORE: Final[Header] = (b"cache-control", b"no-store")


class BackgroundHandler:
    """Handler that answers one kind of request in a background task.

    The handler's running requests count against the tenant's limit of requests that bypass admission
    (`Pipeline.bypass_limiter`).
    """

    def __init__(self, pipeline: Pipeline, answer: Callable[[RequestContext], Awaitable[Any]]) -> None:
        """Create the handler. `answer` returns a value for JSON, or None if it has sent the answer itself, and raises
        ApiError or StoreError."""
        self.tasks = Tasks()
        self._pipeline = pipeline
        self._answer = answer

    def begin(self, context: RequestContext) -> None:
        """Start to answer. Raise ApiError if the tenant has too many answers under way."""
        self._pipeline.bypass_limiter.begin(context.tenant)
        task = self.tasks.start(self._run(context))
        context.responder.on_disconnect = lambda: task.cancel()

    async def _run(self, context: RequestContext) -> None:
        responder, pipeline = context.responder, self._pipeline
        error: Exception | None = None
        try:
            answer = await self._answer(context)
            if answer is not None:
                responder.respond(200, [JSON, NO_STORE, context.id_field()], msgspec.json.encode(answer))
            pipeline.ended(context, Outcome.COMPLETED, "")
        except asyncio.CancelledError:
            pipeline.ended(context, Outcome.ABANDONED, "client_disconnected")
        except StoreError:
            error = ApiError(Reason.SERVER_BUSY, "the database cannot be asked now; try again", retry_after_s=1.0)
        except Exception as fault:  # answered, counted and logged by `failed`
            error = fault
        finally:
            responder.on_disconnect = responder.on_pause = responder.on_resume = None
            pipeline.bypass_limiter.end(context.tenant)
        if error is not None:
            pipeline.failed(context, error)
