"""What is counted of usage has bounds, in users and in sums; the rest is one."""

from __future__ import annotations

from gateway.telemetry.record import Outcome, RequestRecord
from gateway.usage.counts import OTHER_USERS, OTHERS, UsageCounts
from policies.request import Flow, Request, ServiceTokens
from tests.records import record_of


def request_of(user: str = "", tenant: str = "t") -> RequestRecord:
    record = record_of("r")
    record.tenant, record.app, record.model, record.pool = tenant, "app", "m", "pool"
    record.request = Request("r", Flow(tenant, "app", user), 1.0, 1, 1, 0.0)
    record.ended(Outcome.COMPLETED, "", ServiceTokens(3, 2, 1), 0.25)
    return record


def test_users_are_bounded_and_the_rest_are_one() -> None:
    counts = UsageCounts(users_max=2)
    for user in ("a", "b", "", "c", "d", "other", "a", OTHERS):
        counts.ended(request_of(user))
    sums = {key[3]: tally.requests for key, tally in counts.take().items()}
    assert sums == {"a": 2, "b": 1, "": 1, OTHER_USERS: 4}
    counts.ended(request_of("d"))
    assert [key[3] for key in counts.take()] == [OTHER_USERS], "also after they were taken"


def test_what_finds_no_room_is_counted() -> None:
    counts = UsageCounts(users_max=100, sums_max=2)
    for user in "abcde":
        counts.ended(request_of(user))
    assert [key[3] for key in counts.take()] == ["a", "b", OTHER_USERS]
    assert counts.requests_dropped == 0
    for tenant in "abcdef":
        counts.ended(request_of("u", tenant))
    assert counts.requests_dropped == 2
    assert len(counts) == 4


def test_names_of_an_hour_are_bounded() -> None:
    counts = UsageCounts(users_max=1, names_max=20)
    for tenant in range(15):
        counts.ended(request_of("u", str(tenant)))
    sums = counts.take()
    assert len(sums) == 11
    assert sum(tally.requests for key, tally in sums.items() if key[1] == OTHERS) == 5
    counts.ended(request_of("another", "0"))
    assert [key[3] for key in counts.take()] == [OTHER_USERS], "also among the users of a tenant that is told apart"
