"""The live driver of one `AdmissionEngine`.

The dispatcher gives the engine timed events, and turns its decisions into calls on exchanges and into one timer. It is
the only caller of the engine. Decisions are carried out in their order. An event that arises meanwhile is decided at
once, but its decisions wait for their turn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from policies.admission.decisions import Decision, Dispatch, Failure, Preempt, Reject
from policies.admission.engine import AdmissionEngine
from policies.admission.takeover import move, stranded
from policies.capacity.gauges import EngineFacts, Gauges
from policies.request import Request, ServiceTokens, State

logger = logging.getLogger("fairgate")

TIMER_S_MAX: Final = 0.01
"""Bound of the timer while requests wait, so that the timer need not be set anew by every event."""


class AdmissionClient(Protocol):
    """A request that asks for admission, with the callbacks that receive each decision."""

    request: Request

    def dispatched(self, backend: str) -> None: ...

    def rejected(self, decision: Reject) -> None: ...

    def preempt(self) -> None: ...


class Dispatcher:
    """Driver of one pool's `AdmissionEngine`: feeds it timed events and carries out its decisions on the exchanges."""

    def __init__(self, engine: AdmissionEngine, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self.clock = clock
        self.listeners: list[Callable[[], None]] = []
        """Called after each event of the engine, which may urgently need to ask other gateways."""
        self.on_stranded: Callable[[Sequence[Any]], None] | None = None
        """Called repeatedly with requests that wait although no engine is in service for them. These requests wait
        until moved."""
        self._exchanges: dict[str, AdmissionClient] = {}
        self._decisions: deque[Decision] = deque()
        self._executing = False
        self._timer: asyncio.TimerHandle | None = None
        engine.on_fault = _log_fault

    def __len__(self) -> int:
        return len(self._exchanges)

    def submit(self, exchange: AdmissionClient) -> None:
        """Ask for admission. The exchange gets `dispatched` or `rejected`, perhaps before this call returns."""
        self._exchanges[exchange.request.id] = exchange
        self.carry_out(self.engine.arrived(exchange.request, self.clock()))

    def progressed(self, request_id: str, output_tokens: int) -> None:
        decisions = self.engine.progressed(request_id, output_tokens, self.clock())
        if decisions:
            self.carry_out(decisions)

    def finished(self, request_id: str, service: ServiceTokens, awaits_more: bool | None = None) -> None:
        del self._exchanges[request_id]
        self.carry_out(self.engine.finished(request_id, service, self.clock(), awaits_more))

    def failed(
        self, request_id: str, failure: Failure, service: ServiceTokens | None = None, again_s: float = 0.0
    ) -> None:
        """Report an incomplete request. Unless its answer broke, the exchange is called again, as after `submit`."""
        if failure is Failure.BROKEN:
            del self._exchanges[request_id]
        self.carry_out(self.engine.failed(request_id, failure, self.clock(), service, again_s))

    def cancelled(self, request_id: str, service: ServiceTokens | None = None) -> None:
        del self._exchanges[request_id]
        self.carry_out(self.engine.cancelled(request_id, self.clock(), service))

    def received(self, request_id: str) -> ServiceTokens:
        """Return the service that a dispatched request is believed to have received."""
        return self.engine.received(request_id, self.clock())

    def backend_changed(self, name: str, change: Gauges | EngineFacts | bool) -> None:
        self.carry_out(self.engine.backend_changed(name, change, self.clock()))

    def take_in(self, exchange: AdmissionClient, request: Request, source: Dispatcher) -> None:
        """Take a request that waits at `source` into this queue. `decide` must follow."""
        move(source.engine, self.engine, exchange.request, request, self.clock())
        self._exchanges[request.id] = source._exchanges.pop(request.id)

    def strand(self, exchange: AdmissionClient) -> None:
        """Mark a waiting request as stranded: no engine here may run it."""
        if self.on_stranded is not None and exchange.request.progress.state is State.QUEUED:
            self.on_stranded([exchange])

    def decide(self) -> None:
        """Decide after a change of the queue."""
        self.carry_out(self.engine.woke(self.clock()))

    def close(self) -> None:
        """Stop the timer. The caller ends exchanges under way."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def exchanges(self) -> list[Any]:
        """Exchanges under way, queued or dispatched."""
        return list(self._exchanges.values())

    def carry_out(self, decisions: Sequence[Decision]) -> None:
        """Carry out decisions, of this dispatcher's events or of others that the engine has decided on."""
        self._decisions.extend(decisions)
        if not self._executing:
            self._executing = True
            try:
                while self._decisions:
                    self._execute(self._decisions.popleft())
            finally:
                self._executing = False
        if self._timer is None and self.engine.queued:
            self._set_timer()
        for listener in self.listeners:
            listener()

    def _execute(self, decision: Decision) -> None:
        """Call the exchange that the decision is about. Do nothing if the exchange has ended."""
        if isinstance(decision, Dispatch):
            exchange = self._exchanges.get(decision.id)
            # An earlier decision of this batch cancelled the request; the engine knows already.
            if exchange is not None:
                exchange.dispatched(decision.backend)
        elif isinstance(decision, Preempt):
            exchange = self._exchanges.get(decision.id)
            if exchange is not None:
                exchange.preempt()
        else:
            exchange = self._exchanges.pop(decision.id, None)
            if exchange is not None:
                exchange.rejected(decision)

    def _set_timer(self) -> None:
        """Set the timer to the engine's next wakeup, at most `TIMER_S_MAX` from now. Do nothing if there is none."""
        wakeup_s = self.engine.next_wakeup()
        if wakeup_s is not None:
            delay_s = min(max(0.0, wakeup_s - self.clock()), TIMER_S_MAX)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self.on_stranded is not None:
            waiting = stranded(self.engine)
            if waiting:
                self.on_stranded([self._exchanges[request.id] for request in waiting])
        self.decide()


def _log_fault(error: Exception, request_id: str) -> None:
    """Log a failed event of the engine, which is a fault of this program. All other requests go on."""
    what = f"request {request_id} was refused" if request_id else "nothing was refused"
    logger.error("an admission decision failed, and %s; please report this fault", what, exc_info=error)
