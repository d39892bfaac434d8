"""Who carries what gateways report to each other? The live body of one `Schedule`."""

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
from policies.replicas.schedule import Schedule, Speaker
from policies.replicas.tenant_replica import TenantReplica

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ReplicaView).decode


class Exchanges:
    """Tells the store what one gateway has to say, and the gateway what came of it, one `turn` after another."""

    def __init__(
        self, store: Store, name: str, speaker: Speaker, carry_out: Callable[[Sequence[Decision]], None]
    ) -> None:
        """`name`: of the pool; `carry_out` gets everything that may have been decided."""
        self.about = name
        self.answered = 0
        self.lost = 0
        self._schedule = Schedule(speaker)
        self._store = store
        self._speaker = speaker
        self._carry_out = carry_out
        self._wakes = asyncio.Event()

    @classmethod
    def of_pool(cls, store: Store, pool: str, dispatcher: Dispatcher) -> Exchanges:
        """About the backends and the queue of one pool."""
        replica = PoolReplica(dispatcher.engine, epoch_s=store.epoch_s)
        exchanges = cls(store, pool, replica, dispatcher.carry_out)
        dispatcher.listeners.append(exchanges.look)
        return exchanges

    @classmethod
    def of_tenants(
        cls,
        store: Store,
        quotas: Quotas | None,
        interactions: Interactions | None,
        dispatchers: Sequence[Dispatcher],
        *,
        refuses_alone: bool,
    ) -> Exchanges:
        """About the limits and interactions of tenants, over all pools."""
        engines = [dispatcher.engine for dispatcher in dispatchers]
        replica = TenantReplica(quotas, interactions, engines, epoch_s=store.epoch_s, refuses_alone=refuses_alone)

        def carry_out(_: Sequence[Decision]) -> None:
            for dispatcher in dispatchers:
                dispatcher.carry_out(replica.decisions_of(dispatcher.engine))

        exchanges = cls(store, ALL_POOLS, replica, carry_out)
        for dispatcher in dispatchers:
            dispatcher.listeners.append(exchanges.look)
        return exchanges

    @property
    def is_alone(self) -> bool:
        """Does the gateway go on with the share that it last had?"""
        return self._schedule.is_alone

    def look(self) -> None:
        """Something happened that must perhaps be reported at once."""
        if self._speaker.is_urgent():
            self._wakes.set()

    async def turn(self) -> None:
        """One exchange, once it is due."""
        await self._until_due()
        try:
            await self._exchange()
        except Exception:
            # Nothing is dispatched without exchanges: whatever is wrong with one, the gateway goes on alone.
            self.lost += 1
            self._carry_out(self._schedule.lost(time.monotonic()))
            raise

    async def leave(self) -> None:
        """Give back at once what is ours, so that nobody waits until it is known that we are gone."""
        try:
            await self._store.leave(self.about)
        except StoreUnavailable:
            return  # it is known in a few seconds

    async def _exchange(self) -> None:
        schedule = self._schedule
        number, report = schedule.ask(time.monotonic())
        try:
            view = _decode(await self._store.exchange(self.about, number, _encode(report)))
            if not is_answer(view, report):
                raise ValueError("no answer to the report")
        except (StoreUnavailable, ValueError):
            # The store says why, in the log and at /ready.
            self.lost += 1
            self._carry_out(schedule.lost(time.monotonic()))
            return
        self.answered += 1
        self._carry_out(schedule.answered(view, time.monotonic()))

    async def _until_due(self) -> None:
        loop = asyncio.get_running_loop()
        while (wait_s := self._schedule.due_s() - time.monotonic()) > 0:
            self._wakes.clear()
            timer = loop.call_later(wait_s, self._wakes.set)
            try:
                await self._wakes.wait()
            finally:
                timer.cancel()
