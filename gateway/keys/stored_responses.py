"""Whose is a stored response, and which engine has it?

An engine keeps responses (`/v1/responses`) by ids of its own, and shows them to any client that knows an id. So the
gateway notes each id that an answer gives out. Later requests with this id go to the engine that has the response, and
only its tenant can use it. An id that is not noted does not exist: after a restart its tenant is not known.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from gateway.http.errors import ApiError, Reason
from gateway.keys.identity import Principal
from gateway.storage.store import Store, listen
from gateway.storage.store_errors import StoreError
from policies.recent import given_up

KEPT_S: Final = 30 * 86_400.0
"""Seconds for which an id is kept after it was given out or asked for; OpenAI keeps a response this long."""
ID_LENGTH_MAX: Final = 128
CHANNEL: Final = "* responses"
"""Channel of the store. No pool has this name, since it has a space."""
Note = tuple[str, str, str, str, str]
"""Tenant, id, and the model and engine of `ResponseLocation`."""


class ResponseLocation(NamedTuple):
    """Location of a response: the model by the client's and by the engines' name, and the engine."""

    asked: str
    model: str
    engine: str
    until_s: float


def unknown(id: str) -> ApiError:
    """Return the error for a response that does not exist, or that is not the caller's."""
    message = f"the response '{id[:100]}' is not known here; where it was to go on, send the conversation itself"
    return ApiError(Reason.NOT_FOUND, message, param="response_id")


class StoredResponses:
    """Responses that were given out, by tenant and id. Beyond `most`, the tenant with most of them loses its oldest."""

    def __init__(self, most: int, store: Store | None = None) -> None:
        """Begin empty. `store`: channel to other gateways, for `report` and `listen`; None if there are no others."""
        self._most = most
        self._store = store
        self._count = 0
        self._tenants: dict[str, dict[str, ResponseLocation]] = {}
        self._untold: deque[Note] = deque(maxlen=0 if store is None else most)
        self._wakes = asyncio.Event()

    def __len__(self) -> int:
        return self._count

    def note(self, note: Note, now: float) -> None:
        """Remember the location of a response that this gateway has given out."""
        if len(note[1]) <= ID_LENGTH_MAX:
            self._keep(note, now)
            self._untold.append(note)
            self._wakes.set()

    def find(self, principal: Principal, id: str, now: float) -> ResponseLocation:
        """Return the location of a response. Raise ApiError 404 if it is not known.

        A response exists for the keys of its tenant that may ask for its model. For other keys the error is that of an
        id which was never given out.
        """
        found = self._tenants.get(principal.tenant, {}).get(id)
        if found is None or found.until_s <= now or not any(map(principal.may_ask, found[:2])):
            raise unknown(id)
        self._keep((principal.tenant, id, found.asked, found.model, found.engine), now)
        return found

    async def report(self) -> None:
        """Wait for new responses, and report them to the other gateways."""
        await self._wakes.wait()
        self._wakes.clear()
        notes = list(self._untold)
        self._untold.clear()
        assert self._store is not None
        with suppress(StoreError):
            await self._store.publish(CHANNEL, msgspec.msgpack.encode(notes))

    async def listen(self) -> None:
        """Receive the reports of other gateways until the connection is lost, and wait a second."""
        assert self._store is not None
        await listen(self._store, CHANNEL, self.heard)

    def heard(self, content: bytes) -> None:
        """Remember the responses that another gateway reports. Ignore a malformed message."""
        with suppress(ValueError):
            for note in msgspec.msgpack.decode(content, type=list[Note]):
                self._keep(note, time.monotonic())

    def _keep(self, note: Note, now: float) -> None:
        tenant, id, asked, model, engine = note
        own = self._tenants.setdefault(tenant, {})
        self._count += own.pop(id, None) is None
        own[id] = ResponseLocation(model if asked == model else asked, model, engine, now + KEPT_S)
        if self._count > self._most:
            for name, oldest in given_up(self._tenants, self._most):
                del self._tenants[name][oldest]
                self._count -= 1
                if not self._tenants[name]:
                    del self._tenants[name]
