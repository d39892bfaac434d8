"""How much of a limit may one gateway use without asking the others, and how much while it cannot reach them?"""

from __future__ import annotations

import pytest

from policies.limits.quotas import Quota, Quotas
from policies.replicas.tallies import SharedQuotas
from tests.kit.typed_script_store import TypedScriptStore
from tests.policies.limits.sharing import CountingGateway
from tests.policies.making import make_request

LIMIT, USED, ROUNDS = 4000, 800, 12
LEFT = LIMIT - USED


def told(gateways: int) -> list[SharedQuotas]:
    """So many gateways that have counted this much together, and have said so again and again."""
    store = TypedScriptStore()
    found = [
        CountingGateway(str(number), store, Quotas(Quota(requests_per_minute=LIMIT))) for number in range(gateways)
    ]
    for requests in (USED // gateways - ROUNDS, *[1] * ROUNDS):
        for gateway in found:
            for _ in range(requests):
                gateway.quotas.admitted(make_request(), 0.0)
            gateway.tells(0.0, gateways=gateways)
    return [gateway.shared for gateway in found]


def admitted(shared: SharedQuotas, *, asks: bool) -> int:
    """How many more requests does it admit, or admit without asking the others first (`asks`)?"""
    number = 0
    while not shared.quotas.find_rejection(make_request(), 0.0) and (not asks or shared.is_sure(make_request(), 0.0)):
        shared.quotas.admitted(make_request(), 0.0)
        number += 1
    return number


@pytest.mark.parametrize("gateways", [1, 2, 8])
def test_all_gateways_together_use_a_quarter_of_what_is_left_without_asking(gateways: int) -> None:
    assert LEFT / 6 < sum(admitted(shared, asks=True) for shared in told(gateways)) <= LEFT / 4


def test_what_is_newly_reserved_may_not_be_used_before_the_store_has_counted_it() -> None:
    """Others may have used it since the last reply."""
    reserved = admitted(told(2)[0], asks=True)
    for used in (1, reserved // 2, reserved):
        shared = told(2)[0]
        for _ in range(used):
            shared.quotas.admitted(make_request(), 0.0)
        shared.report(10)
        assert admitted(shared, asks=True) == reserved - used, "what the store has counted since the report before"


@pytest.mark.parametrize("gateways", [1, 2, 8])
def test_without_the_others_each_has_an_equal_part_of_what_is_left(gateways: int) -> None:
    parts = []
    for shared in told(gateways):
        shared.cut_off(refuses=False)
        parts.append(admitted(shared, asks=False))
    assert sum(parts) == pytest.approx(LEFT, rel=0.02)
    assert max(parts) <= 1.05 * min(parts)


def test_a_worker_that_is_the_first_to_report_counts_on_the_others() -> None:
    shared = SharedQuotas(Quotas(Quota(requests_per_minute=LIMIT)), epoch_s=0.0, workers=4)
    shared.receive([], 1, [])
    shared.cut_off(refuses=False)
    assert admitted(shared, asks=False) == LIMIT / 4


def test_of_a_second_that_is_over_or_not_answered_for_nothing_is_reserved() -> None:
    [shared] = told(1)
    shared.quotas.admitted(make_request(), 59.0)
    shared.quotas.admitted(make_request(), 59.5)
    shared.quotas.admitted(make_request(), 60.5)
    first, over, present = sorted(shared.report(10)[:3], key=lambda tally: tally.bucket)
    assert (first.bucket, over.bucket, present.bucket) == (0, 59, 60)
    assert first.base[1] + first.more[1] == USED
    assert over.base[1] + over.more[1] == 2
    assert present.base[1] + present.more[1] == 1, "nor of one that nobody has answered for yet"


def test_nothing_is_reserved_before_it_is_known_what_is_left() -> None:
    """Another gateway may have used all of it."""
    quotas = Quotas(Quota(requests_per_day=100))
    shared = SharedQuotas(quotas, epoch_s=0.0)
    quotas.admitted(make_request("t"), 0.0)
    [report] = shared.report(10)
    assert (report.more[1], report.since) == (1, 0)
    assert not shared.is_sure(make_request("t"), 0.0), "no answer has come yet"
