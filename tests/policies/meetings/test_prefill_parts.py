"""Answers that run, beside prompts of others that would go into the slots left free, and what else the rule meets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.capacity.gauges import CapacitySettings, Gauges, Grant
from policies.capacity.lease import Lease
from policies.capacity.ledger import BackendLedger
from policies.capacity.pace import PrefillLead
from policies.placements.prefill_parts import PrefillParts
from policies.queue.counters import CounterHeap, CounterMember
from policies.request import Flow, Request
from policies.tree.terms import ROOT
from tests.policies.meetings.prefill_flood import H100, HONEST, MEDIUM, STREAMS, Clients, of_alone, serve
from tests.policies.meetings.world import tree

FLOOD = Clients("flood", 60)
WANTED = 0.45
"""Of its output alone. Its part is 0.5; a window that is used once is in it."""
RATE = 10_000.0


def by_client(id: str) -> int:
    """The gateway of this request of one of two, in turn."""
    return int(id.split("/")[0]) % 2


def by_tenant(id: str) -> int:
    return int(int(id.split("/")[0]) >= STREAMS.clients)


@pytest.mark.parametrize("steps", [True, False], ids=["steps", "pages"])
def test_running_answers_have_their_part_beside_a_prefill_flood(steps: bool) -> None:
    alone, beside = serve(STREAMS, steps=steps), serve(STREAMS, FLOOD, steps=steps)
    pace = beside.output[HONEST] / alone.output[HONEST]
    assert WANTED <= pace < 0.55, "the rest is for prompts"
    prefill = beside.prompt["flood"] * MEDIUM.per_prefill_token_s
    assert pace + prefill > 0.97, "the engine is not idle"


TWO_ENGINES = {"engine": MEDIUM, "engines": 2}
FLOOR = tree({}, {HONEST: (ROOT, {"guaranteed_share": 0.75}), "flood": (ROOT, {})})
CEILING = tree({}, {"flood": (ROOT, {"max_running": 2}), HONEST: (ROOT, {})})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flood", "how", "least"),
    [
        pytest.param(Clients("flood", 100), {"engine": H100}, WANTED, id="H100, steps"),
        pytest.param(Clients("flood", 100), {"engine": H100, "steps": False}, WANTED, id="H100, pages"),
        pytest.param(Clients("flood", 100), TWO_ENGINES, WANTED, id="two engines, steps"),
        pytest.param(Clients("flood", 100), {**TWO_ENGINES, "steps": False}, WANTED, id="two engines, pages"),
        *[pytest.param(FLOOD, {"policy": policy}, WANTED, id=policy) for policy in ("vtc", "dlpm", "d2lpm", "rr")],
        pytest.param(FLOOD, {"weights": {HONEST: 3.0}}, 0.7, id="the part follows weights"),
        pytest.param(FLOOD, {"tree": FLOOR}, 0.7, id="the part follows floors"),
        pytest.param(FLOOD, {"tree": CEILING}, WANTED, id="a flood at its ceiling"),
        pytest.param(Clients("flood", 60, batch=True), {}, WANTED, id="a flood of class batch"),
        pytest.param(Clients(HONEST, 60, batch=True), {}, WANTED, id="its own prompts of class batch"),
        pytest.param(FLOOD, {"gateways": 2, "at": by_client}, WANTED, id="both tenants at both gateways"),
        pytest.param(FLOOD, {"gateways": 2, "at": by_tenant}, 0.4, id="each tenant at a gateway of its own"),
    ],
)
def test_running_answers_have_their_part(flood: Clients, how: dict[str, Any], least: float) -> None:
    assert of_alone([flood], **how) >= least


@pytest.mark.slow
def test_answers_of_class_batch_hold_nobody() -> None:
    batch = Clients(HONEST, 12, 100, 400, 0.0, batch=True)
    held, free = (serve(batch, FLOOD, is_held=is_held) for is_held in (True, False))
    assert held.prompt["flood"] >= 0.99 * free.prompt["flood"]


def test_an_engine_that_shows_nothing_is_used_as_without_the_rule() -> None:
    """Such an engine is not looked at, so the pace of its prefill is not known."""
    ledger = BackendLedger("e", CapacitySettings())
    parts = PrefillParts({"e": ledger})
    parts.window_tokens = 0.0
    lease = _lease("flood", 0, 2_000)
    ledger.add(lease)
    parts.began(lease, 0.0)
    assert parts.held_until_s(lease.request, ledger, 0.0) is None


# --- the theorem of `policies.placements.prefill_parts` ---


def _lease(leaf: str, number: int, prompt: int) -> Lease:
    lease = Lease(Request(f"{leaf}/{number}", Flow(leaf), 1.0, prompt, 10_000, 0.0), "e", 0.0)
    lease.prefill_tokens = prompt
    return lease


def _learn(ledger: BackendLedger) -> None:
    """Let the ledger see an answer's steps of 10 ms, and of as much more as prompts take at `RATE`."""
    now = 0.0
    answer = _lease("before", 0, 100)
    ledger.add(answer)
    ledger.started(answer, now)
    for number in range(100):
        ledger.prefill_pace.made_tokens += 1
        tokens = 1_000 * (number % 2)
        now += 0.01 + tokens / RATE
        if tokens:
            prompt = _lease("before", number, tokens)
            ledger.add(prompt)
            ledger.started(prompt, now)
            ledger.remove(prompt, now)
        ledger.observe(Gauges(now, running=1, waiting=0, is_step=True), now)  # vLLM tells no step's tokens unless asked
    ledger.remove(answer, now)
    assert ledger.prefill_pace.tokens_per_s() == pytest.approx(RATE)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4_000), st.floats(0.0, 1.0)), max_size=60),
    st.floats(0.0, 20_000.0),
)
def test_others_begin_what_the_theorem_says_at_most(starts: list[tuple[int, int, float]], window: float) -> None:
    """One leaf has a running answer throughout. Three others begin whatever they are let."""
    ledger = BackendLedger("e", CapacitySettings())
    _learn(ledger)
    parts = PrefillParts({"e": ledger})
    parts.window_tokens = window
    answer = _lease("honest", 0, 100)
    answer.started_s = 0.0
    ledger.add(answer)
    now = begun = longest = 0.0
    leaves: set[str] = set()
    for number, (tenant, prompt, pause_s) in enumerate(starts):
        lease = _lease(f"flood-{tenant}", number, prompt)
        now += pause_s
        until_s = parts.held_until_s(lease.request, ledger, now)
        if until_s is not None:
            assert until_s > now
            now = until_s
            assert parts.held_until_s(lease.request, ledger, now + 1e-6) is None, "held no longer than it was told"
        ledger.add(lease)
        parts.began(lease, now)
        ledger.remove(lease, now)
        begun, longest = begun + prompt, max(longest, prompt)
        leaves.add(lease.request.flow.tenant)
        g = 1 / 4  # with fewer leaves it is larger
        assert begun <= RATE * (1 - g) * now + len(leaves) * (window + longest) + 1.0


