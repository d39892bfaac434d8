"""Whoever cheats gains nothing: a tenant that cheats against the same one behaving, in the same mix, in virtual time.

Three honest tenants and the one under test share an engine that any two of them overload. What is compared is the
share of all service (weighted tokens, as received from the engine): a cheat may cost its tenant as much as it likes,
and may gain 5 % at most. Cheats that need no engine and no table of interactions are tried on the order alone
(`tests/policies/orders/test_fairserve.py`). Those aimed at the limits are also tried with limits that the honest
tenant, too, is beyond.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import profile
from lab.lab_driver import simulate
from lab.service import service
from policies.admission.engine import AdmissionEngine
from policies.interactions import Interactions, InteractionSettings
from policies.limits.throttle import Ceilings, ThrottleSettings
from policies.orders.fairserve import FairServeParams
from policies.request import Claim, CorrelationKeys, Flow
from simulation.run import Arrival, Record
from tests.policies.making import policy_with

GAIN_MAX = 1.05
WINDOW = FairServeParams().window_tokens
START_S, END_S = 5.0, 20.0
LATE_S = 40.0
"""The end where what is had once, such as the window, is counted in tokens."""
CALLS_MAX = InteractionSettings().calls_max
RETRY_S = 0.5
CALLERS = 16
"""Closed-loop callers of each tenant: more than its part of the engine, so that it always has some waiting."""


class Caller:
    """One closed-loop client that behaves: interactions of four calls, each sent when the last was answered."""

    calls = 4
    prompt_tokens = 400
    output_tokens = 20
    output_tokens_max = 256
    app = "chat"
    callers = CALLERS

    def __init__(self, tenant: str, number: int) -> None:
        self.tenant = tenant
        self.number = number
        self.sent = 0
        self.interaction = 0
        self.stage = 0

    def next(self, refused: bool, now: float) -> Arrival:
        """Its next request, after one that was refused or answered (or at the beginning)."""
        if refused or self.stage == self.calls:
            self.stage = 0
        self.stage += 1
        self.interaction += self.stage == 1
        self.sent += 1
        return self.arrival(f"{self.tenant}/{self.number}/{self.sent}", now)

    def arrival(self, request_id: str, now: float) -> Arrival:
        return Arrival(
            request_id, self.flow(), now, self.prompt_tokens, self.output_tokens, self.output_tokens_max,
            system_tokens=self.prompt_tokens // 2, claim=self.claim(),
        )  # fmt: skip

    def flow(self) -> Flow:
        return Flow(self.tenant, self.app, "someone")

    def claim(self) -> Claim:
        name = f"{self.tenant}-{self.number}-{self.interaction}"
        return Claim(name, self.stage, begins=self.stage == 1, ends=self.stage == self.calls)


class ManySessions(Caller):
    """Each of its callers says that it is somebody else."""

    callers = 2 * CALLERS

    def flow(self) -> Flow:
        return Flow(self.tenant, self.app, f"someone{self.number}")


class Forger(Caller):
    """Every call is said to be amid an interaction that nobody has begun."""

    def claim(self) -> Claim:
        return Claim(f"invented-{self.number}-{self.sent}", 7, begins=False, explicit=True)


class Borrower(Caller):
    """All callers share one interaction, which stays open."""

    def claim(self) -> Claim:
        return Claim("ours", self.sent, begins=False, explicit=True)


class NeverEnding(Caller):
    """An interaction per caller that goes on for ever."""

    calls = 1_000_000_000

    def claim(self) -> Claim:
        return Claim(f"mine-{self.number}", self.stage, begins=self.stage == 1, explicit=True)


class OneSession(Caller):
    """Every call is a new question, and is said to be of one session, which never rests."""

    def claim(self) -> Claim:
        name = f"{self.tenant}-{self.number}-{self.sent}"
        return Claim(name, 1, begins=True, keys=CorrelationKeys(weak=("session",)), session="session")


class EarlyAborter(Caller):
    """Asks for twice as much as it wants, and hangs up when it has it."""

    def arrival(self, request_id: str, now: float) -> Arrival:
        arrival = super().arrival(request_id, now)
        return replace(arrival, output_tokens=2 * self.output_tokens, cancel_after_tokens=self.output_tokens)


A_FEW = Ceilings(starts=60)
"""Every tenant of the mix starts more than that in a minute."""


@cache
def records(kind: type[Caller], callers: int, calls_max: int, end_s: float, *, is_limited: bool) -> list[Record]:
    """Return what became of the calls of the tenant under test, among three that behave."""
    everybody = [kind("tested", number) for number in range(callers)]
    everybody += [Caller(tenant, number) for tenant in ("one", "two", "three") for number in range(CALLERS)]
    by_name = {f"{caller.tenant}/{caller.number}": caller for caller in everybody}
    interactions = Interactions(InteractionSettings(calls_max=calls_max))
    limits = {"throttle": ThrottleSettings(user=A_FEW, app=A_FEW)} if is_limited else {}
    engine = AdmissionEngine(policy_with("fairserve", **limits), interactions=interactions)
    engine.add_backend("only", max_num_seqs=32)

    def follow(record: Record, now: float) -> Arrival | None:
        if now >= end_s:
            return None
        refused = record.outcome not in ("completed", "cancelled")
        return by_name[record.arrival.id.rpartition("/")[0]].next(refused, now + RETRY_S if refused else now)

    first = [caller.next(False, 0.001 * number) for number, caller in enumerate(everybody)]
    run = simulate(
        sorted(first, key=lambda arrival: arrival.arrived_s),
        engine=engine, backends={"only": EngineModel(profile("demo"))}, next_arrival=follow,
    )  # fmt: skip
    return list(run.records.values())


def share(kind: type[Caller], calls_max: int = CALLS_MAX, *, is_limited: bool = False) -> float:
    """Return the part of all service that the tenant under test has."""
    received = service(records(kind, CALLERS, calls_max, END_S, is_limited=is_limited), START_S, END_S)
    return received["tested"] / sum(received.values())


def lead(kind: type[Caller], *, is_limited: bool = False) -> float:
    """Return the service that the tenant under test has beyond its part of all, from the beginning on."""
    received = service(records(kind, kind.callers, CALLS_MAX, LATE_S, is_limited=is_limited), 0.0, LATE_S)
    return received["tested"] - sum(received.values()) / len(received)


def test_the_honest_tenant_has_its_share() -> None:
    assert share(Caller) == pytest.approx(0.25, rel=0.03)


@pytest.mark.parametrize("cheat", [ManySessions, Forger, Borrower, OneSession, EarlyAborter])
def test_no_cheat_gains_more_than_the_window(cheat: type[Caller]) -> None:
    """Who has more callers uses the window within the first seconds. A cheat that gained a fifth would have 40,000."""
    assert lead(cheat) <= WINDOW


@pytest.mark.parametrize("cheat", [ManySessions, Forger, OneSession])
def test_no_cheat_gains_where_the_limits_are_numbers(cheat: type[Caller]) -> None:
    # A name for each caller passes the limit of a user, as its docs say. Others are refused while the KV cache is full,
    # and the cheat gets a part of that: 55,000 of 800,000 tokens.
    assert lead(cheat, is_limited=True) <= 5 * WINDOW


@pytest.mark.parametrize("cheat", [NeverEnding, Borrower, OneSession])
def test_an_interaction_without_an_end_has_no_immunity_beyond_its_caps(cheat: type[Caller]) -> None:
    honest = share(Caller, Caller.calls, is_limited=True)
    assert share(cheat, Caller.calls, is_limited=True) <= GAIN_MAX * honest
