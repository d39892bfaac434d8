"""The live driver of one `Schedule` of sync rounds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from gateway.pool.dispatcher import Dispatcher
from gateway.storage.store import ALL_POOLS, Store
from gateway.storage.store_errors import StoreUnavailable
from policies.admission.decisions import Decision
from policies.interactions import Interactions
from policies.limits.quotas import Quotas
from policies.replicas.messages import ReplicaView, is_answer
from policies.replicas.pool_replica import PoolReplica
from policies.replicas.schedule import ALONE_S, START_S, ReportSource, Schedule
from policies.replicas.tenant_replica import TenantReplica

CarryOut = Callable[[Sequence[Decision]], None]
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ReplicaView).decode


class SyncRounds:
    """Sync rounds of one gateway with the store, one `run_once` after another."""

    def __init__(
        self, store: Store, name: str, source: ReportSource, carry_out: CarryOut, *, start_s: float = ALONE_S
    ) -> None:
        """Create rounds for the pool `name`, alone after `start_s` without any reply. `carry_out` gets every resulting
        decision."""
        self.about = name
        self.answered = 0
        self.lost = 0
        self.schedule = Schedule(source, start_s=start_s)
        self._store = store
        self._source = source
        self._carry_out = carry_out
        self._wakes = asyncio.Event()

    @classmethod
    def of_pool(cls, store: Store, pool: str, dispatcher: Dispatcher) -> SyncRounds:
        """Create the rounds about the backends and the queue of one pool."""
        replica = PoolReplica(dispatcher.engine, epoch_s=store.epoch_s)
        rounds = cls(store, pool, replica, dispatcher.carry_out)
        dispatcher.listeners.append(rounds.wake_if_urgent)
        return rounds

    @classmethod
    def of_tenants(
        cls,
        store: Store,
        quotas: Quotas | None,
        interactions: Interactions | None,
        dispatchers: Sequence[Dispatcher],
        *,
        refuses_alone: bool,
        workers: int,
    ) -> SyncRounds:
        """Create the rounds about tenants' limits and interactions, over all pools."""
        engines = [dispatcher.engine for dispatcher in dispatchers]
        replica = TenantReplica(
            quotas, interactions, engines, epoch_s=store.epoch_s, refuses_alone=refuses_alone, workers=workers
        )

        def carry_out(_: Sequence[Decision]) -> None:
            for dispatcher in dispatchers:
                dispatcher.carry_out(replica.decisions_of(dispatcher.engine))

        rounds = cls(store, ALL_POOLS, replica, carry_out, start_s=START_S)
        for dispatcher in dispatchers:
            dispatcher.listeners.append(rounds.wake_if_urgent)
        return rounds

    def wake_if_urgent(self) -> None:
        """Wake the wait for the next round if a report has become urgent."""
        if self._source.is_urgent():
            self._wakes.set()

    async def run_once(self) -> None:
        """Make one round when it is due."""
        await self._until_due()
        try:
            await self._exchange()
        except Exception:
            # Dispatch depends on rounds, so after any failure of a round the gateway goes on alone.
            self.lost += 1
            self._carry_out(self.schedule.lost(time.monotonic()))
            raise

    async def leave(self) -> None:
        """Return this gateway's grants at once, so that others need not wait for its expiry."""
        try:
            await self._store.leave(self.about)
        except StoreUnavailable:
            return  # expiry reports it in a few seconds

    async def _exchange(self) -> None:
        schedule = self.schedule
        number, report = schedule.ask(time.monotonic())
        try:
            view = _decode(await self._store.exchange(self.about, number, _encode(report)))
            if not is_answer(view, report):
                raise ValueError("no answer to the report")
        except (StoreUnavailable, ValueError):
            # The store reports the reason, in the log and at /ready.
            self.lost += 1
            self._carry_out(schedule.lost(time.monotonic()))
            return
        self.answered += 1
        self._carry_out(schedule.answered(view, time.monotonic()))

    async def _until_due(self) -> None:
        loop = asyncio.get_running_loop()
        while (wait_s := self.schedule.due_s() - time.monotonic()) > 0:
            self._wakes.clear()
            timer = loop.call_later(wait_s, self._wakes.set)
            try:
                await self._wakes.wait()
            finally:
                timer.cancel()
