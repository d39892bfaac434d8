"""Who carries out what the engine decides? The live body of one `AdmissionEngine`.

It gives the engine events with the time and turns decisions into calls on the exchanges they name, and into one timer.
Nothing else touches the engine. Decisions are carried out in the order they were made: an event that arises while one
is carried out is decided at once, but its decisions wait for their turn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from policies.admission.decisions import Decision, Dispatch, Failure, GiveBack, Reject
from policies.admission.engine import AdmissionEngine
from policies.admission.takeover import has_place, move, stranded
from policies.capacity.gauges import EngineFacts, Gauges
from policies.request import Request, ServiceTokens, State

logger = logging.getLogger("fairgate")

TIMER_S_MAX: Final = 0.01
"""While anything waits the timer is at most this far away, so that it need not be set anew with every event."""


class Admitted(Protocol):
    """A request that asks for admission: what its exchange does when it is decided."""

    request: Request

    def dispatched(self, backend: str) -> None: ...

    def refused(self, decision: Reject) -> None: ...

    def give_back(self) -> None: ...


class Dispatcher:
    """Owns one pool's engine, the exchanges under way in it, and its timer."""

    def __init__(self, engine: AdmissionEngine, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self.clock = clock
        self.listeners: list[Callable[[], None]] = []
        """Hear that the engine has had an event: it may urgently want to know of other gateways."""
        self.on_stranded: Callable[[Sequence[Admitted]], None] | None = None
        """Hears, again and again, of some that wait though no engine is in service, or none that may have them. As long
        as nobody does anything about them, they wait."""
        self._exchanges: dict[str, Admitted] = {}
        self._decisions: deque[Decision] = deque()
        self._executing = False
        self._timer: asyncio.TimerHandle | None = None
        engine.on_fault = _log_fault

    def __repr__(self) -> str:
        return f"<Dispatcher {len(self._exchanges)} exchanges, {self.engine!r}>"

    def __len__(self) -> int:
        return len(self._exchanges)

    def submit(self, exchange: Admitted) -> None:
        """Ask for admission. The exchange gets `dispatched` or `refused`, perhaps before this returns."""
        self._exchanges[exchange.request.id] = exchange
        self._execute(self.engine.arrived(exchange.request, self.clock()))

    def progressed(self, request_id: str, output_tokens: int) -> None:
        decisions = self.engine.progressed(request_id, output_tokens, self.clock())
        if decisions:
            self._execute(decisions)

    def finished(self, request_id: str, service: ServiceTokens, awaits_more: bool | None = None) -> None:
        del self._exchanges[request_id]
        self._execute(self.engine.finished(request_id, service, self.clock(), awaits_more))

    def failed(
        self, request_id: str, failure: Failure, service: ServiceTokens | None = None, again_s: float = 0.0
    ) -> None:
        """It did not complete. Unless it broke, the exchange is called again, as after `submit`."""
        if failure is Failure.BROKEN:
            del self._exchanges[request_id]
        self._execute(self.engine.failed(request_id, failure, self.clock(), service, again_s))

    def cancelled(self, request_id: str, service: ServiceTokens | None = None) -> None:
        del self._exchanges[request_id]
        self._execute(self.engine.cancelled(request_id, self.clock(), service))

    def received(self, request_id: str) -> ServiceTokens:
        """What a dispatched request is believed to have received."""
        return self.engine.received(request_id, self.clock())

    def backend_changed(self, name: str, change: Gauges | EngineFacts | bool) -> None:
        self._execute(self.engine.backend_changed(name, change, self.clock()))

    def carry_out(self, decisions: Sequence[Decision]) -> None:
        """What the engine decided elsewhere than here."""
        self._execute(decisions)

    def has_place(self, request: Request) -> bool:
        """Has the queue room for it?"""
        return has_place(self.engine, request)

    def take_in(self, exchange: Admitted, request: Request, source: Dispatcher) -> None:
        """What waits there goes on waiting here, as this request. `decide` must follow."""
        move(source.engine, self.engine, exchange.request, request, self.clock())
        self._exchanges[request.id] = source._exchanges.pop(request.id)

    def strand(self, exchange: Admitted) -> None:
        """If it waits, then for nothing: no engine here may have it."""
        if self.on_stranded is not None and exchange.request.progress.state is State.QUEUED:
            self.on_stranded([exchange])

    def decide(self) -> None:
        """Something came into the queue."""
        self._execute(self.engine.woke(self.clock()))

    def close(self) -> None:
        """Stop the timer; exchanges under way are the caller's to end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def exchanges(self) -> list[Admitted]:
        """Those under way, queued or dispatched."""
        return list(self._exchanges.values())

    def _execute(self, decisions: Sequence[Decision]) -> None:
        self._decisions.extend(decisions)
        if not self._executing:
            self._executing = True
            try:
                while self._decisions:
                    self._carry_out(self._decisions.popleft())
            finally:
                self._executing = False
        if self._timer is None and self.engine.queued:
            self._arm()
        for listener in self.listeners:
            listener()

    def _carry_out(self, decision: Decision) -> None:
        if isinstance(decision, Dispatch):
            exchange = self._exchanges.get(decision.id)
            # Cancelled by an earlier decision of the same batch: the engine knows already.
            if exchange is not None:
                exchange.dispatched(decision.backend)
        elif isinstance(decision, GiveBack):
            exchange = self._exchanges.get(decision.id)
            if exchange is not None:
                exchange.give_back()
        else:
            exchange = self._exchanges.pop(decision.id, None)
            if exchange is not None:
                exchange.refused(decision)

    def _arm(self) -> None:
        wakeup_s = self.engine.next_wakeup()
        if wakeup_s is not None:
            delay_s = min(max(0.0, wakeup_s - self.clock()), TIMER_S_MAX)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        if self.on_stranded is not None:
            waiting = stranded(self.engine)
            if waiting:
                self.on_stranded([self._exchanges[request.id] for request in waiting])
        self.decide()


def _log_fault(error: Exception, request_id: str) -> None:
    """An event of the engine failed half way: that is a fault of this program. All other requests go on."""
    what = f"request {request_id} was refused" if request_id else "nothing was refused"
    logger.error("an admission decision failed, and %s; please report this fault", what, exc_info=error)
