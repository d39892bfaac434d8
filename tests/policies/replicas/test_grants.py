"""What one gateway may use of the engines while it cannot hear the others."""

from __future__ import annotations

import pytest

from policies.capacity.gauges import CapacitySettings, Gauges, Grant
from policies.capacity.lease import Lease
from policies.capacity.ledger import BackendLedger
from policies.capacity.obstacle import Obstacle
from policies.replicas.grants import TRUST_S, GrantedEngines
from policies.replicas.messages import ReplicaView, Standing
from policies.replicas.pool_replica import PoolReplica
from tests.policies.making import make_request, pool_of


def engine(kv_tokens: int | None) -> BackendLedger:
    ledger = BackendLedger("e", CapacitySettings(), max_num_seqs=8)
    ledger.observe(Gauges(0.0, 0, 0, 0.0, kv_tokens, 16), 0.0)
    return ledger


@pytest.mark.parametrize("kv_tokens", [None, 10_000])
def test_a_gateway_that_had_nothing_to_send_can_send_when_it_is_cut_off(kv_tokens: int | None) -> None:
    ledger = engine(kv_tokens)
    grants = GrantedEngines({"e": ledger})
    for now in range(1, 20):
        grants.receive([Grant(0, 0)], float(now))
    request = make_request(prompt=100, reserved=100)
    assert ledger.obstacle(request, 19.5) in (Obstacle.SLOTS, Obstacle.KV)
    grants.cut_off(2)
    assert ledger.obstacle(request, 25.0) is None
    assert ledger.allowance.sequences == 4, "half of the slots"


def test_the_average_of_grants_for_whole_requests_has_room_for_half_a_one_more() -> None:
    ledger = engine(10_000)
    grants = GrantedEngines({"e": ledger})
    grants.receive([Grant(2, 5000)], 1.0)
    lease = Lease(make_request(prompt=1000), "e", 1.0)
    ledger.add(lease)
    grants.cut_off(2)
    assert ledger.allowance.kv_tokens == 5000 + round(lease.footprint_tokens / 2)


def test_a_report_says_what_the_next_request_needs_and_how_many_the_engine_runs() -> None:
    grants = GrantedEngines({"e": engine(10_000)})
    [holding] = grants.holdings(make_request("a", prompt=100, reserved=92, sequences=2), 5, 0.0)
    assert holding[1:] == (0, 0, 0, 8, 10_000, 5, 2, 208)


def test_a_fraction_of_a_sequence_is_used_at_a_later_time() -> None:
    ledger, used = engine(10_000), []
    grants = GrantedEngines({"e": ledger})
    grants.receive([Grant(2, 5000)], 0.0)
    grants.receive([Grant(3, 5000)], 2.5)
    for _ in range(4):
        grants.cut_off(2)
        used.append(ledger.allowance.sequences)
    assert used == [2, 3, 2, 3], "2.5 on average"


def test_a_request_that_waited_elsewhere_long_ago_delays_none() -> None:
    pool = pool_of("e", policy="fcfs", slots=8)
    replica, request = PoolReplica(pool), make_request()
    replica.report(0.0)
    earlier = Standing("", "", 0.0, 0.0, 10.0, inside=False)
    view = ReplicaView(2, earlier, [], [Grant(8, 0)], [], [], [], [], None, is_forgotten=False)
    replica.receive(view, 0.0, 0.0)
    assert [replica.is_preceded(request, now) for now in (0.0, 0.29, 0.31)] == [True, True, False]


def test_a_grant_is_used_no_longer_than_no_other_gateway_may_have_it() -> None:
    ledger, request = engine(10_000), make_request(prompt=100, reserved=100)
    GrantedEngines({"e": ledger}).receive([Grant(8, 10_000)], 1.0)
    assert [ledger.obstacle(request, 1.0 + TRUST_S + late_s) for late_s in (0.0, 0.1)] == [None, Obstacle.CLOSED]
