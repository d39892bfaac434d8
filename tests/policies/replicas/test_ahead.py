"""How far may one gateway go before a request that waits at another? As far as two exchanges carry. Before one of its
own flow: a tenth of a second.
"""

from __future__ import annotations

from math import inf

import pytest

from policies.queue.backlog import Backlog
from policies.replicas.messages import Charge, Standing
from policies.replicas.shared_counters import OWED, SharedCounters
from policies.request import of_batch
from tests.policies.making import make_request

SERVICE = 1000.0
"""What the tenant here receives between two exchanges."""
EXCHANGE_S = 0.025


class Gateway:
    """A tenant has one request running and one waiting; all that the store knows of was charged here."""

    def __init__(self) -> None:
        self.backlog = Backlog(flows_max=10)
        self.counters = SharedCounters(self.backlog, epoch_s=0.0)
        self.running, waiting = make_request("tenant"), make_request("tenant")
        self.flow = waiting.flow
        for request in (self.running, waiting):
            self.backlog.push(request)
        self.backlog.take(self.running)
        self.exchange(inf)

    def exchange(self, since_s: float, *, charged: float = 0.0, elsewhere: float = 0.0) -> None:
        """`charged`: to the tenant here since the last one; `elsewhere`: at other gateways."""
        self.backlog.charge(self.running, self.running.progress.charged + charged)
        charges, _ = self.counters.report(0.0)
        totals = [one.base + one.service + elsewhere for one in charges]
        self.counters.receive(totals, None, since_s, is_forgotten=False)

    def served(self) -> None:
        """As much between any two of very many exchanges."""
        for _ in range(100):
            self.exchange(EXCHANGE_S, charged=SERVICE)

    def is_ahead(self, by: float) -> bool:
        """Of another tenant that waits elsewhere and has received so much less."""
        received = self.counters.standings(0.0)[0].served
        return self.counters.is_ahead(self.flow, waits("other", received - by), 0.0)

    def least_elsewhere(self, *standings: Standing) -> tuple[float | None, float | None]:
        """The least that waits elsewhere, of tenants and of the flows of the tenant."""
        self.counters.wait_elsewhere(standings)
        tenant = self.backlog.tenant("tenant")
        return self.backlog.tenants.least_elsewhere, tenant.flows.least_elsewhere


def waits(tenant: str, served: float, flow: str = "other", flow_served: float = 0.0) -> Standing:
    """A request that waits at another gateway."""
    return Standing(tenant, flow, served, flow_served, 0.0, inside=False)


SERVED = [(EXCHANGE_S, SERVICE, 0.0)] * 100


@pytest.mark.parametrize(
    ("exchanges", "lead"),
    [
        pytest.param([], 0.0, id="at first"),
        pytest.param(SERVED, 2.0 * SERVICE, id="brought by this gateway"),
        pytest.param([(EXCHANGE_S, 0.0, SERVICE)] * 100, 2.0 * SERVICE, id="by others"),
        pytest.param([(EXCHANGE_S, SERVICE / 2, SERVICE / 2)] * 100, 2.0 * SERVICE, id="by both"),
        pytest.param(SERVED + [(EXCHANGE_S, 0.0, 0.0)] * 100, 0.0, id="nothing is served any more"),
        pytest.param([(10.0, 0.0, 1e6)], 0.0, id="by others while this gateway stood still"),
        pytest.param([*SERVED, (-5.0, 0.0, 0.0)], 2.0 * SERVICE, id="a clock that goes back changes nothing"),
    ],
)
def test_the_lead_is_what_two_exchanges_bring(exchanges: list[tuple[float, float, float]], lead: float) -> None:
    """`exchanges`: the time since the one before, and what was charged since, here and at other gateways."""
    gateway = Gateway()
    for since_s, charged, elsewhere in exchanges:
        gateway.exchange(since_s, charged=charged, elsewhere=elsewhere)
    assert gateway.is_ahead(1.01 * lead + 1.0)
    assert not gateway.is_ahead(0.99 * lead)


def test_of_one_flow_the_request_that_came_earlier_goes_first_however_far_the_lead_reaches() -> None:
    """All gateways share its counter, so none is ever ahead of another by it."""
    gateway = Gateway()
    gateway.served()
    [own] = gateway.counters.standings(1.0)
    for came_s, inside, goes_first in (
        (-1.01, False, True), (-0.99, False, False), (1.0, False, False), (1.0, True, True),
    ):  # fmt: skip
        there = own._replace(waited_s=own.waited_s - came_s * 0.1, inside=inside)
        assert gateway.counters.is_ahead(gateway.flow, there, 1.0) is goes_first


