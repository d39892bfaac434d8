"""Usage since the last write, summed in memory by hour, tenant, app, user, model and key label.

`ended` runs for every request, so it only adds numbers. Three numbers are bounded: the users of a tenant in an hour,
the tenants and users of an hour, and the sums that wait to be written.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Final

from gateway.telemetry.record import Outcome, RequestRecord
from policies.limits.quotas import UsageBucket
from policies.request import ServiceTokens

HOUR_S: Final = 3600
OTHERS: Final = "other"
NAMES_MAX: Final = 100_000
"""Limit on the tenants and users of one hour; with open access, every made-up key is a tenant."""
SUMS_MAX: Final = 50_000
OTHER_USERS: Final = OTHERS * 26
"""Name of all users beyond the limit on users. Longer than the part that is kept of any user's name."""

Key = tuple[int, str, str, str, str, str]
"""Hour (since the epoch), tenant, app, user, model and the label of the API key."""


@dataclass(slots=True)
class UsageTotals:
    """Usage added up under one `Key`: requests, tokens and times, by the names of the table's columns."""

    requests: int = 0
    refused: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    wasted_tokens: int = 0
    """Tokens spent in interactions that were then aborted."""
    queue_us: int = 0
    """Time in the queue in microseconds. Each request's time is rounded to tens of them, as in the access log."""
    engine_ms: int = 0
    """Time at engines, in milliseconds, times the sequences of each request."""


Sums = dict[Key, UsageTotals]


class UsageCounts:
    """Sums of ended requests, until a writer takes them away."""

    __slots__ = ("_hour", "_names", "_names_max", "_sums", "_sums_max", "_users", "_users_max", "requests_dropped")

    def __init__(self, users_max: int, sums_max: int = SUMS_MAX, names_max: int = NAMES_MAX) -> None:
        """Set the limits.

        Args:
            users_max: users of one tenant that are counted by name in an hour; the rest are one user.
            sums_max: sums beyond which no new user or label is counted by name. Beyond twice this number none is added.
            names_max: tenants and users of an hour that are counted by name.
        """
        self.requests_dropped = 0
        """Requests in no sum, since there was no room for another sum."""
        self._users_max = users_max
        self._sums_max = sums_max
        self._sums: Sums = {}
        self._hour = 0
        self._names = 0
        self._names_max = names_max
        self._users: dict[str, set[str]] = {}
        """Users of each tenant in this hour that are counted by name."""

    def __len__(self) -> int:
        return len(self._sums)

    def ended(self, record: RequestRecord) -> None:
        """Count an ended request, whatever its outcome. Every request with a line in the access log is counted here."""
        request = record.request
        is_refused = record.outcome == Outcome.REFUSED
        # A client may ask for a model that does not exist; a request that came to a pool asked for one that does.
        model = record.model if record.pool or not is_refused else ""
        user = "" if request is None else request.flow.user
        key = (int(time.time()) // HOUR_S, record.tenant, record.app, user, model, record.key)
        totals = self._sums.get(key)
        if totals is None:
            totals = self._new_totals_within_bounds(key)
            if totals is None:
                self.requests_dropped += 1
                return
        service = record.service
        totals.requests += 1
        totals.input_tokens += service.prompt
        totals.cached_tokens += service.cached or 0
        totals.output_tokens += service.output
        totals.queue_us += int(record.queue_s * 100_000 + 0.5) * 10
        if record.was_dispatched and request is not None:
            totals.engine_ms += ceil((record.ended_s - record.dispatched_s) * request.sequences * 1000)
        if is_refused:
            totals.refused += 1
            if request is not None:
                totals.wasted_tokens += request.progress.wasted_tokens

    def used(self) -> Iterator[UsageBucket]:
        """Yield each sum as it will be stored."""
        for (hour, tenant, _, _, model, _), totals in self._sums.items():
            service = ServiceTokens(totals.input_tokens, totals.output_tokens, totals.cached_tokens)
            requests = totals.requests - totals.refused
            yield UsageBucket((hour + 1) * HOUR_S, tenant, model, requests, service, totals.engine_ms)

    def take(self) -> Sums:
        """Return the sums since the last call, and start anew."""
        sums, self._sums = self._sums, {}
        return sums

    def _new_totals_within_bounds(self, key: Key) -> UsageTotals | None:
        """Return the sum for a new key, perhaps under the names of the others; None if there is no room."""
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
