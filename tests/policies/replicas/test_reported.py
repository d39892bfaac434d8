"""What other gateways are told of is bounded, however much changes before they can be told."""

from __future__ import annotations

from math import inf, nan

import pytest

from policies.limits.quotas import Quota, Quotas
from policies.limits.sliding_counts import SlidingCounts, rolling
from policies.queue.backlog import Backlog
from policies.replicas.messages import Charge, Holding, ReplicaReport, ReplicaView, is_answer
from policies.replicas.shared_counters import SharedCounters
from policies.replicas.tallies import SharedCounts
from policies.request import ServiceTokens
from tests.kit.typed_script_store import TypedScriptStore
from tests.policies.limits.sharing import CountingGateway
from tests.policies.making import make_request


def test_counters_that_cannot_be_told_to_other_gateways_are_bounded() -> None:
    backlog = Backlog(flows_max=8)
    shared = SharedCounters(backlog, epoch_s=0.0)
    for number in range(100):
        request = make_request("tenant", app="app", user=f"user{number}")
        backlog.push(request)
        backlog.take(request, is_served=False)
    assert len(backlog.changed) <= 10
    charges, _ = shared.report(0.0)
    assert len(charges) <= 10


def test_counts_that_cannot_be_told_to_other_gateways_are_bounded() -> None:
    counts = SlidingCounts(rolling(60.0), members_max=8)
    shared = SharedCounts("users", counts, epoch_s=0.0)
    for number in range(100):
        counts.at(10.0 * number)
        counts.add(number, (0, 1, 0, 0))
    assert len(counts.pending) == 8
    assert len(shared.report(1000)) == 7, "the eighth no longer counts"


@pytest.mark.parametrize(
    ("view", "why"),
    [
        ({"totals": [nan]}, "not a number"),
        ({"totals": [inf]}, "infinite"),
        ({"totals": [-2e18]}, "more than anybody counts"),
        ({"totals": []}, "less than was told"),
        ({"totals": [1.0, 2.0]}, "more than was told"),
        ({"grants": []}, "no grant"),
        ({"opened": [None]}, "an interaction that was not told"),
    ],
)
def test_what_is_no_answer_to_what_was_told_is_known(view: dict[str, object], why: str) -> None:
    report = ReplicaReport([], [Holding("b", 1, 10, 10, 4, 0)], [Charge("t", 0.0, 5.0, False)], [], [], [], [], 0.0)
    answer: ReplicaView = TypedScriptStore().exchange("one", 1, report, 0)
    assert is_answer(answer, report)
    assert not is_answer(answer._replace(**view), report), why


class Counting:
    """One gateway at which b waits, and a."""

    def __init__(self, name: str, exchange: TypedScriptStore) -> None:
        self.backlog = Backlog(flows_max=10)
        for tenant, weight in (("b", 1.0), ("a", 0.01), ("a", 0.01)):
            self.backlog.push(make_request(tenant, weight=weight))
        self._shared = SharedCounters(self.backlog, epoch_s=0.0)
        self._name, self._exchange, self._number = name, exchange, 0

    def tells(self) -> None:
        self._number += 1
        charges, lefts = self._shared.report(0.0)
        report = ReplicaReport(self._shared.standings(0.0), [], charges, [], [], [], lefts, 0.0)
        view = self._exchange.exchange(self._name, self._number, report, 0)
        self._shared.receive(view.totals, view.left, 0.025, is_forgotten=view.is_forgotten)
        self._shared.wait_elsewhere(view.standings, view.replicas)

    def lead(self) -> float:
        ahead, next_one = self.backlog.tenant("a"), self.backlog.tenant("b")
        return ahead.counter - next_one.counter


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_new_weight_converts_a_lead_once_however_many_gateways_count_it(count: int) -> None:
    exchange = TypedScriptStore()
    gateways = [Counting(str(number), exchange) for number in range(count)]
    first = gateways[0].backlog
    went = first.head()
    assert went.flow.tenant == "a", "of equals the first by name"
    first.take(went)
    first.charge(went, 1000.0)
    for gateway in gateways * 3:
        gateway.tells()
    assert [gateway.lead() for gateway in gateways] == pytest.approx([100_000.0] * count)
    for gateway in gateways:
        gateway.backlog.reweigh("a", 0.01, 1.0)
    for gateway in gateways * 3:
        gateway.tells()
    assert [gateway.lead() for gateway in gateways] == pytest.approx([1000.0] * count)