def test_where_there_are_rounds_one_may_be_ahead_by_a_round() -> None:
    backlog = Backlog(flows_max=10, quantum=500.0)
    counters, running, waiting = SharedCounters(backlog, epoch_s=0.0), make_request("tenant"), make_request("tenant")
    for request in (running, waiting):
        backlog.push(request)
    backlog.take(running)
    for charged, is_ahead in ((500.0, False), (501.0, True)):
        backlog.charge(running, charged)
        assert counters.is_ahead(waiting.flow, waits("other", 0.0), 0.0) is is_ahead


def test_of_several_flows_that_wait_elsewhere_the_least_counts_until_none_does() -> None:
    gateway = Gateway()
    for served in ((5.0, 3.0), (3.0, 5.0)):
        standings = [waits("tenant", 9.0, f"flow {one}", one) for one in served]
        assert gateway.least_elsewhere(*standings) == (9.0, 3.0)
    assert gateway.least_elsewhere() == (None, None)


def test_a_store_that_has_forgotten_all_hears_again_when_a_flow_left() -> None:
    backlog = Backlog(flows_max=10)
    counters, request = SharedCounters(backlog, epoch_s=100.0), make_request("tenant", user="user")
    backlog.push(request)
    backlog.take(request, is_served=False)
    for now, is_forgotten, left_s in ((1.0, False, [101.0]), (2.0, True, []), (3.0, False, [101.0])):
        charges, lefts = counters.report(now)
        assert [left.left_s for left in lefts if left.among == "tenant"] == left_s
        counters.receive([one.base + one.service for one in charges], None, 1.0, is_forgotten=is_forgotten)


def test_what_is_charged_while_the_store_answers_is_kept() -> None:
    gateway = Gateway()
    charges, _ = gateway.counters.report(0.0)
    before = gateway.counters.standings(0.0)[0]
    gateway.backlog.charge(gateway.running, gateway.running.progress.charged + 500.0)
    totals = [one.base + one.service + 200.0 for one in charges]
    gateway.counters.receive(totals, None, EXCHANGE_S, is_forgotten=False)
    after = gateway.counters.standings(0.0)[0]
    assert after.served - before.served == 700.0
    assert after.flow_served - before.flow_served == 700.0


def test_the_lead_between_flows_of_a_tenant_is_what_two_exchanges_bring_as_well() -> None:
    gateway = Gateway()
    gateway.served()
    own = gateway.counters.standings(0.0)[0]
    for by, is_ahead in ((0.99 * 2.0 * SERVICE, False), (1.01 * 2.0 * SERVICE, True)):
        there = own._replace(flow="another", flow_served=own.flow_served - by)
        assert gateway.counters.is_ahead(gateway.flow, there, 0.0) is is_ahead


def test_what_is_owed_to_batch_is_reported_once_and_is_what_all_gateways_owe() -> None:
    backlog, running = Backlog(flows_max=10), make_request("a")
    backlog.batch_share, backlog.usual_service = 0.5, 1000.0
    counters = SharedCounters(backlog, epoch_s=0.0)
    for request in (running, make_request("a"), make_request(of_batch("b"))):
        backlog.push(request)
    backlog.take(running)
    backlog.charge(running, 100.0)
    *charges, owed = counters.report(0.0)[0]
    assert owed == Charge(OWED, 0.0, 50.0, raises=False)
    backlog.charge(running, 120.0)
    totals = [*[one.base + one.service for one in charges], 80.0]
    counters.receive(totals, None, EXCHANGE_S, is_forgotten=False)
    assert backlog.owed == 90.0, "80 by the reply, and 10 since the report"
    assert counters.report(0.0)[0][-1] == Charge(OWED, 80.0, 10.0, raises=False)


def test_batch_that_is_owed_goes_before_other_work_unless_batch_elsewhere_has_received_less() -> None:
    backlog, batch = Backlog(flows_max=10), make_request(of_batch("b"))
    counters = SharedCounters(backlog, epoch_s=0.0)
    backlog.push(batch)
    own = backlog.tenant(of_batch("b"))
    backlog.batch.charged(own, 5000.0)
    backlog.owed, backlog.usual_service = 2.0, 1.0
    for standings, is_ahead in (((), False), ((waits(of_batch("c"), 1000.0),), True)):
        counters.wait_elsewhere(standings)
        assert counters.is_ahead(batch.flow, waits("a", 0.0), 0.0) is is_ahead


def test_batch_that_waits_elsewhere_goes_after_other_work_unless_it_is_owed() -> None:
    other, batch = waits("a", 9.0, "flow of a"), waits(of_batch("b"), 1.0, "flow of b")
    assert other.goes_first(batch)
    assert not batch.goes_first(other)
    assert batch._replace(is_owed=True).goes_first(other)
