"""What a full table forgets helps nobody who invents names, and harms nobody else."""

from __future__ import annotations

import pytest

from policies.admission.named import named_policy
from policies.interactions import Interactions, InteractionSettings
from policies.limits.quotas import Quota, Quotas
from policies.queue.backlog import Backlog
from policies.queue.bounds import BoundedQueue, QueueLimits
from policies.recent import given_up
from policies.request import Claim, CorrelationKeys, Flow, Request, ServiceTokens

SERVICE = ServiceTokens(100, 100)


def asked(tenant: str, user: str, prompt_tokens: int = 10, now: float = 0.0, **more: object) -> Request:
    return Request(f"{tenant}/{user}/{now}", Flow(tenant, "app", user), 1.0, prompt_tokens, 10, now, **more)  # type: ignore[arg-type]


def test_inventing_tenants_frees_no_tenant_of_its_quota() -> None:
    quotas = Quotas(Quota(tokens_per_day=1000), tenants_max=50)
    first = asked("t", "u", 900)
    quotas.admitted(first, 1.0)
    quotas.ended(first, ServiceTokens(1000, 0), 1.0)
    for number in range(500):
        each = asked(f"invented {number}", "u", 10)
        quotas.admitted(each, 2.0)
        quotas.ended(each, ServiceTokens(20, 0), 2.0)
    assert quotas.find_rejection(first, 3.0) is not None
    assert len(quotas.day) + len(quotas.minute) <= 2 * 50


def opened(table: Interactions, tenant: str, id: str, *, ends: bool, now: float) -> Request:
    call = asked(tenant, "u", now=now, claim=Claim(id))
    table.arrived(call, now)
    table.admitted(call, now)
    call.progress.answer_keys = CorrelationKeys((f"key of {tenant} {id}",))
    table.served(call, SERVICE, now, not ends)
    return call


@pytest.mark.parametrize("ends", [True, False])
def test_inventing_interactions_closes_none_of_another_tenant(ends: bool) -> None:
    table = Interactions(InteractionSettings(open_max=80))
    opened(table, "steady", "mine", ends=ends, now=0.0)
    for number in range(1000):
        opened(table, "flood", f"invented {number}", ends=ends, now=0.01 * number)
        assert len(table) + len(table._resting) <= 80
    again = asked("steady", "u", now=10.0, claim=Claim("mine", keys=CorrelationKeys(("key of steady mine",))))
    table.arrived(again, 10.0)
    assert again.progress.interaction is not None
    lost = asked("flood", "u", now=10.0, claim=Claim("other", keys=CorrelationKeys(("key of flood invented 0",))))
    table.arrived(lost, 10.0)
    assert not lost.progress.inside, "a flood loses its own"


def test_a_full_table_is_made_room_in_by_the_hundredth() -> None:
    tables = {"a": dict.fromkeys(range(300)), "b": dict.fromkeys(range(700))}
    assert given_up(tables, 1000) == [("b", number) for number in range(10)]
    many = {f"t{number}": {0: None} for number in range(1000)}
    assert given_up(many, 1000) == [(f"t{number}", 0) for number in range(10)], "so that a look at all is rare"


def test_inventing_users_forgets_no_counter_of_another_tenant() -> None:
    backlog = Backlog(flows_max=50)

    def serve(tenant: str, user: str) -> None:
        request = asked(tenant, user)
        backlog.push(request)
        backlog.take(request)
        backlog.charge(request, 1000.0)
        backlog.end(request)

    running = asked("keeps", "up")
    backlog.push(running)
    serve("steady", "u")
    for number in range(500):
        serve("flood", f"invented {number}")
        assert backlog.remembered() <= 50 + 2
    steady = backlog.tenant("steady")
    assert steady is not None
    assert steady.counter >= 1000.0
    flood = backlog.tenant("flood")
    assert flood is not None
    assert flood.counter >= 500_000.0, "what its users received stays the tenant's"


@pytest.mark.parametrize("name", ["fairserve", "wsc", "vtc", "dlpm"])
def test_a_new_name_is_served_no_sooner_for_what_was_forgotten(name: str) -> None:
    """Two tenants wait all the time; one names a new user for each request, in a table that is far too small."""
    policy = named_policy(name, flows_max=10)
    order = policy.order
    backlog = order.backlog
    assert backlog is not None
    served = {"honest": 0, "flood": 0}
    waiting: dict[str, Request] = {}
    for turn in range(400):
        for tenant in served:
            if tenant not in waiting:
                user = f"invented {turn}" if tenant == "flood" else "u"
                request = waiting[tenant] = asked(tenant, user, 100, now=float(turn))
                order.push(request, float(turn))
        head = backlog.head()
        assert head is not None
        tenant = head.flow.tenant
        del waiting[tenant]
        served[tenant] += 1
        backlog.take(head)
        order.charge(head, SERVICE, float(turn), final=True)
        assert backlog.remembered() <= 10 + 4
    assert abs(served["honest"] - served["flood"]) <= 2 * 200


def test_requests_that_have_left_leave_nothing_in_the_queue() -> None:
    queue = BoundedQueue(QueueLimits())
    stays = asked("t", "stays")
    stays.progress.deadline_s = 1.0
    queue.add(stays)
    crowd = [asked("t", f"u{number}") for number in range(1000)]
    for together in (1, len(crowd)):
        for begin in range(0, len(crowd), together):
            for number, request in enumerate(crowd[begin : begin + together]):
                request.progress.deadline_s = 2.0 + number
                queue.add(request)
            for request in reversed(crowd[begin : begin + together]):
                queue.remove(request)
                assert len(queue._deadlines) <= 2 * len(queue.requests) + 64
    assert queue.earliest_deadline_s() == 1.0
    assert queue.expired(1.5) is stays
