"""P9: the bound that a policy claims holds on random traces, and the same check finds policies that break it.

The server is that of VTC's theorems: so many requests at a time, one token each per step, the policy asked at every
step. Everything that may happen to a request does: answers are cut off, backends send requests back, tenants go idle
and return, drip one request at a time, mispredict. Whoever waits all the while is compared with everybody else.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import permutations

import pytest

from lab.vtc.unfair_orders import Lcf
from policies.admission.policy import Policy
from policies.orders.cost import Cost, LinearCost, ProfiledCost
from policies.orders.vtc import CounterParams
from policies.request import Flow, Request, ServiceTokens
from tests.policies.making import Room, make_request
from tests.policies.orders.claims import CLAIMS, fair_policy, make

TRACES = 1000
STEPS = 50
COSTS: dict[str, Cost] = {"linear": LinearCost(), "profiled": ProfiledCost()}


@dataclass(frozen=True)
class Habit:
    """How does one tenant behave?"""

    weight: float
    users: int
    prompt_max: int
    output_max: int
    style: str
    """flood: always more waiting than fit; on-off: the same, with pauses; drip: one more whenever none waits."""
    guess: float
    """What is predicted of its answers, as a share of the longest."""
    inside: float
    """Part of its calls that are inside an interaction."""


@dataclass(frozen=True)
class Trace:
    """One random setting: everything that follows is decided by the seed."""

    seed: int
    slots: int
    habits: dict[str, Habit]
    service: str
    predict_output: bool

    @classmethod
    def of(cls, seed: int, costs: tuple[str, ...] = tuple(COSTS)) -> Trace:
        rng, insides = random.Random(seed), random.Random(-seed - 1)
        habits = {
            tenant: Habit(
                rng.choice([0.5, 1.0, 2.0, 5.0]),
                rng.randint(1, 3),
                rng.choice([1, 5, 60]),
                rng.choice([1, 4, 12]),
                rng.choice(["flood", "flood", "on-off", "drip"]),
                rng.random(),
                insides.choice([0.0, 0.1, 0.5, 1.0]),
            )
            for tenant in "abc"
        }
        return cls(seed, rng.randint(1, 6), habits, rng.choice(costs), rng.random() < 0.5)

    @property
    def cost(self) -> Cost:
        return COSTS[self.service]

    def bound(self, name: str, least_weight: float) -> float:
        """What the policy claims, from the most that this trace can charge at once."""
        prompt = max(habit.prompt_max for habit in self.habits.values())
        output = max(habit.output_max for habit in self.habits.values())
        at_dispatch = self.cost(ServiceTokens(prompt, 0))
        streamed = self.slots * (self.cost(ServiceTokens(prompt, output)) - at_dispatch)
        claimed = CLAIMS[name].bound
        return claimed(at_dispatch, streamed, least_weight)


@dataclass
class Party:
    """A tenant, or one flow of a tenant: what it has received per weight, and whether it waits."""

    weight: float
    received: float = 0.0
    queued: int = 0


@dataclass
class Pair:
    """One who waits against another one: how far has the first fallen behind, over any interval in which it waits?"""

    one: Party
    other: Party
    both: float
    """Bound while both wait (theorem 4.4)."""
    any: float
    """Bound whatever the other one does (theorem 4.9)."""
    highest: float = 0.0
    highest_both: float = 0.0

    def missing(self) -> str | None:
        """By how much it is behind, if that is more than the bound; asked after every step."""
        gap = self.one.received / self.one.weight - self.other.received / self.other.weight
        if not self.one.queued:
            self.highest = self.highest_both = gap
            return None
        self.highest = max(self.highest, gap)
        self.highest_both = max(self.highest_both, gap) if self.other.queued else gap
        if self.highest_both - gap > self.both + 1e-6:
            return f"{self.highest_both - gap:.0f} behind one who waits too, more than {self.both:.0f}"
        if self.highest - gap > self.any + 1e-6:
            return f"{self.highest - gap:.0f} behind another one, more than {self.any:.0f}"
        return None


@dataclass
class Running:
    request: Request
    length: int
    worth: float
    """Service that it has received."""
    output: int = 0


@dataclass
class Server:
    """Runs one trace on one policy, and says who was treated worse than the policy claims."""

    policy: Policy
    trace: Trace
    running: list[Running] = field(default_factory=list)
    paused: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng, self.insides = random.Random(self.trace.seed), random.Random(self.trace.seed)
        habits = self.trace.habits
        self.tenants = {tenant: Party(habit.weight) for tenant, habit in habits.items()}
        self.flows = {
            Flow(tenant, "", str(user)): Party(1.0) for tenant, habit in habits.items() for user in range(habit.users)
        }

    def complaints(self, bound: Callable[[float], float]) -> Iterator[str]:
        """`bound`: of the least weight among those compared."""
        among_tenants, inside = bound(min(party.weight for party in self.tenants.values())), bound(1.0)
        pairs = [
            Pair(one, other, among_tenants, 2 * among_tenants)
            for one, other in permutations(self.tenants.values(), 2)
        ] + [
            Pair(self.flows[one], self.flows[other], inside, 2 * inside)
            for one, other in permutations(self.flows, 2)
            if one.tenant == other.tenant
        ]  # fmt: skip
        for step in range(STEPS):
            self.arrivals(step)
            self.dispatches()
            self.tokens()
            yield from [complaint for pair in pairs if (complaint := pair.missing()) is not None]

    def arrivals(self, step: int) -> None:
        for flow, party in self.flows.items():
            habit = self.trace.habits[flow.tenant]
            if habit.style == "drip":
                wanted = 1
            elif habit.style == "on-off" and self.is_paused(flow.tenant, step):
                wanted = 0
            else:
                wanted = self.trace.slots + 1
            for _ in range(wanted - party.queued):
                self.push(self.new_request(flow, habit))

    def is_paused(self, tenant: str, step: int) -> bool:
        until = self.paused.get(tenant, 0)
        if step >= until and self.rng.random() < 0.03:
            until = self.paused[tenant] = step + self.rng.randint(1, 60)
        return step < until

    def new_request(self, flow: Flow, habit: Habit) -> Request:
        request = make_request(
            flow.tenant,
            user=flow.user,
            weight=habit.weight,
            prompt=self.rng.randint(1, habit.prompt_max),
            output_max=habit.output_max,
            expected=habit.guess * habit.output_max,
        )
        request.progress.inside = self.insides.random() < habit.inside
        return request

    def push(self, request: Request, *, front: bool = False) -> None:
        self.policy.push(request, 0.0, front=front)
        self.tenants[request.flow.tenant].queued += 1
        self.flows[request.flow].queued += 1

    def dispatches(self) -> None:
        while len(self.running) < self.trace.slots and len(self.policy):
            selection = self.policy.pop(0.0, Room())
            request = selection.request
            self.tenants[request.flow.tenant].queued -= 1
            self.flows[request.flow].queued -= 1
            self.charge(request, 0, final=False)
            if self.rng.random() < 0.03:  # the backend has no room for it after all
                self.policy.charge(request, ServiceTokens(0, 0), 0.0, final=True)
                self.push(request, front=True)
                return
            one = Running(request, self.rng.randint(1, request.output_tokens_max), 0.0)
            self.running.append(one)
            self.received(one)

    def tokens(self) -> None:
        for one in list(self.running):
            one.output += 1
            self.received(one)
            ended = one.output == one.length or self.rng.random() < 0.02  # it is complete, or its client is gone
            self.charge(one.request, one.output, final=ended)
            if ended:
                self.running.remove(one)

    def charge(self, request: Request, output: int, *, final: bool) -> None:
        self.policy.charge(request, ServiceTokens(request.prompt_tokens, output), 0.0, final=final)

    def received(self, one: Running) -> None:
        worth = self.trace.cost(ServiceTokens(one.request.prompt_tokens, one.output))
        self.tenants[one.request.flow.tenant].received += worth - one.worth
        self.flows[one.request.flow].received += worth - one.worth
        one.worth = worth


def complaint(policy: Policy, trace: Trace, bound: str) -> str | None:
    """The first one in this trace about a policy that claims this bound."""
    return next(Server(policy, trace).complaints(lambda weight: trace.bound(bound, weight)), None)


@fair_policy
@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(25, TRACES), marks=pytest.mark.slow)], ids=str)
def test_p9_the_bound_holds_on_a_thousand_random_traces(name: str, seeds: range) -> None:
    for seed in seeds:
        trace = Trace.of(seed, CLAIMS[name].costs)
        policy = make(name, cost=trace.service, predict_output=trace.predict_output)
        found = complaint(policy, trace, name)
        assert found is None, f"{found}: {trace}"


NO_WINDOW = {"window_tokens": 1e9, "window_calls": 1e9}
BREAKERS: dict[str, tuple[str, Callable[[Trace], Policy]]] = {
    "arrival order": ("vtc", lambda trace: make("fcfs")),
    "no lift": (
        "vtc",
        lambda trace: Policy(Lcf(CounterParams(cost=trace.service, predict_output=trace.predict_output))),
    ),
    "no window": ("fairserve", lambda trace: make("fairserve", **NO_WINDOW)),
}


@pytest.mark.interpreted_only("extends a policy")
@pytest.mark.parametrize("breaker", BREAKERS)
def test_p9_the_bound_is_one_that_is_broken_by(breaker: str) -> None:
    claim, policy = BREAKERS[breaker]
    traces = [Trace.of(seed, CLAIMS[claim].costs) for seed in range(TRACES)]
    assert any(complaint(policy(trace), trace, claim) for trace in traces)
