"""What waits in a pool without an engine, and goes on waiting in another: who goes first, and what is noted of it."""

from __future__ import annotations

import pytest

from policies.admission.decisions import Dispatch
from policies.admission.engine import AdmissionEngine
from policies.admission.takeover import MOVED_MAX, has_place, move, stranded
from policies.admission.waits import seconds_of
from policies.capacity.gauges import CapacitySettings
from policies.capacity.obstacle import Obstacle
from policies.interactions import Interactions
from policies.limits.quotas import Quota, Quotas
from policies.orders.policy_entries import POLICIES
from policies.queue.bounds import QueueLimits
from policies.request import Claim, Request, ServiceTokens, State
from tests.policies.making import make_request, policy_with, pool_of

ONE_AT_A_TIME = CapacitySettings(waiting_target=0)
LIMITS = QueueLimits(queue_requests_max=100, queue_wait_s_max=20.0, queue_wait_s_max_inside=40.0)


class Two:
    """Two pools of one gateway, each with an engine that runs one request at a time."""

    def __init__(self, policy: str = "fairserve") -> None:
        self.quotas = Quotas(Quota(requests_per_minute=1000, tokens_per_minute=100_000, concurrent=200))
        self.interactions = Interactions()
        self.source, self.target = (
            AdmissionEngine(
                policy_with(policy), limits=LIMITS, capacity=ONE_AT_A_TIME, interactions=self.interactions,
                quotas=self.quotas,
            )
            for _ in range(2)
        )  # fmt: skip
        self.source.add_backend("s", max_num_seqs=1)
        self.target.add_backend("t", max_num_seqs=1)
        self.source.arrived(make_request("x", id="runs"), 0.0)

    def taken(self, now: float) -> dict[str, int]:
        """What tenant `a` has taken of its limits."""
        return {limit.name: limit.limit - limit.remaining for limit in self.quotas.standing("a", now)}

    def go(self, now: float) -> list[Request]:
        """Those that move at this time, as they are there."""
        gone = []
        for request in stranded(self.source):
            moved = Request(
                request.id, request.flow, request.weight, 2 * request.prompt_tokens, 50, request.arrived_s,
                claim=request.claim, progress=request.progress,
            )  # fmt: skip
            move(self.source, self.target, request, moved, now)
            gone.append(moved)
        self.source.woke(now)
        return gone


def test_only_where_no_engine_is_in_service_and_of_each_tenant_as_many() -> None:
    two = Two()
    for place in range(2 * MOVED_MAX):
        two.source.arrived(make_request("a", id=f"a{place}", arrived_s=0.1), 0.1)
    for place in range(3):
        two.source.arrived(make_request("b", id=f"b{place}", arrived_s=0.2), 0.2)
    assert stranded(two.source) == []
    two.source.backend_changed("s", False, 1.0)
    gone = [request.id for request in two.go(1.0)]
    assert gone == [f"a{place}" for place in range(MOVED_MAX - 3)] + ["b0", "b1", "b2"]
    assert [request.id for request in two.go(1.1)] == [f"a{MOVED_MAX - 3 + place}" for place in range(MOVED_MAX)]
    two.go(1.2)
    assert (two.source.queued, two.target.queued) == (0, 2 * MOVED_MAX + 3)
    two.source.backend_changed("s", True, 1.3)
    assert stranded(two.source) == []


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_it_is_charged_once_and_counted_once(policy: str) -> None:
    two = Two(policy)
    waits = make_request("a", id="waits", claim=Claim("i"), arrived_s=0.5)
    two.source.arrived(waits, 0.5)
    deadline_s = waits.progress.deadline_s
    two.source.backend_changed("s", False, 1.0)
    [moved] = two.go(2.0)
    assert (moved.progress.state, moved.progress.deadline_s) == (State.QUEUED, deadline_s)
    assert two.taken(2.0) == {"requests": 1, "tokens": 20, "concurrent": 1}
    assert two.target.woke(3.0) == [Dispatch("waits", "t")]
    two.target.finished("waits", ServiceTokens(20, 5), 4.0)
    assert two.taken(4.0) == {"requests": 1, "tokens": 25, "concurrent": 0}
    interaction = moved.progress.interaction
    if interaction is not None:
        assert (interaction.calls, interaction.under_way, interaction.tokens) == (1, 0, 25)
    assert two.interactions.wasted_tokens == 0
    assert len(two.source.policy) == len(two.target.policy) == 0


def test_all_of_its_wait_is_kept_with_its_reasons() -> None:
    two = Two()
    two.target.arrived(make_request("y", id="busy"), 0.0)
    two.source.arrived(make_request("a", id="first", arrived_s=1.0), 1.0)
    two.source.arrived(make_request("a", id="second", arrived_s=1.0), 1.0)
    two.source.backend_changed("s", False, 3.0)
    first, second = two.go(7.0)
    two.target.woke(7.0)
    assert two.target.explain("second", 8.0).waited_s == {Obstacle.TURN: 3.0, Obstacle.CLOSED: 4.0}
    two.target.finished("busy", ServiceTokens(10, 1), 12.0)
    assert seconds_of(first.progress.wait) == {Obstacle.SLOTS: 7.0, Obstacle.CLOSED: 4.0}
    two.target.finished("first", ServiceTokens(10, 1), 15.0)
    assert seconds_of(second.progress.wait) == {Obstacle.TURN: 7.0, Obstacle.CLOSED: 4.0, Obstacle.SLOTS: 3.0}


def test_it_has_a_place_only_where_nobody_gives_way() -> None:
    engine = pool_of(
        "t", policy=policy_with("fairserve"), slots=1, limits=QueueLimits(queue_requests_max=1), capacity=ONE_AT_A_TIME
    )
    engine.arrived(make_request("x", id="runs"), 0.0)
    assert has_place(engine, make_request("a"))
    engine.arrived(make_request("b", id="waits"), 0.0)
    assert not has_place(engine, make_request("a", weight=100.0))
