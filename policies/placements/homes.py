"""Which queued requests find at least half of their prompt cached at an engine? Such a request is at home there.

A request is looked up when another one is sent or might be passed, and again when one that begins alike is sent
somewhere. So what is noted here may be out of date: the caller looks the request up again. Everything is O(1) in the
length of the queue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from policies.placements.prefix_index import Prefix, PrefixIndex
from policies.placements.siblings import Siblings
from policies.queue.backlog import TRIED
from policies.request import Request

HOMES_MAX: Final = TRIED // 2
"""Engines that one request is noted at. Where more have its prompt, it finds it wherever it goes."""


def is_local(depth: int, prefix: Prefix) -> bool:
    """Are at least half of the blocks among these leading ones?"""
    return 2 * depth >= len(prefix) > 0


class Homes:
    """The requests of one queue by the engines that have most of their prompt."""

    def __init__(self, prefixes: PrefixIndex) -> None:
        self._prefixes = prefixes
        self._siblings = Siblings()
        self._requests: dict[str, Request] = {}
        self._new: dict[str, Request] = {}
        """Those of them that are still to be looked up. Most go at once, and never are."""
        self._homes: dict[str, list[str]] = {}
        self._at: dict[str, OrderedDict[str, OrderedDict[str, Request]]] = {}
        """By engine and tenant."""

    def is_alone(self, request: Request) -> bool:
        """Does no other one wait whose prompt is known?"""
        return len(self._requests) == 1 and request.id in self._requests

    def add(self, request: Request) -> None:
        """The request is queued."""
        if request.prefix:
            self._requests[request.id] = self._new[request.id] = request

    def remove(self, request: Request) -> None:
        """The request has left the queue."""
        if self._requests.pop(request.id, None) is not None and self._new.pop(request.id, None) is None:
            self._siblings.remove(request)
            self._leave(request)

    def sent(self, prefix: Prefix) -> None:
        """A request with this prefix was sent to an engine. Queued ones that begin alike may be at home there now."""
        if not self._requests:
            return
        self._look_up_new()
        for request_id in list(self._siblings.nearest(prefix)):
            request = self._requests[request_id]
            self._leave(request)
            self._look_up(request)

    def at(self, engine: str) -> Iterator[Request]:
        """The requests to try there: of as many tenants as there are. What is named now comes later the next time."""
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
        for request in self._new.values():
            self._siblings.add(request)
            self._look_up(request)
        self._new.clear()

    def _look_up(self, request: Request) -> None:
        found = [
            (-depth, name)
            for name, depth in self._prefixes.depths(request.prefix).items()
            if is_local(depth, request.prefix)
        ]
        found.sort()
        homes = self._homes[request.id] = [name for _, name in found[:HOMES_MAX]]
        for name in homes:
            tenants = self._at.setdefault(name, OrderedDict())
            tenants.setdefault(request.flow.tenant, OrderedDict())[request.id] = request

    def _leave(self, request: Request) -> None:
        for name in self._homes.pop(request.id, ()):
            tenants = self._at[name]
            requests = tenants[request.flow.tenant]
            del requests[request.id]
            if not requests:
                del tenants[request.flow.tenant]
                if not tenants:
                    del self._at[name]