def test_nothing_is_held_where_no_answer_runs_and_a_window_is_used_once() -> None:
    ledger = BackendLedger("e", CapacitySettings())
    _learn(ledger)
    parts = PrefillParts({"e": ledger})
    parts.window_tokens = 5_000.0

    def held(leaf: str) -> float | None:
        return parts.held_until_s(_lease(leaf, 0, 2_000).request, ledger, 0.0)

    for number in range(10):
        assert held("flood") is None
        parts.began(_lease("flood", number, 2_000), 0.0)
    answer = _lease("honest", 0, 100)
    ledger.add(answer)
    assert held("flood") is None, "no answer runs yet"
    answer.started_s = 0.0
    # 2,000 beyond the window, which half of the rate pays for: what was begun while nobody ran is no debt.
    assert held("flood") == pytest.approx(2_000 / (RATE / 2))
    assert held("other") is None
    ledger.allowance = Grant(100, 100_000, sharers=2)
    assert held("flood") == pytest.approx(2_000 / (RATE / 2 / 2)), "each of two gateways has half of the rate"
    inside = _lease("flood", 1, 2_000).request
    inside.progress.inside = True
    assert parts.held_until_s(inside, ledger, 0.0) is None
    answer.request = Request("honest/0", Flow("honest"), 1.0, 100, 1, 0.0)
    assert held("flood") is None, "the answer makes no further token"


def test_a_lead_is_not_paid_for_the_time_before_it_began() -> None:
    """A flood after a pause has its window once, even if an older lead was unpaid until then."""
    ledger = BackendLedger("e", CapacitySettings())
    _learn(ledger)
    parts = PrefillParts({"e": ledger})
    parts.window_tokens = 5_800.0
    answer = _lease("honest", 0, 100)
    answer.started_s = 0.0
    ledger.add(answer)
    prompt = _lease("flood", 0, 2_000)
    parts.began(_lease("other", 0, 1), 0.0)
    for paid_s, now in ((0.0, 0.1), (50.0, 90.0)):
        assert parts.held_until_s(prompt.request, ledger, paid_s) is None
        begun = 0
        while parts.held_until_s(prompt.request, ledger, now) is None:
            parts.began(prompt, now)
            begun += 2_000
        assert begun == 6_000, "the least multiple of a prompt beyond the window"


def test_a_tenant_that_is_held_still_raises_those_who_begin_to_wait() -> None:
    """Else a tenant whose answers run would save up service for as long as others are held because of it."""
    counters: CounterHeap[CounterMember] = CounterHeap()
    held, honest = CounterMember(("flood",)), CounterMember(("honest",))
    held.counter = 900.0
    for member in (honest, held):
        counters.queued(member)
    counters.left(honest, is_served=True)
    counters.sleep(held, is_floor=True)
    counters.queued(honest)
    assert honest.counter == 900.0


def test_what_one_leaf_does_not_need_pays_for_the_others_by_weight() -> None:
    ledger = BackendLedger("e", CapacitySettings())
    _learn(ledger)
    parts = PrefillParts({"e": ledger})
    parts.window_tokens, ledger.leads_paid_s = 0.0, 0.0
    for leaf, tokens, weight in (("a", 10.0, 1.0), ("b", 100.0, 1.0), ("c", 300.0, 3.0)):
        lead = ledger.prefill_leads[leaf] = PrefillLead()
        lead.tokens, lead.weight = tokens, weight
    answer = _lease("b", 0, 100)
    answer.started_s = 0.0
    ledger.add(answer)
    request = _lease("b", 1, 100).request
    assert parts.held_until_s(request, ledger, 100 / RATE) is None, "it is ahead, so its own answer holds nobody"
    left = {leaf: lead.tokens for leaf, lead in ledger.prefill_leads.items()}
    assert left == pytest.approx({"b": 100 - 90 / 4, "c": 300 - 90 * 3 / 4})
