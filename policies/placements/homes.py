"""Which queued requests find at least half of their prompt cached at an engine? Such an engine is a *home* of theirs.

A request is looked up when another request is dispatched or might be passed, and again when a request that begins alike
is dispatched. So a home may be out of date, and the caller looks the request up again. Everything is O(1) in the length
of the queue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from policies.placements.prefix_index import Prefix, PrefixIndex
from policies.placements.siblings import SamePrefixRequests
from policies.queue.backlog import TRIED
from policies.request import Request

HOMES_MAX: Final = TRIED // 2
"""Homes kept per request. If more engines have its prompt cached, the request finds its prompt almost anywhere."""


def is_local(depth: int, prefix: Prefix) -> bool:
    """Return whether `depth` leading blocks are at least half of the prompt."""
    return 2 * depth >= len(prefix) > 0


class Homes:
    """The requests of one queue, by the engines that have at least half of their prompt cached."""

    def __init__(self, prefixes: PrefixIndex) -> None:
        self.prefixes = prefixes
        self._siblings = SamePrefixRequests()
        self._new: dict[str, Request] = {}
        """Requests that are not looked up yet. Most requests are dispatched before that."""
        self._homes: dict[str, list[str]] = {}
        """Homes of all other requests."""
        self._at: dict[str, OrderedDict[str, OrderedDict[str, Request]]] = {}
        """Requests by home and tenant."""

    def is_alone(self, request: Request) -> bool:
        """Return whether this is the only queued request with a known prompt."""
        return len(self._new) + len(self._homes) == 1 and (request.id in self._new or request.id in self._homes)

    def add(self, request: Request) -> None:
        """Add a queued request with a known prompt."""
        self._new[request.id] = request

    def remove(self, request: Request) -> None:
        """Remove a request that has left the queue."""
        if self._new.pop(request.id, None) is None and request.id in self._homes:
            self._siblings.remove(request)
            self._leave(request)

    def sent(self, prefix: Prefix) -> None:
        """Look up some queued requests that begin like a dispatched request: its engine may be a home of theirs now."""
        if not self._new and not self._homes:
            return
        self._look_up_new()
        for request in self._siblings.nearest(prefix):
            self._leave(request)
            self._look_up(request)

    def at(self, engine: str) -> Iterator[Request]:
        """Yield at most `TRIED` requests whose home is this engine, of up to `TRIED` tenants in turn.

        Tenants and requests that are yielded move to the end, so others are tried next time.
        """
        self._look_up_new()
        tenants = self._at.get(engine)
        if not tenants:
            return
        some = min(TRIED, len(tenants))
        for _ in range(some):
            tenant = next(iter(tenants))
            tenants.move_to_end(tenant)
            requests = tenants[tenant]
            for _ in range(min(TRIED // some, len(requests))):
                request_id = next(iter(requests))
                requests.move_to_end(request_id)
                yield requests[request_id]

    def _look_up_new(self) -> None:
        """Look up the homes of the requests that came since the last call."""
        for request in self._new.values():
            self._siblings.add(request)
            self._look_up(request)
        self._new.clear()

    def _look_up(self, request: Request) -> None:
        depths = self.prefixes.depths(request.prefix)
        found = sorted([(-depth, name) for name, depth in depths.items() if is_local(depth, request.prefix)])
        homes = self._homes[request.id] = [name for _, name in found[:HOMES_MAX]]
        for name in homes:
            tenants = self._at.setdefault(name, OrderedDict())
            tenants.setdefault(request.flow.tenant, OrderedDict())[request.id] = request

    def _leave(self, request: Request) -> None:
        """Remove a request from the tables of its homes."""
        for name in self._homes.pop(request.id):
            tenants = self._at[name]
            requests = tenants[request.flow.tenant]
            del requests[request.id]
            if not requests:
                del tenants[request.flow.tenant]
                if not tenants:
                    del self._at[name]
