"""Every table of `gateway.config.memory_bounds`, made with a bound and filled beyond it with the longest names."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Callable
from itertools import accumulate
from typing import Any, Final

from msgspec import Raw

from gateway.config.sections.apps import InteractionRules
from gateway.keys.stored_responses import ID_LENGTH_MAX, StoredResponses
from gateway.request.body.payload import USER_LENGTH_MAX
from gateway.request.interaction_claim import ClaimReader
from gateway.telemetry.recent_requests import RecentRequests
from gateway.telemetry.record import Outcome, RequestRecord
from gateway.usage.counts import UsageCounts
from policies.admission.decisions import Dispatch, RecentDecisions
from policies.admission.named import named_policy
from policies.app_paces import AppPaces
from policies.capacity.output_lengths import OutputLengths
from policies.interactions import Interactions, InteractionSettings
from policies.limits.leaky_counts import LeakyCounts
from policies.limits.quotas import DAY_S, MINUTE_S, MONTH_S, Quota, Quotas
from policies.limits.sliding_counts import PARTS
from policies.limits.throttle import Ceilings, ThrottleSettings
from policies.placements.prefix_index import PrefixIndex
from policies.queue.expected_wait import Gate, WaitEstimate
from policies.request import NO_CLAIM, Claim, CorrelationKeys, Flow, Pressure, Request, ServiceTokens, Wait
from policies.tree.pool_tree import PoolTree
from tests.records import record_of

WIDE = "\U0001f600"
"""Four bytes of each character of the name that it is in."""
SERVICE = ServiceTokens(100, 100)
BEYOND = 2
"""So many times the bound are entered."""

Fill = Callable[[int], Any]
"""Makes a table with this bound, and fills it."""


def name(kind: str, number: int) -> str:
    """As long as a name may be. Nobody else has it, and no two tables have the same object."""
    return f"{kind}{number:010d}".ljust(USER_LENGTH_MAX, WIDE)


def request(number: int, claim: Claim = NO_CLAIM, now: float = 0.0, *, tenants: bool = True) -> Request:
    flow = Flow(name("t", number) if tenants else "tenant", "app", name("u", number))
    id, client_id = f"req_0123456789ab{number:010d}", f"{number:0128d}"
    return Request(id, flow, 1.0, 100, 100, now, client_id=client_id, claim=claim)


def record(number: int) -> RequestRecord:
    made = record_of(f"req_0123456789ab{number:010d}", arrived_s=number + 0.5)
    made.request = asked = request(number)
    made.tenant, made.app, made.model, made.pool = asked.flow.tenant, "app", "model", "pool"
    asked.progress.wait = wait(number)
    made.first_token_s = 1.0
    made.ended(Outcome.COMPLETED, "", ServiceTokens(1000 + number, 1000 + number), number + 2.5)
    return made


def wait(number: int) -> Wait:
    made = Wait(float(number), "kv", 0.0)
    made.by = {"kv": 1.0 + number, "slots": 2.0 + number}
    made.ended_s = 2.0 + number
    made.expected = WaitEstimate(number + 0.1, number + 0.2, number + 0.3, 1000 + number, Gate(False), is_learned=True)
    return made


def flows(policy: str, *, tenants: bool) -> Fill:
    """Each has been served in each part of a window, and counted if limits may be set. `tenants`: each is of a tenant
    of its own."""
    limits: dict[str, Any] = {"throttle": ThrottleSettings(user=Ceilings(starts=1))} if policy == "fairserve" else {}

    def fill(most: int) -> Any:
        made = named_policy(policy, flows_max=most, **limits).order
        for now in range(0, 61, 5) if limits else (1, 61):
            for number in range(BEYOND * most):
                asked = request(number, now=now, tenants=tenants)
                made.push(asked, now)
                made.remove(asked, now)
                made.learn(asked, SERVICE, now)
        return made

    return fill


def tenants(most: int) -> Any:
    """Each has a context. Requests and open interactions bound how many there are."""
    made = PoolTree()
    for number in range(most):
        made.hold(name("t", number), 1000)
    return made


def lengths(most: int) -> Any:
    made = OutputLengths(populations_max=most)
    for number in range(BEYOND * most):
        for each in range(100):
            made.learn(request(number), 1000 + each)
    return made


def decisions(most: int) -> Any:
    made = RecentDecisions(most)
    for number in range(BEYOND * most):
        asked = request(number)
        asked.progress.wait = wait(number)
        pressure = Pressure(False, "")
        made.note(Dispatch(asked.id, "engine"), asked, number + 0.75, pressure)
    return made


def interactions(most: int) -> Any:
    """Every third ends and rests; the others ask for more."""
    made = Interactions(InteractionSettings(open_max=most))
    for number in range(BEYOND * most):
        asked = request(number, Claim(f"{number:016x}"))
        made.arrived(asked, 0.0)
        made.admitted(asked, 0.0)
        asked.progress.answer_keys = CorrelationKeys((f"p{number:015x}", f"q{number:015x}"))
        made.served(asked, SERVICE, number * 1e-6, number % 3 > 0)
    return made


def ends(most: int) -> Any:
    """Each of many tenants ends a request, and then one tenant fills the ring."""
    made = RecentRequests(most)
    for number in range(BEYOND * most):
        one = record(number)
        one.tenant = name("t", min(number, most))
        made.ended(one)
    return made


def quotas(most: int) -> Any:
    made = Quotas(Quota(tokens_per_day=1), tenants_max=most)
    for number in range(BEYOND * most):
        made.admitted(request(number), 0.0)
    parts = [each / PARTS for each in (MONTH_S, DAY_S, MINUTE_S) for _ in range(PARTS)]
    for now in accumulate(parts):
        for number in range(most):
            asked = request(number)
            made.admitted(asked, now)
            made.ended(asked, ServiceTokens(1000 + number, 0), now)
    return made


def sums(most: int) -> Any:
    """What is not yet written: a batch that is being written, and what came since."""
    made = UsageCounts(1_000_000, max(1, most // 4))
    taken = []
    for _ in range(2):
        for number in range(BEYOND * most):
            made.ended(record(number))
        taken.append(made.take())
    made._users.clear()
    return taken


def users(most: int) -> Any:
    made = UsageCounts(1_000_000, 1, most)
    for number in range(BEYOND * most):
        made.ended(record(number))
    return made


def texts(most: int) -> Any:
    made = ClaimReader(InteractionRules(), {}, flows_max=most)
    for number in range(BEYOND * most):
        flow = request(number).flow
        for length in range(300, 340):
            made._prefixes(Raw(json.dumps("a" * length).encode()), flow)
    return made


def paces(most: int) -> Any:
    made = AppPaces(most)
    for number in range(BEYOND * most):
        made.replied(name("t", number), "app", 1.5 + number)
    return made


def rates(most: int) -> Any:
    made = LeakyCounts(1.0, 1e9, members_max=most)
    for number in range(BEYOND * most):
        made.take(name("t", number), number + 0.5)
    return made


def responses(most: int) -> Any:
    made = StoredResponses(most)
    for number in range(BEYOND * most):
        id = f"resp_{number}".ljust(ID_LENGTH_MAX, "x")
        made.note((name("t", number), id, "model", "model", "engine"), number + 0.5)
    return made


def blocks(most: int) -> Any:
    """Prompts of one block each: the first ones take most."""
    made = PrefixIndex(blocks_max=most)
    for number in range(BEYOND * most):
        made.insert((hash((number, "block")),), "ab"[number % 2])
    return made


ONE_FILL: Final[dict[str, Fill]] = {
    "tenants": tenants, "lengths": lengths, "decisions": decisions, "interactions": interactions, "ends": ends,
    "quotas": quotas, "sums": sums, "users": users, "texts": texts, "paces": paces, "responses": responses,
    "rates": rates,
}  # fmt: skip
"""By the name of the table; `flows` differ by policy."""


def entry_bytes(fill: Fill, most: int) -> float:
    """What a full table takes for each entry that it may have."""
    fill(10)  # what is made once is there
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        made = fill(most)
        gc.collect()
        return (tracemalloc.get_traced_memory()[0] - before) / most
    finally:
        tracemalloc.stop()
        del made