class Gateway(CountingGateway):
    """One gateway that counts the tokens of a minute together with others."""

    def __init__(self, name: str, store: TypedScriptStore) -> None:
        super().__init__(name, store, Quotas(Quota(tokens_per_minute=1000)))

    def asks(self, prompt: int, now: float) -> None:
        self.quotas.admitted(make_request("t", prompt=prompt), now)
        self.tells(now)

    def tokens(self) -> tuple[int, int]:
        """Counted in and after the second 60, and before."""
        counts = self.quotas.minute
        each = {bucket: counts.measures("t", bucket)[2] for bucket in range(counts.oldest, counts.bucket + 1)}
        before = sum([tokens for bucket, tokens in each.items() if bucket < 60])
        return sum(each.values()) - before, before


@pytest.mark.parametrize("told_s", [[], [58.5], [58.5, 61.5], [61.5]], ids=str)
def test_what_ends_later_is_taken_back_from_the_second_that_all_gateways_count(told_s: list[float]) -> None:
    exchange = TypedScriptStore()
    one, other = Gateway("one", exchange), Gateway("other", exchange)
    for gateway in (one, other):
        gone, served = make_request("t", prompt=300), make_request("t", prompt=50)
        for request in (gone, served):
            gateway.quotas.admitted(request, 58.0)
        for now in told_s:
            gateway.asks(7, now)
        gateway.quotas.ended(gone, ServiceTokens(0, 0), 62.0)
        gateway.quotas.ended(served, ServiceTokens(60, 0), 62.0)
        gateway.tells(62.5)
        if gateway is one:
            assert gateway.tokens()[1] == 50 + 7 * len([now for now in told_s if now < 60])
    before = [50 + 7 * len([now for now in told_s if now < 60])] * 2
    after = [10 + 7 * len([now for now in told_s if now > 60])] * 2
    exchanged = Gateway("third", exchange)
    exchanged.asks(1, 63.0)
    assert exchanged.tokens()[1] >= sum(before)
    for _ in range(2):  # what was reserved in advance is given back when nothing more comes
        one.tells(63.5)
        other.tells(63.5)
    exchanged = Gateway("fourth", exchange)
    exchanged.asks(1, 64.0)
    assert exchanged.tokens()[1] == sum(before)
    assert exchanged.tokens()[0] >= sum(after)
    for gateway in (one, other):
        assert min(gateway.tokens()) >= 0
        assert gateway.tokens()[1] >= before[0]


def test_what_another_gateway_had_reserved_is_free_once_it_is_taken_back() -> None:
    exchange = TypedScriptStore()
    one, other = Gateway("one", exchange), Gateway("other", exchange)
    for gateway, now in ((one, 10.0), (one, 10.1), (other, 10.2), (other, 11.0)):
        gateway.asks(7, now)
    assert other.quotas.minute.measures("t", 10)[2] > 3 * 7, "with what is reserved"
    one.tells(11.1)
    other.asks(7, 12.0)
    assert other.quotas.minute.measures("t", 10)[2] == 3 * 7


def test_a_gateway_that_refuses_hears_of_reservations_that_are_taken_back() -> None:
    exchange = TypedScriptStore()
    one, other = Gateway("one", exchange), Gateway("other", exchange)
    for gateway in (one, one, other):
        gateway.asks(100, 10.0)
    rest = 1000 - other.quotas.minute.sums("t")[2]
    assert rest < 700, "some of it is reserved"
    other.asks(rest, 10.0)
    one.tells(10.1)
    assert other.quotas.find_rejection(make_request("t", prompt=700 - rest), 10.1) is not None
    assert other.shared.is_sure(make_request("t", prompt=700 - rest), 10.1), "it is refused at once"
    other.tells(10.2)
    assert other.quotas.find_rejection(make_request("t", prompt=700 - rest), 10.2) is None
    assert other.quotas.find_rejection(make_request("t", prompt=701 - rest), 10.2) is not None
