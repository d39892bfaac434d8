"""How does a process hear the other gateways, whose messages come on a channel of their store?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from gateway.storage.store import Store
from gateway.storage.store_errors import StoreError

RETRY_S: Final = 1.0


def _ignore(error: StoreError) -> None:
    """Do nothing: the store logs its faults."""


async def listen(
    store: Store, channel: str, received: Callable[[bytes], None], lost: Callable[[StoreError], None] = _ignore
) -> None:
    """Receive a channel's messages until the connection to the store is lost, and wait a second."""
    try:
        await store.subscribe(channel, received)
    except StoreError as error:
        lost(error)
    await asyncio.sleep(RETRY_S)
