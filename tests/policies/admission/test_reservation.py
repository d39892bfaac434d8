"""A request that fits nowhere has a reservation at one engine, and everything else goes on at the others."""

from __future__ import annotations

import pytest

from policies.admission.decisions import Dispatch
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.capacity.gauges import Gauges
from policies.request import Request, ServiceTokens, of_batch
from tests.policies.making import dispatched, make_request

CAPACITY_TOKENS = 1000
ONE_WINDOW = ("fairserve", "wsc", "vtc", "rr")


def engine_of(policy: str, engines: int = 2) -> AdmissionEngine:
    """Engines of 1,000 KV tokens, each of which runs one request of 500 (`at-e0`, ...)."""
    engine = AdmissionEngine(named_policy(policy, placement="least_loaded"))
    names = [f"e{number}" for number in range(engines)]
    for name in names:
        engine.add_backend(name, max_num_seqs=64)
        engine.backend_changed(name, Gauges(0.0, 0, 0, 0.0, CAPACITY_TOKENS, 16), 0.0)
    for name in names:
        request = sized(f"at-{name}", "a", 500)
        assert Dispatch(request.id, name) in engine.arrived(request, 0.0)
        engine.progressed(request.id, 1, 0.0)
    return engine


def sized(id: str, tenant: str, prompt: int) -> Request:
    return make_request(tenant, id=id, prompt=prompt, output_max=10)


def finish(engine: AdmissionEngine, id: str, now: float) -> list[str]:
    return dispatched(engine.finished(id, ServiceTokens(500, 5), now))


@pytest.mark.parametrize("policy", ONE_WINDOW)
def test_others_go_on_at_the_other_engines_and_none_at_the_one_that_is_kept(policy: str) -> None:
    engine = engine_of(policy)
    assert not engine.arrived(sized("large", "b", 900), 1.0)
    went = [engine.arrived(sized(f"small-{number}", "c", 100), 1.0) for number in range(6)]
    assert {decision.backend for decisions in went for decision in decisions} == {"e1"}
    assert [len(decisions) for decisions in went] == [1, 1, 1, 1, 0, 0], "only so many fit beside 500 tokens"
    assert finish(engine, "at-e0", 2.0)[:1] == ["large"], "nothing came between"


@pytest.mark.parametrize("policy", ONE_WINDOW)
def test_before_one_engine_nothing_overtakes(policy: str) -> None:
    engine = engine_of(policy, engines=1)
    assert not engine.arrived(sized("large", "b", 900), 1.0)
    assert not engine.arrived(sized("small", "c", 100), 1.0)
    assert finish(engine, "at-e0", 2.0) == ["large"]


def test_the_reservation_is_the_next_one_s_and_goes_on_elsewhere_if_its_engine_does() -> None:
    engine = engine_of("vtc", engines=3)
    assert not engine.arrived(sized("large", "b", 900), 1.0)
    engine.backend_changed("e0", False, 1.0)
    assert dispatched(engine.arrived(sized("small", "c", 100), 1.1)) == ["small"]
    assert finish(engine, "at-e1", 2.0) == ["large"], "e1 is kept now, so the small one went to e2"


def test_nothing_is_kept_where_no_other_engine_could_start_anything() -> None:
    engine = engine_of("vtc")
    engine.backend_changed("e1", False, 1.0)
    assert not engine.arrived(sized("large", "b", 900), 1.0)
    assert engine.room.reserve(engine.blocked) is None


def test_batch_beside_an_engine_that_is_kept_is_not_named_as_one_that_could_use_room() -> None:
    engine = engine_of("vtc")
    for id, tenant in (("large", "b"), ("batch", of_batch("c"))):
        assert not engine.arrived(sized(id, tenant, 900), 1.0)
    assert (engine.blocked.request.id, engine.blocked.others) == ("large", ())
    assert not engine.arrived(sized("other", "c", 900), 1.0)
    assert [each.request.id for each in engine.blocked.others] == ["other"]
