"""WSC and FairServe: what calls are worth, who goes first, how far ahead, and what cheating gains."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.admission.policy import Policy
from policies.admission.takeover import adopt, read, snapshot
from policies.capacity.obstacle import Blocked, Obstacle
from policies.capacity.output_lengths import ENOUGH
from policies.limits.throttle import Ceilings, ThrottleSettings
from policies.orders.fairserve import FairServe, FairServeParams
from policies.orders.order import Selection
from policies.orders.profiles import CLAMP, NEUTRAL, Profiles
from policies.orders.wsc import WscParams
from policies.placements.placement_entries import PLACEMENTS
from policies.request import Flow, Pressure, Request, ServiceTokens
from tests.policies.making import Room, make_request

LEARNED = 4 * ENOUGH


# --- what a call is worth ---


def taught(worths: dict[tuple[str, str, int], float], profiles: Profiles | None = None) -> Profiles:
    profiles = Profiles() if profiles is None else profiles
    for _ in range(LEARNED):
        for (scope, app, stage), worth in worths.items():
            profiles.learn(scope, app, stage, worth)
    return profiles


def test_what_is_known_of_a_stage_falls_back_to_its_app_its_scope_the_pool_and_nothing() -> None:
    profiles = taught({("t", "agent", 1): 1000.0, ("t", "agent", 2): 3000.0, ("t", "chat", 1): 200.0})
    assert profiles.norm("t", "agent", 1) == pytest.approx(1000.0)
    assert profiles.norm("t", "agent", 2) == pytest.approx(3000.0)
    assert profiles.norm("t", "agent", 9) == pytest.approx(2000.0, rel=0.1)
    assert profiles.norm("t", "unseen", 1) == pytest.approx(1400.0, rel=0.1)
    assert profiles.norm("u", "agent", 1) == pytest.approx(1400.0, rel=0.1), "of another tenant only the pool is known"
    assert Profiles().norm("t", "agent", 1) == NEUTRAL


def test_tenants_do_not_teach_each_other() -> None:
    policy = named_policy("wsc")
    for _ in range(LEARNED):
        policy.order.learn(make_request("long", app="chat"), ServiceTokens(9000, 1000), 0.0)
        policy.order.learn(make_request("short", app="chat"), ServiceTokens(90, 10), 0.0)
    norms = [push(policy, make_request(tenant, app="chat")).progress.norm for tenant in ("long", "short")]
    assert norms == pytest.approx([10_000.0, 100.0])


def test_equation_2_with_the_constants_as_printed() -> None:
    assert Profiles().worth(100, 30, 7) == 1 * 70 + 2 * 30 + 1 * 7
    assert Profiles((1.0, 1.0, 2.0)).worth(100, 30, 7) == 70 + 30 + 14


def test_no_answer_moves_a_weight_far_and_no_app_weighs_beyond_the_clamp() -> None:
    profiles = taught({("t", "a", 1): 100.0, ("t", "b", 1): 100.0})
    profiles.learn("t", "a", 1, 1e9)
    assert profiles.norm("t", "a", 1) < 115.0
    profiles = taught({("t", "small", 1): 1.0, **{("t", f"big{n}", 1): 1e6 for n in range(3)}})
    assert profiles.norm("t", "small", 1) >= 7e5 / CLAMP


def test_weights_that_are_set_are_not_learned() -> None:
    profiles = taught({("t", "a", 1): 9.0}, Profiles(weights={"a": 50.0, "b": [10.0, 20.0]}))
    assert [profiles.norm("t", "a", stage) for stage in (1, 5)] == [50.0, 50.0]
    assert [profiles.norm("t", "b", stage) for stage in (1, 2, 7)] == [10.0, 20.0, 20.0]


@pytest.mark.parametrize(
    "wrong", [{"alpha": -1}, {"alpha": 0, "gamma": 0}, {"weights": {"a": 0.0}}, {"weights": {"a": []}}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="wsc"):
        WscParams(**wrong)


def test_populations_are_bounded() -> None:
    profiles = Profiles()
    for number in range(20_000):
        profiles.learn(f"t{number}", "a", 1, 10.0)
    assert len(profiles) <= 16_384


def test_what_was_learned_is_restored_and_nothing_else_is_taken_for_it() -> None:
    profiles = taught({("t", "agent", 1): 1000.0, ("t", "chat", 40): 200.0})
    learned = profiles.snapshot()
    fresh = Profiles()
    fresh.adopt(fresh.read(learned))
    assert [fresh.norm("t", app, 1) for app in ("agent", "chat", "")] == [
        profiles.norm("t", app, 1) for app in ("agent", "chat", "")
    ]
    for wrong in (
        [],
        {"units": [1, 2, 1]},
        {**learned, "worths": [["t", "a", 1, 1, float("inf")]]},
        {**learned, "pool": []},
    ):
        with pytest.raises(ValueError, match=r"expected|missing|row"):
            fresh.read(wrong)
    with pytest.raises(ValueError, match="alpha, beta, gamma"):
        Profiles((1.0, 1.0, 1.0)).read(learned)
    assert fresh.snapshot() == learned


def test_fairserve_restores_all_or_nothing() -> None:
    def engine() -> AdmissionEngine:
        return AdmissionEngine(named_policy("fairserve"))

    taught_one, fresh = engine(), engine()
    for _ in range(LEARNED):
        taught_one.policy.order.learn(make_request("t", app="a"), ServiceTokens(70, 30), 0.0)
    learned = snapshot(taught_one)
    parts = learned["policy"]
    assert isinstance(parts, dict)
    with pytest.raises(ValueError, match="missing"):
        read(fresh, {**learned, "policy": {**parts, "profiles": {}}})
    assert snapshot(fresh) == snapshot(engine()) != learned
    adopt(read(fresh, learned))
    assert snapshot(fresh) == learned


# --- order ---


def push(policy: Policy, request: Request, *, inside: bool = False) -> Request:
    request.progress.inside = inside
    policy.push(request, 0.0)
    return request


def pop(policy: Policy) -> Request:
    selection = policy.pop(0.0, Room())
    assert isinstance(selection, Selection)
    policy.charge(selection.request, ServiceTokens(selection.request.prompt_tokens, 0), 0.0, final=False)
    return selection.request


def test_users_of_one_tenant_are_compared_by_what_is_normal_for_their_app() -> None:
    policy = named_policy("wsc", weights={"long": 1000.0, "short": 10.0})
    for _ in range(40):
        push(policy, make_request("t", app="long", prompt=1000))
        push(policy, make_request("t", app="short", prompt=10))
    apps = [pop(policy).flow.app for _ in range(20)]
    assert apps.count("long") == apps.count("short") == 10


def test_system_tokens_cost_their_own_factor() -> None:
    policy = named_policy("wsc", weights={"": 100.0})
    plain = push(policy, make_request("t", user="u", prompt=100))
    system = push(policy, make_request("t", user="v", prompt=100, system=60))
    pop(policy), pop(policy)
    assert plain.progress.normalised == pytest.approx(1.0)
    assert system.progress.normalised == pytest.approx(1.6)
    assert plain.progress.charged == system.progress.charged == 100.0, (
        "between tenants only what the engine counts counts"
    )


@pytest.mark.parametrize("across", [False, True])
def test_what_a_tenant_teaches_decides_between_tenants_only_if_the_operator_says_so(across: bool) -> None:
    policy = named_policy("wsc", weights={"long": 1000.0, "short": 10.0}, across_tenants=across)
    for _ in range(600):
        push(policy, make_request("l", app="long", prompt=1000))
        push(policy, make_request("s", app="short", prompt=10))
    tenants = [pop(policy).flow.tenant for _ in range(202)]
    assert tenants.count("s") == (101 if across else 200)


def test_a_prediction_is_charged_at_dispatch_and_corrected() -> None:
    policy = named_policy("wsc", weights={"": 10.0})
    request = push(policy, make_request("t", prompt=10, expected=20.0))
    pop(policy)
    assert (request.progress.charged, request.progress.normalised) == (50.0, 3.0)
    policy.charge(request, ServiceTokens(10, 30), 0.0, final=False)
    assert (request.progress.charged, request.progress.normalised) == (70.0, 4.0)
    policy.charge(request, ServiceTokens(10, 5), 0.0, final=True)
    assert (request.progress.charged, request.progress.normalised) == (20.0, 1.5)


def test_calls_inside_an_interaction_go_before_starts_up_to_the_window() -> None:
    policy = named_policy("fairserve", window_tokens=250.0)
    for _ in range(10):
        push(policy, make_request("b", prompt=100))
        push(policy, make_request("a", prompt=100), inside=True)
    assert "".join(pop(policy).flow.tenant for _ in range(10)) == "aaabababab"


def test_a_tenant_is_preferred_until_its_last_call_inside_has_gone() -> None:
    policy = named_policy("fairserve", window_tokens=250.0, window_calls=10.0)
    push(policy, make_request("a", user="x", prompt=100), inside=True)
    for tenant, user in (("a", "x"), ("a", "y"), ("b", "x")):
        push(policy, make_request(tenant, user=user, prompt=100))
    order = [pop(policy).flow[::2] for _ in range(4)]
    assert order == [("a", "x"), ("b", "x"), ("a", "y"), ("a", "x")]


def test_inside_a_tenant_the_window_is_in_calls() -> None:
    policy = named_policy("fairserve", weights={"": 100.0}, window_calls=2.0)
    for _ in range(10):
        push(policy, make_request("t", user="b", prompt=100))
        push(policy, make_request("t", user="a", prompt=100), inside=True)
    assert "".join(pop(policy).flow.user for _ in range(8)) == "aabababa"


def test_among_calls_inside_the_least_served_owner_goes_first() -> None:
    policy = named_policy("fairserve", window_tokens=1000.0)
    for _ in range(3):
        push(policy, make_request("a", prompt=100), inside=True)
        push(policy, make_request("b", prompt=250), inside=True)
        push(policy, make_request("c", prompt=1))
    assert "".join(pop(policy).flow.tenant for _ in range(6)) == "abaabb"


def test_a_flow_serves_its_own_open_interactions_first() -> None:
    policy = named_policy("fairserve")
    start = push(policy, make_request("a"))
    going_on = push(policy, make_request("a"), inside=True)
    assert [pop(policy), pop(policy)] == [going_on, start]


def test_a_returned_call_goes_back_to_the_head_of_those_inside() -> None:
    policy = named_policy("fairserve")
    first = push(policy, make_request("a"), inside=True)
    push(policy, make_request("a"), inside=True)
    assert pop(policy) is first
    policy.charge(first, ServiceTokens(0, 0), 0.0, final=True)
    policy.push(first, 0.0, front=True)
    assert pop(policy) is first


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_limits_refuse_under_every_placement(placement: str) -> None:
    limits = Ceilings(starts=20)
    policy = named_policy("fairserve", placement=placement, throttle=ThrottleSettings(user=limits))
    pressure = Pressure(True, "full")
    refused = 0
    for _ in range(200):
        request = make_request("flood")
        if policy.order.refusal(request, 0.0, pressure) is not None:
            refused += 1
            continue
        policy.push(request, 0.0)
        policy.pop(0.0, Full())
    assert refused == 180


def test_without_a_limit_nothing_is_counted_and_with_one_all_queues_count_together() -> None:
    free = FairServe()
    for number in range(3):
        free.push(make_request("a", user=f"u{number}"), 0.0)
    assert (free.throttle, free.counts) == (None, {})
    assert free.refusal(make_request("a"), 0.0, Pressure(True, "full")) is None
    limited = FairServe(FairServeParams(throttle=ThrottleSettings(user=Ceilings(starts=1))))
    assert limited.beside("one").counts is limited.counts != {}
    limited.resume(free)
    free.resume(limited)
    assert free.counts == {}


class Full:
    """Two engines, neither of which has room."""

    def with_room(self, request: Request) -> Blocked:
        return Blocked(request, dict.fromkeys(self.loads(), Obstacle.KV))

    def blocked_at(self, request: Request, engine: str) -> Blocked:
        return Blocked(request, {engine: Obstacle.KV})

    def reserve(self, blocked: Blocked) -> str | None:
        return None

    def loads(self) -> dict[str, int]:
        return {"one": 1, "two": 1}


# --- the bound, and what cheating gains ---

PROMPT_MAX, OUTPUT_MAX, SLOTS = 60, 12, 4
IN_FLIGHT = SLOTS * (PROMPT_MAX + 2 * OUTPUT_MAX)
"""Service that may be dispatched at once: what VTC's U is at most (w_p = 1, w_q = 2)."""


