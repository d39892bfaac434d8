"""What one gateway may use of the engines while it cannot hear the others."""

from __future__ import annotations

import pytest

from policies.capacity.gauges import CapacitySettings, Gauges
from policies.capacity.ledger import BackendLedger
from policies.capacity.obstacle import Obstacle
from policies.replicas.grants import GrantedEngines
from policies.replicas.messages import Grant
from tests.policies.making import make_request


def engine(kv_tokens: int | None) -> BackendLedger:
    ledger = BackendLedger("e", CapacitySettings(), max_num_seqs=8)
    ledger.observe(Gauges(0.0, 0, 0, 0.0, kv_tokens, 16), 0.0)
    return ledger


@pytest.mark.parametrize("kv_tokens", [None, 10_000])
def test_a_gateway_that_had_nothing_to_send_can_send_when_it_is_cut_off(kv_tokens: int | None) -> None:
    ledger = engine(kv_tokens)
    grants = GrantedEngines({"e": ledger})
    for now in range(1, 20):
        grants.hear([Grant(0, 0)], 2, float(now))
    request = make_request(prompt=100, reserved=100)
    assert ledger.obstacle(request, spare=True, absent=False, now=19.5) in (Obstacle.SLOTS, Obstacle.KV)
    grants.cut_off()
    assert ledger.obstacle(request, spare=True, absent=False, now=25.0) is None
    assert ledger.allowance is not None
    assert ledger.allowance.sequences == 4, "half of the slots"


def test_a_gateway_that_had_a_part_goes_on_with_it() -> None:
    ledger = engine(10_000)
    grants = GrantedEngines({"e": ledger})
    for now in range(1, 20):
        grants.hear([Grant(6, 5000)], 2, float(now))
    grants.cut_off()
    assert ledger.allowance is not None
    assert (ledger.allowance.sequences, ledger.allowance.kv_tokens) == (6, 5000)
