"""What was used since the last write, by which tenant and with which model? Sums in memory, one for each hour and key.

Runs for every request, so it only adds numbers. What there are many of is bounded: the users of a tenant in an hour,
the tenants of an hour, and the sums that wait to be written.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import ceil
from typing import Final

from gateway.telemetry.record import Outcome, RequestRecord
from policies.limits.quotas import Used
from policies.request import ServiceTokens

HOUR_S: Final = 3600
OTHERS: Final = "other"
NAMES_MAX: Final = 100_000
"""Tenants and users of one hour; with open access, every made-up key is a tenant."""
SUMS_MAX: Final = 50_000
OTHER_USERS: Final = OTHERS * 26
"""Stands for the users beyond the bound of users counted one by one. Longer than what is kept of any user's name."""

Key = tuple[int, str, str, str, str, str]
"""Hour (since the epoch), tenant, app, user, model and the label of the API key."""


class UsageTotals:
    """What was used under one key."""

    __slots__ = ("cached", "engine_ms", "input", "output", "queue_us", "refused", "requests", "wasted")

    def __init__(self) -> None:
        self.requests = 0
        self.refused = 0
        self.input = 0
        self.cached = 0
        self.output = 0
        self.wasted = 0
        """Tokens that had been spent in interactions which were then cut."""
        self.queue_us = 0
        """Time in the queue, in microseconds, summed as the access log rounds it: to hundredths of a millisecond."""
        self.engine_ms = 0
        """Time at engines, for each answer of a request."""


Sums = dict[Key, UsageTotals]


class UsageCounts:
    """Adds up the requests that end, until somebody takes the sums away to write them."""

    __slots__ = ("_hour", "_names", "_names_max", "_sums", "_sums_max", "_users", "_users_max", "requests_dropped")

    def __init__(self, users_max: int, sums_max: int = SUMS_MAX, names_max: int = NAMES_MAX) -> None:
        """`users_max`: users of one tenant that are counted one by one in an hour; the rest are one user. Beyond
        `sums_max` sums no new user is counted on its own; beyond twice as many there are no new sums at all. At most
        `names_max` tenants and users of an hour are counted by name."""
        self.requests_dropped = 0
        """Requests that no sum has, since there was no room for another sum."""
        self._users_max = users_max
        self._sums_max = sums_max
        self._sums: Sums = {}
        self._hour = 0
        self._names = 0
        self._names_max = names_max
        self._users: dict[str, set[str]] = {}
        """The users of each tenant in this hour."""

    def __len__(self) -> int:
        return len(self._sums)

    def ended(self, record: RequestRecord) -> None:
        """A request ended, in whatever way. Every request that has a line in the access log is counted here."""
        request = record.request
        is_refused = record.outcome == Outcome.REFUSED
        # What a client asks for may be no model at all: only of what came to a pool is it known that it is one.
        model = record.model if record.pool or not is_refused else ""
        user = "" if request is None else request.flow.user
        key = (int(time.time()) // HOUR_S, record.tenant, record.app, user, model, record.key)
        totals = self._sums.get(key)
        if totals is None:
            totals = self._bounded(key)
            if totals is None:
                self.requests_dropped += 1
                return
        service = record.service
        totals.requests += 1
        totals.input += service.prompt
        totals.cached += service.cached or 0
        totals.output += service.output
        totals.queue_us += int(record.queue_s * 100_000 + 0.5) * 10
        if record.was_dispatched and request is not None:
            totals.engine_ms += ceil((record.ended_s - record.dispatched_s) * request.sequences * 1000)
        if is_refused:
            totals.refused += 1
            if request is not None:
                totals.wasted += request.progress.wasted_tokens

    def used(self) -> Iterator[Used]:
        """What each sum says, as it will be written down."""
        for (hour, tenant, _, _, model, _), totals in self._sums.items():
            service = ServiceTokens(totals.input, totals.output, totals.cached)
            requests = totals.requests - totals.refused
            yield Used((hour + 1) * HOUR_S, tenant, model, requests, service, totals.engine_ms)

    def take(self) -> Sums:
        """All that was added since the last time."""
        sums, self._sums = self._sums, {}
        return sums

    def _bounded(self, key: Key) -> UsageTotals | None:
        """A sum for a key that has none, or that of the others. None: there is no room."""
        hour, tenant, app, user, model, label = key
        if hour != self._hour:
            self._hour, self._names, self._users = hour, 0, {}
        users = self._users.get(tenant)
        if users is None:
            if self._names < self._names_max:
                users = self._users[tenant] = set()
                self._names += 1
            else:
                tenant, user, users = OTHERS, "", set()
        if user and user not in users:
            if len(users) < self._users_max and self._names < self._names_max:
                users.add(user)
                self._names += 1
            else:
                user = OTHER_USERS
        if len(self._sums) >= self._sums_max:
            user, label = OTHER_USERS, OTHERS
        key = (hour, tenant, app, user, model, label)
        totals = self._sums.get(key)
        if totals is None and len(self._sums) < 2 * self._sums_max:
            totals = self._sums[key] = UsageTotals()
        return totals
