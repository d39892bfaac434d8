"""Of each tenant and minute the slowest request is remembered, whatever others do."""

from __future__ import annotations

import time

from gateway.telemetry.ends import End
from gateway.telemetry.recent_requests import MINUTE_S, RecentRequests
from tests.kit.tracing import end

BEGINS_S = MINUTE_S - (time.time() - time.monotonic()) % MINUTE_S
"""When a minute begins, on the monotonic clock."""


def at(number: int, tenant: str, queue_s: float, **fields: object) -> End:
    """An end of this minute."""
    dispatched_s = BEGINS_S + MINUTE_S * number + 30.0
    return end(tenant, dispatched_s=dispatched_s, ended_s=dispatched_s + 1, service=1.0, queue_s=queue_s, **fields)


def test_a_minute_has_its_requests_and_the_slowest_of_them() -> None:
    recent = RecentRequests(40)
    refused = {"outcome": "refused", "reason": "queue_full"}
    recent.add_reported(
        [at(1, "t", 2.0), at(1, "t", 5.0), at(1, "other", 9.0), at(1, "t", 0.5, **refused), at(2, "t", 1.0)]
    )
    first, second = recent.minutes_of("t")
    assert (first.at_s % MINUTE_S, second.at_s - first.at_s) == (0.0, MINUTE_S)
    assert (first.requests, first.queue_s, first.slowest.queue_s) == (3, 7.5, 5.0)
    assert (first.not_served, first.reason) == (1, "queue_full")
    assert (second.requests, second.not_served, second.reason) == (1, 0, "")
    assert [one.requests for one in recent.minutes_of("t")] == [3, 1], "asking counts nothing again"


def test_a_flood_does_not_make_a_tenant_forget_and_all_is_bounded() -> None:
    recent = RecentRequests(40)
    recent.add_reported([at(1, "quiet", 4.0)])
    recent.add_reported([at(1, "flood", 1.0) for _ in range(1000)])
    assert "quiet" not in {one.tenant for one in recent.latest(1000)}
    assert [one.requests for one in recent.minutes_of("quiet")] == [1]
    assert [one.requests for one in recent.minutes_of("flood")] == [1000]
    recent.add_reported([at(n, "flood", 1.0) for n in range(2, 100)])
    assert recent.minutes_of("quiet") == []
    assert len(recent.minutes_of("flood")) == 20
