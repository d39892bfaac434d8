"""The fast VTC serves in the order of the paper's algorithm, transcribed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.base import Request, ServiceTokens
from policies.vtc import Vtc
from tests.policies.making import Room, make_request
from tests.reference.naive_vtc import NaiveVtc

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 4.0}

Action = tuple[str, str, str, int]
actions = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "push", "pop", "pop", "output", "end", "remove"]),
        st.sampled_from(sorted(WEIGHTS)),
        st.sampled_from(["", "x", "y"]),
        st.integers(0, 60),
    ),
    min_size=20,
    max_size=120,
)


class Both:
    """The same calls to both, comparing what they answer."""

    def __init__(self) -> None:
        self.fast = Vtc()
        self.naive = NaiveVtc()
        self.queued: list[Request] = []
        self.running: list[tuple[Request, int]] = []
        self.serial = 0

    def act(self, kind: str, tenant: str, user: str, number: int) -> None:
        if kind == "push":
            self.serial += 1
            request = make_request(tenant, id=str(self.serial), user=user, weight=WEIGHTS[tenant], prompt=number)
            self.queued.append(request)
            self.fast.push(request, 0.0)
            self.naive.push(request)
        elif kind == "pop":
            self.pop()
        elif kind == "remove" and self.queued:
            request = self.queued.pop(number % len(self.queued))
            self.fast.remove(request, 0.0)
            self.naive.remove(request)
        elif kind in ("output", "end") and self.running:
            place = number % len(self.running)
            request, output = self.running.pop(place)
            service = ServiceTokens(request.prompt_tokens, output + number)
            if kind == "output":
                self.running.insert(place, (request, service.output))
            self.fast.charge(request, service, 0.0, final=kind == "end")
            self.naive.charge(request, service)

    def pop(self) -> None:
        expected = self.naive.pop()
        selection = self.fast.pop(0.0, Room())
        assert (selection.request.id if selection else None) == (expected.id if expected else None)
        if expected is None:
            return
        self.queued.remove(expected)
        self.running.append((expected, 0))
        at_dispatch = ServiceTokens(expected.prompt_tokens, 0)
        self.fast.charge(expected, at_dispatch, 0.0, final=False)
        self.naive.charge(expected, at_dispatch)


@settings(max_examples=150, deadline=None)
@given(actions)
def test_serves_in_the_order_of_the_printed_algorithm(trace: list[Action]) -> None:
    both = Both()
    for action in trace:
        both.act(*action)
    while both.queued:
        both.pop()
    assert len(both.fast) == 0


def test_expected_output_is_charged_at_dispatch_and_corrected_by_the_truth() -> None:
    policy = Vtc(predict_output=True)
    one, other = make_request("a", prompt=10, expected=50), make_request("b", prompt=90)
    for request in (one, other):
        policy.push(request, 0.0)
    for request in (one, other):
        assert policy.pop(0.0, Room()) == (request, "b")
        policy.charge(request, ServiceTokens(request.prompt_tokens, 0), 0.0, final=False)
    assert (one.charged, other.charged) == (110.0, 90.0)
    policy.charge(one, ServiceTokens(10, 49), 0.0, final=False)
    assert one.charged == 110.0, "no more is charged until the answer is longer than expected"
    policy.charge(one, ServiceTokens(10, 51), 0.0, final=False)
    assert one.charged == 112.0
    policy.charge(one, ServiceTokens(10, 30), 0.0, final=True)
    assert one.charged == 70.0, "what was charged too much is given back at the end"
