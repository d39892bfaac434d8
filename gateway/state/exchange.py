"""Who carries what the gateways of one pool tell each other? The live body of one `Conversation`."""

from __future__ import annotations

import asyncio

import msgspec

from gateway.dispatcher import Dispatcher
from gateway.state.errors import StoreUnavailable
from gateway.state.store import Script, Store, pool_key
from policies.conversation import Conversation
from policies.replication import Heard

__all__ = ["Exchanges"]

_EXCHANGE = Script("exchange.lua")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Heard).decode
BY_THE_CLOCK_OF_REDIS = ""


class Exchanges:
    """Tells the store about one pool, and the pool what came of it, until cancelled."""

    def __init__(self, store: Store, pool: str, dispatcher: Dispatcher) -> None:
        self.conversation = Conversation(dispatcher.engine)
        self.carried = 0
        """Exchanges that were answered."""
        self._store = store
        self._keys = (pool_key(pool, "replicas"), pool_key(pool, ""))
        self._dispatcher = dispatcher
        self._is_urgent = asyncio.Event()
        dispatcher.on_urgent = self._is_urgent.set

    async def run(self) -> None:
        while True:
            await self._until_due()
            await self._exchange()

    async def leave(self) -> None:
        """Give back at once what is ours, so that nobody waits until it is known that we are gone."""
        try:
            await self._store.command("HDEL", self._keys[0], self._store.replica)
        except StoreUnavailable:
            return  # it is known in a few seconds

    async def _exchange(self) -> None:
        conversation, dispatcher = self.conversation, self._dispatcher
        number, told = conversation.ask(dispatcher.clock())
        try:
            args = (self._store.replica, number, _encode(told), BY_THE_CLOCK_OF_REDIS)
            heard = _decode(await self._store.run(_EXCHANGE, self._keys, args))
        except (StoreUnavailable, msgspec.DecodeError):
            # The store says why, in the log and at /ready.
            dispatcher.carry_out(conversation.lost(dispatcher.clock()))
            return
        self.carried += 1
        dispatcher.carry_out(conversation.heard(heard, dispatcher.clock()))

    async def _until_due(self) -> None:
        loop = asyncio.get_running_loop()
        while (wait_s := self.conversation.due_s() - self._dispatcher.clock()) > 0:
            self._is_urgent.clear()
            timer = loop.call_later(wait_s, self._is_urgent.set)
            try:
                await self._is_urgent.wait()
            finally:
                timer.cancel()
