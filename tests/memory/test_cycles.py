"""A gateway hardly ever looks for cycles of objects, because that stops every stream. So it must not leave any."""

from __future__ import annotations

import gc

import pytest

from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.orders.policy_entries import POLICIES
from policies.request import ServiceTokens
from tests.policies.making import make_request


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_forgotten_leaves_no_cycle(policy: str) -> None:
    engine = AdmissionEngine(named_policy(policy, flows_max=10))
    for name in ("one", "two"):
        engine.add_backend(name, max_num_seqs=8)

    def serve(number: int) -> None:
        request = make_request(f"tenant-{number}", id=f"request-{number}", arrived_s=float(number))
        engine.arrived(request, float(number))
        engine.finished(request.id, ServiceTokens(request.prompt_tokens, 3), number + 0.5)

    while gc.collect():  # what earlier tests left: finalizers leave more
        pass
    gc.disable()
    try:
        for number in range(200):
            serve(number)
        assert gc.collect() < 200, "objects that only the collector of cycles frees"
    finally:
        gc.enable()
