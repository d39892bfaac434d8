"""Which engines are asked, when are they asked again, and which of them get a request?"""

from __future__ import annotations

import pytest

from policies.admission.decisions import Dispatch, Failure
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from tests.policies.making import make_request


def engines_of(policy: str, *names: str, slots: int | None = 4) -> AdmissionEngine:
    engine = AdmissionEngine(named_policy(policy, engines=len(names)))
    for name in names:
        engine.add_backend(name, max_num_seqs=slots)
    return engine


@pytest.mark.parametrize("policy", ["fairserve", "vtc", "fcfs"])
def test_an_engine_that_runs_nothing_is_tried_whatever_was_learned_of_it(policy: str) -> None:
    engine = engines_of(policy, "full")
    engine.add_backend("idle")
    engine.backend_changed("idle", False, 0.0)
    while not engine.queued:
        engine.arrived(make_request("a"), 0.0)
    engine.cancelled(next(iter(engine.books.waiting.requests)), 0.0)
    engine.backends["idle"].slots.refused(1)
    engine.backend_changed("idle", True, 1.0)
    assert engine.arrived(make_request("b", id="x", sequences=2), 1.0) == [Dispatch("x", "idle")]
