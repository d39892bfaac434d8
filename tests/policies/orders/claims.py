"""What each policy promises, and random calls to try it with. A new policy is one entry in `CLAIMS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st

from policies.admission.policy import Policy
from policies.capacity.output_lengths import ENOUGH
from policies.orders.policy_entries import POLICIES
from policies.orders.profiles import CostProfiles
from policies.request import Request, ServiceTokens
from tests.policies.making import Room, make_request, policy_with


@dataclass(frozen=True)
class Claim:
    """What does a policy promise about service? `bound` as in its docstring; None: it promises nothing."""

    bound: Callable[[float, float, float], float] | None
    """How much two backlogged tenants may differ, per weight, from what may be charged: (at most at one dispatch, at
    most as the answers of all dispatched requests stream, least weight)."""
    params: dict[str, Any] = field(default_factory=dict)
    """What is set for the tests: service of a few tokens, where a product's default is for thousands."""
    costs: tuple[str, ...] = ("linear", "profiled")
    """What it can count as service."""


IN_TOKENS = {"gamma": 2.0}
"""With `knows`, makes the flows of a tenant comparable by the same service as tenants; what calls are worth has tests
of its own."""
PER_ROUND = lambda prompt, output, weight: 2 * ((prompt + output) / weight + 10)  # noqa: E731
"""Of policies with rounds, or a window, of ten tokens."""
PLAIN = lambda prompt, output, weight: 2 * (prompt + output) / weight  # noqa: E731
WINDOW = {"window_tokens": 10.0, "window_calls": 10.0}
CLAIMS = {
    "fcfs": Claim(bound=None),
    "rr": Claim(PER_ROUND, {"quantum": 10.0}),
    "dlpm": Claim(PER_ROUND, {"quantum": 10.0}, costs=("linear",)),
    "d2lpm": Claim(PER_ROUND, {"quantum": 10.0, "backend_quantum": 10.0}, costs=("linear",)),
    "vtc": Claim(PLAIN),
    "wsc": Claim(PLAIN, IN_TOKENS, costs=("linear",)),
    "fairserve": Claim(PER_ROUND, IN_TOKENS | WINDOW, costs=("linear",)),
}
every_policy = pytest.mark.parametrize("name", sorted(POLICIES))
fair_policy = pytest.mark.parametrize("name", sorted(name for name, claim in CLAIMS.items() if claim.bound))


def make(name: str, **params: Any) -> Policy:
    return knows(policy_with(name, **{**CLAIMS[name].params, **params}), 1.0)


def knows(policy: Policy, usual: float, **by_app: float) -> Policy:
    """The policy, which has learned what a normal call is worth, if it does: of each app, and of all others."""
    profiles = policy.order.learned.get("profiles")
    if isinstance(profiles, CostProfiles):
        scopes = ("", "t", "l", "s")
        rows: list[list[object]] = [[scope, app, 0, ENOUGH, worth] for scope in scopes for app, worth in by_app.items()]
        learned = {"units": [*profiles.units], "worths": rows, "pool": [[ENOUGH, usual]]}
        profiles.adopt(profiles.read(learned))
    return policy


def pop(policy: Policy, room: Room | None = None) -> Request:
    """The next request, dispatched and charged as the engine does it."""
    selection = policy.pop(0.0, room or Room())
    policy.charge(selection.request, ServiceTokens(selection.request.prompt_tokens, 0), 0.0, final=False)
    return selection.request


Action = tuple[str, int, int]
actions = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "push", "pop", "pop", "output", "end", "return", "remove"]),
        st.integers(0, 3),
        st.integers(0, 40),
    ),
    max_size=80,
)


@dataclass
class Trace:
    """Random calls, in the only order that the engine makes them, and a log of what was answered."""

    policy: Policy
    tenant: Callable[[int], str] = lambda number: f"t{number}"
    weights: tuple[float, ...] = (1.0, 3.0, 0.3, 7.0)
    queued: list[Request] = field(default_factory=list)
    running: dict[str, int] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    pushed: int = 0

    def act(self, kind: str, who: int, number: int) -> None:
        if kind == "push":
            self.pushed += 1
            request = self.requests[str(self.pushed)] = self.request(who, number)
            self.queued.append(request)
            self.policy.push(request, 0.0)
        elif kind == "pop" and self.queued:
            self.pop()
        elif kind == "remove" and self.queued:
            self.policy.remove(self.queued.pop(number % len(self.queued)), 0.0)
        elif kind in ("output", "end", "return") and self.running:
            request_id = sorted(self.running)[number % len(self.running)]
            self.served(kind, self.requests[request_id], number)

    def request(self, who: int, number: int) -> Request:
        """The next request of this tenant."""
        return make_request(
            self.tenant(who), id=str(self.pushed), user=str(number % 2), weight=self.weights[who], prompt=number,
            expected=7 * number % 50,
        )  # fmt: skip

    def pop(self) -> None:
        selection = self.policy.pop(0.0, Room())
        request = selection.request
        self.queued.remove(request)
        self.log.append(request.id)
        self.chosen(request)
        self.policy.charge(request, ServiceTokens(request.prompt_tokens, 0), 0.0, final=False)
        self.running[request.id] = 0

    def chosen(self, request: Request) -> None:
        """Look at a request that was popped and is not charged yet."""

    def served(self, kind: str, request: Request, output: int) -> None:
        if kind == "return":
            self.policy.charge(request, ServiceTokens(0, 0), 0.0, final=True)
            self.policy.push(request, 0.0, front=True)
            self.queued.append(request)
            del self.running[request.id]
            return
        self.running[request.id] += output
        service = ServiceTokens(request.prompt_tokens, self.running[request.id])
        self.policy.charge(request, service, 0.0, final=kind == "end")
        if kind == "end":
            del self.running[request.id]

    def run(self, trace: list[Action]) -> list[str]:
        for action in trace:
            self.act(*action)
        while self.queued:
            self.pop()
        return self.log