@dataclass
class Habit:
    """How does a tenant behave?"""

    users: int = 1
    inside: float = 0.0
    """Part of its calls that are inside an interaction."""
    app: str = "chat"
    prompt: tuple[int, int] = (1, PROMPT_MAX)
    output: tuple[int, int] = (1, OUTPUT_MAX)
    output_max: int = 100
    stops_at: int | None = None
    """Aborts an answer this many tokens before its end."""
    absent: Callable[[int], bool] = lambda step: False


@dataclass
class Server:
    """So many requests at a time, one token each per step; everybody who is present always has some waiting."""

    policy: Policy
    habits: dict[str, Habit]
    seed: int = 1
    waiting: dict[Flow, int] = field(default_factory=dict)
    running: list[tuple[Request, int, int]] = field(default_factory=list)
    received: dict[Flow, float] = field(default_factory=dict)
    normalised: dict[Flow, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        for tenant, habit in self.habits.items():
            for user in range(habit.users):
                flow = Flow(tenant, habit.app, str(user))
                self.waiting[flow], self.received[flow], self.normalised[flow] = 0, 0.0, 0.0

    def fill(self, step: int) -> None:
        for flow in self.waiting:
            habit = self.habits[flow.tenant]
            while self.waiting[flow] <= SLOTS and not habit.absent(step):
                prompt = self.rng.randint(*habit.prompt)
                request = make_request(
                    flow.tenant, app=flow.app, user=flow.user, prompt=prompt, output_max=habit.output_max, expected=6.0
                )
                push(self.policy, request, inside=self.rng.random() < habit.inside)
                self.waiting[flow] += 1

    def step(self, step: int) -> None:
        self.fill(step)
        while len(self.running) < SLOTS and len(self.policy):
            request = pop(self.policy)
            flow = request.flow
            self.waiting[flow] -= 1
            self.received[flow] += request.prompt_tokens
            self.normalised[flow] += request.prompt_tokens / request.progress.norm
            self.running.append((request, 0, self.rng.randint(*self.habits[flow.tenant].output)))
        still = []
        for request, before, length in self.running:
            output, flow = before + 1, request.flow
            self.received[flow] += 2.0
            self.normalised[flow] += 1 / request.progress.norm
            aborts = self.habits[flow.tenant].stops_at
            over = output == (length if aborts is None else max(1, length - aborts))
            service = ServiceTokens(request.prompt_tokens, output)
            self.policy.charge(request, service, 0.0, final=over)
            if over and output == length:
                self.policy.order.learn(request, service, 0.0)
            if not over:
                still.append((request, output, length))
        self.running = still

    def tenant(self, name: str) -> float:
        return sum(service for flow, service in self.received.items() if flow.tenant == name)


def largest_gap(server: Server, steps: int, gap: Callable[[Server], float]) -> float:
    """The largest difference of service over any interval."""
    gaps = [0.0]
    for step in range(steps):
        server.step(step)
        gaps.append(gap(server))
    return max(gaps) - min(gaps)


WINDOW_TOKENS, WINDOW_CALLS = 300.0, 3.0
insides = st.tuples(*[st.sampled_from([0.0, 0.1, 0.5, 1.0])] * 2)


def of_tenants(server: Server) -> float:
    return server.tenant("a") - server.tenant("b")


@settings(max_examples=60)
@given(inside=insides, users=st.integers(1, 4), seed=st.integers(0, 10_000))
def test_tenants_stay_within_twice_u_and_the_window(inside: tuple[float, float], users: int, seed: int) -> None:
    habits = {"a": Habit(users, inside[0]), "b": Habit(1, inside[1], prompt=(1, 8)), "c": Habit(2, 0.3)}
    server = Server(named_policy("fairserve", window_tokens=WINDOW_TOKENS), habits, seed)
    assert largest_gap(server, 300, of_tenants) <= 2 * (IN_FLIGHT + WINDOW_TOKENS)


@settings(max_examples=60)
@given(inside=st.sampled_from([0.0, 0.1, 0.5, 1.0]), seed=st.integers(0, 10_000))
def test_flows_of_a_tenant_stay_within_twice_u_and_the_window_in_normal_calls(inside: float, seed: int) -> None:
    norm = 20.0
    policy = named_policy("fairserve", weights={"chat": norm}, window_calls=WINDOW_CALLS)
    server = Server(policy, {"a": Habit(3, inside), "b": Habit(1)}, seed)
    mine, other = [flow for flow in server.waiting if flow.tenant == "a"][:2]

    def gap(server: Server) -> float:
        return server.normalised[mine] - server.normalised[other]

    in_flight = SLOTS * (PROMPT_MAX + OUTPUT_MAX) / norm
    assert largest_gap(server, 300, gap) <= 2 * (in_flight + WINDOW_CALLS)


@pytest.mark.parametrize("window_tokens", [1e9])
def test_a_window_without_a_bound_would_be_seen(window_tokens: float) -> None:
    server = Server(named_policy("fairserve", window_tokens=window_tokens), {"a": Habit(1, 1.0), "b": Habit(1)})
    assert largest_gap(server, 300, of_tenants) > 2 * (IN_FLIGHT + WINDOW_TOKENS)


@pytest.mark.interpreted_only("extends a policy")
def test_a_policy_that_does_not_charge_at_dispatch_would_be_seen() -> None:
    class Late(FairServe):
        def charge(self, request: Request, service: ServiceTokens, now: float, *, final: bool) -> None:
            super().charge(request, service if final else ServiceTokens(0, 0), now, final=final)

    habits = {"a": Habit(1, prompt=(60, 60)), "b": Habit(1, prompt=(1, 1), output=(1, 1))}
    server = Server(Policy(Late(FairServeParams(window_tokens=0.0))), habits)
    strict = Server(named_policy("fairserve", window_tokens=0.0), habits)
    assert largest_gap(server, 300, of_tenants) > 1.2 * largest_gap(strict, 300, of_tenants)


HONEST = Habit(users=2, inside=0.3)
CHEATS = {
    "many sessions": Habit(users=50, inside=0.3),
    "never-ending interactions": Habit(users=2, inside=1.0),
    "claims the heaviest app": Habit(users=2, inside=0.3, app="heaviest"),
    "aborts just before the end": Habit(users=2, inside=0.3, stops_at=1),
    "many tiny calls": Habit(users=2, inside=0.3, prompt=(1, 2), output=(1, 2)),
    "huge max_tokens": Habit(users=2, inside=0.3, output_max=1_000_000),
    "huge prompts": Habit(users=2, inside=0.3, prompt=(PROMPT_MAX, PROMPT_MAX)),
    "idles to bank credit": Habit(users=2, inside=0.3, absent=lambda step: step % 1000 < 500),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheating_gains_no_service(cheat: str) -> None:
    def served(habit: Habit) -> float:
        policy = named_policy("fairserve", weights={"heaviest": 10_000.0}, window_tokens=WINDOW_TOKENS)
        server = Server(policy, {"me": habit, "b": Habit(2, 0.3), "c": Habit(1)})
        for step in range(5000):
            server.step(step)
        return server.tenant("me") / sum(server.received.values())

    assert served(CHEATS[cheat]) <= 1.05 * served(HONEST)
