"""A conversation goes on where its history is, also while that engine has more to prefill than others may add to."""

from __future__ import annotations

from policies.admission.decisions import Dispatch
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.capacity.gauges import Gauges
from policies.capacity.pace import PREFILL_TOKENS_MIN
from tests.policies.making import make_request

BLOCKS = 8
HISTORY, PROMPT = 1600, 2000
BUSY = PREFILL_TOKENS_MIN - 100


def one_is_busy() -> AdmissionEngine:
    """Two engines; the first one has nearly a window of prompt to prefill."""
    engine = AdmissionEngine(named_policy("fairserve", engines=2))
    for name in ("one", "two"):
        engine.add_backend(name, max_num_seqs=64)
        engine.backend_changed(name, Gauges(0.0, running=0, waiting=0), 0.0)
    assert sent(engine.arrived(make_request(prompt=BUSY), 0.0)) == ["one"]
    return engine


def sent(decisions: object) -> list[str]:
    assert isinstance(decisions, list)
    return [decision.backend for decision in decisions if isinstance(decision, Dispatch)]


def goes_on(engine: AdmissionEngine, conversation: int, *homes: str) -> list[str]:
    """Where does the next turn of a conversation go whose history these engines have?"""
    blocks = [conversation * 100 + block for block in range(BLOCKS * PROMPT // HISTORY)]
    for home in homes:
        engine.policy.sent_elsewhere(tuple(blocks[:BLOCKS]), home)
    return sent(engine.arrived(make_request(prompt=PROMPT, prefix=tuple(blocks)), 0.0))


def test_what_only_one_engine_has_starts_there_within_twice_the_window() -> None:
    engine = one_is_busy()
    fits = (2 * PREFILL_TOKENS_MIN - BUSY) // (PROMPT - HISTORY)
    assert fits > 1
    for conversation in range(fits):
        assert goes_on(engine, conversation, "one") == ["one"]
    assert goes_on(engine, fits, "one") == ["two"], "nobody waits for an engine while another one could start it"


def test_what_two_engines_have_may_not_add_to_a_full_window() -> None:
    engine = one_is_busy()
    assert sent(engine.arrived(make_request(prompt=BUSY), 0.0)) == ["two"]
    assert goes_on(engine, 0, "one", "two") == []


def test_of_which_less_than_half_is_there_goes_to_the_one_that_has_room() -> None:
    engine = one_is_busy()
    prefix = tuple(range(10))
    engine.policy.sent_elsewhere(prefix[:5], "one")
    assert sent(engine.arrived(make_request(prompt=PROMPT, prefix=prefix), 0.0)) == ["two"]
