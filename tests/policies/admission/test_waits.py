"""What held a request back: each moment of its wait counts once, for the obstacle that there was then."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest

from policies.admission.decisions import Decision, Dispatch, Reject
from policies.admission.engine import AdmissionEngine
from policies.admission.explanation import waited_in_words
from policies.admission.waits import seconds_of
from policies.capacity.gauges import CapacitySettings
from policies.capacity.obstacle import Obstacle
from policies.orders.policy_entries import POLICIES
from policies.request import Rejection, RejectReason, Request, ServiceTokens, State
from tests.policies.admission.world import World
from tests.policies.making import SilentGateways, make_request, policy_with, pool_of


class Watched(World):
    """A world in which somebody notes of every waiting request, after each event, what it waits for from then on."""

    def __init__(self, policy: str, seed: int) -> None:
        self.waits_for: dict[str, Obstacle] = {}
        self.since_s = 0.0
        self.seconds: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.dispatched_s: dict[str, float] = {}
        super().__init__(policy, seed, slots=(None, 4, 8)[: 1 + seed % 3])

    def carry(self, pool: AdmissionEngine, decisions: Sequence[Decision]) -> None:
        for one, obstacle in self.waits_for.items():
            self.seconds[one][obstacle] += self.now - self.since_s
        for one in self.dispatched_s.keys() & self.waiting.keys():
            self.seconds[one][Obstacle.RETURNED] += self.now - self.dispatched_s.pop(one)
        for decision in decisions:
            wait = self.waiting[decision.id][0].progress.wait
            assert +Counter(seconds_of(wait)) == pytest.approx(+self.seconds[decision.id])
            if isinstance(decision, Dispatch):
                self.dispatched_s[decision.id] = self.now
        super().carry(pool, decisions)
        self.since_s = self.now
        self.waits_for = {one: self.obstacle(pool, request) for one, (request, _) in self.waiting.items()}
        for one, obstacle in self.waits_for.items():
            expected = self.seconds[one] + Counter({obstacle: 0.5})
            assert pool.explain(one, self.now + 0.5).waited_s == pytest.approx(+expected)

    def obstacle(self, pool: AdmissionEngine, request: Request) -> Obstacle:
        heads = (pool.blocked, *pool.blocked.others) if pool.blocked is not None else ()
        if heads and all(each.nearest() is Obstacle.CLOSED for each in heads):
            return Obstacle.CLOSED
        return next((each.nearest() for each in heads if each.request is request), Obstacle.TURN)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_each_moment_of_a_wait_counts_once_for_the_obstacle_of_that_moment(policy: str) -> None:
    for seed in range(6):
        world = Watched(policy, seed)
        for _ in range(100):
            world.event()


def full() -> AdmissionEngine:
    """One engine with one slot, which is taken, and nothing beyond."""
    engine = pool_of("one", policy=policy_with("fcfs"), slots=1, capacity=CapacitySettings(waiting_target=0))
    assert engine.arrived(make_request("a", id="first"), 0.0)
    engine.progressed("first", 1, 0.0)
    return engine


def waited(engine: AdmissionEngine, request_id: str, now: float) -> str:
    found = engine.explain(request_id, now)
    return waited_in_words(found.waited_s, {}, found.flow.tenant)


def test_a_wait_names_who_was_ahead() -> None:
    by, ahead = {"kv": 0.15, "turn": 1.9}, {"late": 1, "batch": 48, "own": 14, "x": 2, "y": 1}
    assert waited_in_words(by, ahead, "own") == (
        "waited 2.05 s behind 48 requests of batch, 14 of its own tenant, 2 of x, 2 of 2 more: "
        "1.9 s for its turn, 0.15 s for KV"
    )
    assert waited_in_words({"kv": 1.0}, {"t": 1}, "t") == "waited 1 s behind 1 request of its own tenant: 1 s for KV"


def test_a_wait_is_told_in_one_sentence() -> None:
    engine = full()
    for number, tenant in enumerate("baaa"):
        assert not engine.arrived(make_request(tenant, id=f"q{number}", arrived_s=1.0), 1.0)
    assert waited(engine, "q3", 1.5) == "waited 0.5 s: 0.5 s for its turn"
    now = 2.0
    for done, following in (("first", "q0"), ("q0", "q1"), ("q1", "q2"), ("q2", "q3")):
        now += 0.25
        assert engine.finished(done, ServiceTokens(10, 5), now) == [Dispatch(following, "one")]
        engine.progressed(following, 1, now)
    assert waited(engine, "q0", 9.0) == "waited 1.25 s: 1.25 s for a sequence slot"
    assert waited(engine, "q1", 9.0) == "waited 1.5 s: 1.25 s for its turn, 0.25 s for a sequence slot"
    assert waited(engine, "first", 9.0) == ""
    assert engine.explain("first", 9.0).reason == "dispatched to one at once: no other engine had room"


@pytest.mark.parametrize("refused", [None, Rejection(RejectReason.RATE_LIMITED, 1.0)])
def test_the_answer_of_other_gateways_is_waited_for(refused: Rejection | None) -> None:
    engine = full()
    engine.peers = SilentGateways()
    request = make_request("a", id="x", arrived_s=1.0)
    assert not engine.arrived(request, 1.0)
    assert request.progress.state is State.UNDECIDED
    engine.peers_asked("x", 1.25)
    assert "0.5 s for the answer of other gateways" in waited(engine, "x", 1.5)
    decisions = engine.decided("x", refused, 2.0)
    if refused is not None:
        assert isinstance(decisions[0], Reject)
        expected = {"asked": 1.0}
    else:
        engine.finished("first", ServiceTokens(10, 5), 3.0)
        expected = {"asked": 1.0, "slots": 1.0}
    assert seconds_of(request.progress.wait) == expected
