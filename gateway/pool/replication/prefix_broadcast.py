"""Broadcast of the prompts that each gateway has sent. A message is sent once and never stored.

Each message goes to all listening gateways, and only to them. Listening that fails starts again after a second. A lost
message is no fault of the shared state, and no reason to go on alone.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from gateway.pool.dispatcher import Dispatcher
from gateway.storage.store import Store, listen
from gateway.storage.store_errors import StoreError, StoreRefused
from policies.replicas.messages import PrefixReport
from policies.replicas.prefixes import SharedPrefixes
from policies.replicas.schedule import INTERVAL_S

logger = logging.getLogger("fairgate")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PrefixReport).decode


class PrefixBroadcast:
    """Publisher of the prompts that this gateway has sent (`report`), and subscriber to those of others (`listen`)."""

    def __init__(self, store: Store, pool: str, dispatcher: Dispatcher) -> None:
        self._pool = pool
        self._has_ignored = False
        """Whether a message could not be read."""
        engine = dispatcher.engine
        self._shared = SharedPrefixes(engine.policy, engine.backends, name=store.replica)
        self._store = store
        self._wakes = asyncio.Event()
        self._is_refused = False
        dispatcher.listeners.append(self._wake_if_due)

    def _wake_if_due(self) -> None:
        """Wake `report` if there is something to publish. Called after each event of the admission engine."""
        if self._shared.has_report:
            self._wakes.set()

    async def report(self) -> None:
        """Wait until there is something to publish, publish it, and wait for `INTERVAL_S`."""
        await self._wakes.wait()
        self._wakes.clear()
        try:
            await self._store.publish(self._pool, _encode(self._shared.report()))
        except StoreError as error:
            self._log_refusal(error)
        await asyncio.sleep(INTERVAL_S)

    async def listen(self) -> None:
        """Apply the reports of others until the subscription ends, then wait for `RETRY_S`."""
        await listen(self._store, self._pool, self._apply, self._log_refusal)

    def _apply(self, content: bytes) -> None:
        """Apply another gateway's report. Warn once of a report that cannot be read."""
        try:
            is_applied = self._shared.receive(_decode(content))
        except ValueError:
            is_applied = False
        if not is_applied and not self._has_ignored:
            self._has_ignored = True
            logger.warning(
                "pool %s: another gateway's report of prompts cannot be read, and is ignored; do all run one version?",
                self._pool,
            )

    def _log_refusal(self, error: StoreError) -> None:
        """Log a refusal once. The store itself logs its failures."""
        if isinstance(error, StoreRefused) and not self._is_refused:
            self._is_refused = True
            logger.warning(
                "pool %s: gateways cannot tell each other which prompts their engines have cached: %s",
                self._pool,
                error,
            )
