"""Whoever cheats gains nothing: a tenant that cheats against the same one behaving, in the same mix, in virtual time.

Three honest tenants and the one under test share an engine that any two of them overload. What is compared is the
share of all service (weighted tokens, as received from the engine): a cheat may cost its tenant as much as it likes,
and may gain 5 % at most. Most cheats are tried with everything as it comes: no limits, under overload most of the time,
and caps that are learned. Those aimed at the limits are also tried with limits that the honest tenant, too, is beyond.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import profile
from lab.lab_driver import simulate
from lab.service import service
from policies.admission.engine import AdmissionEngine
from policies.interactions import Interactions, InteractionSettings
from policies.limits.throttle import Ceilings, ThrottleSettings
from policies.orders.cost import Cost, LinearCost
from policies.orders.fairserve import FairServeParams
from policies.request import Claim, CorrelationKeys, Flow
from simulation.run import Arrival, Record
from tests.policies.making import policy_with

GAIN_MAX = 1.05
WINDOW = FairServeParams().window_tokens
START_S, END_S = 5.0, 20.0
LATE_S = 30.0
"""The end where what is had once, such as a quantum or the calls before a limit is reached, counts for too much."""
IDLE_UNTIL_S = 15.0
RETRY_S = 0.5
BLOCK_TOKENS = 16
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


class Guesser(Caller):
    """Every call is said to be amid an interaction that another tenant has open."""

    def claim(self) -> Claim:
        return Claim(f"one-{self.number}-{self.interaction}", self.calls, begins=False, explicit=True)


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


class Longest(Caller):
    """Interactions as long as their immunity lasts, one after another: it starts far less often than others."""

    calls = InteractionSettings().calls_max - 1


class Heaviest(Caller):
    """Its calls are ordinary, but are said to be of an app whose calls are normally thirty times as large."""

    app = "report"


class Aborter(Caller):
    """Hangs up on every answer just before its end."""

    def arrival(self, request_id: str, now: float) -> Arrival:
        arrival = super().arrival(request_id, now)
        return replace(arrival, cancel_after_tokens=self.output_tokens - 1)


class EarlyAborter(Caller):
    """Asks for twice as much as it wants, and hangs up when it has it."""

    def arrival(self, request_id: str, now: float) -> Arrival:
        arrival = super().arrival(request_id, now)
        return replace(arrival, output_tokens=2 * self.output_tokens, cancel_after_tokens=self.output_tokens)


class Tiny(Caller):
    """Splits its work into five times as many calls, from four times as many callers."""

    callers = 4 * CALLERS
    calls = 20
    prompt_tokens = 80
    output_tokens = 4


class Huge(Caller):
    """Allows itself as long an answer as the engine can give."""

    output_tokens_max = 3800


class Idler(Caller):
    """Comes when others have long been served."""

    def next(self, refused: bool, now: float) -> Arrival:
        return super().next(refused, max(now, IDLE_UNTIL_S))


class SecondApp(Caller):
    """Floods another app that its key allows beside its own."""

    callers = 2 * CALLERS

    def flow(self) -> Flow:
        return Flow(self.tenant, ("chat", "report")[self.number % 2], "someone")


class SharedPrefix(Caller):
    """All its prompts begin with the same three quarters."""

    def arrival(self, request_id: str, now: float) -> Arrival:
        common = tuple(range(1, 3 * self.prompt_tokens // 4 // BLOCK_TOKENS + 1))
        return replace(super().arrival(request_id, now), prefix=common)


A_FEW = Ceilings(starts=60)
PARAMS: dict[str, dict[str, Any]] = {
    "default": {},
    "weighed": {"weights": {"chat": 500.0, "report": 15_000.0}},
    # Every tenant of the mix starts more than that in a minute.
    "limited": {"throttle": ThrottleSettings(user=A_FEW, app=A_FEW)},
}


@cache
def records(kind: type[Caller], params: str, callers: int, calls_max: int, end_s: float, policy: str) -> list[Record]:
    """What became of the calls of the tenant under test, among three that behave."""
    everybody = [kind("tested", number) for number in range(callers)]
    everybody += [Caller(tenant, number) for tenant in ("one", "two", "three") for number in range(CALLERS)]
    by_name = {f"{caller.tenant}/{caller.number}": caller for caller in everybody}
    interactions = Interactions(InteractionSettings(calls_max=calls_max))
    engine = AdmissionEngine(policy_with(policy, **PARAMS[params]), interactions=interactions)
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


def share(
    kind: type[Caller],
    params: str = "default",
    *,
    callers: int = CALLERS,
    calls_max: int = InteractionSettings().calls_max,
    start_s: float = START_S,
    end_s: float = END_S,
    policy: str = "fairserve",
    cost: Cost | None = None,
) -> float:
    """Part of all service that the tenant under test has."""
    received = service(records(kind, params, callers, calls_max, end_s, policy), start_s, end_s, cost=cost)
    return received["tested"] / sum(received.values())


def gain(kind: type[Caller], params: str = "default", **settings: Any) -> float:
    """Share of the cheater over that of the same tenant without the cheat, with as many callers."""
    cheats = share(kind, params, callers=kind.callers, **settings)
    return cheats / share(Caller, params, callers=kind.callers, **settings)


def lead(kind: type[Caller], params: str = "default") -> float:
    """Return the service that the tenant under test has beyond its part of all, from the beginning on."""
    found = records(kind, params, kind.callers, InteractionSettings().calls_max, 2 * LATE_S, "fairserve")
    received = service(found, 0.0, 2 * LATE_S)
    return received["tested"] - sum(received.values()) / len(received)


def test_the_honest_tenant_has_its_share() -> None:
    assert share(Caller) == pytest.approx(0.25, rel=0.03)


@pytest.mark.parametrize(
    "cheat",
    [ManySessions, Forger, Borrower, OneSession, EarlyAborter, Huge, SecondApp],
)
def test_no_cheat_gains_more_than_the_window(cheat: type[Caller]) -> None:
    """Who has more callers uses the window within the first seconds. A cheat that gained a fifth would have 60,000."""
    assert lead(cheat) <= WINDOW


@pytest.mark.parametrize("cheat", [Guesser, Aborter])
def test_starts_that_nothing_follows_gain_the_window_once(cheat: type[Caller]) -> None:
    """They need no room in the working set, and wait as soon as their tenant is a window ahead."""
    assert gain(cheat, start_s=LATE_S, end_s=2 * LATE_S) <= GAIN_MAX


@pytest.mark.parametrize("cheat", [NeverEnding, Longest])
def test_long_interactions_gain_their_window_once(cheat: type[Caller]) -> None:
    """The window is 20,000 tokens, of the 75,000 that a tenant receives until the early end. Once it is used they gain
    nothing.
    """
    assert gain(cheat, start_s=2 * START_S, end_s=LATE_S) <= GAIN_MAX


def test_tiny_calls_gain_nothing() -> None:
    # Against as many callers as the others have, since its calls together ask for no more than theirs.
    later = {"start_s": LATE_S, "end_s": 2 * LATE_S}
    assert share(Tiny, callers=Tiny.callers, **later) <= GAIN_MAX * share(Caller, **later)


@pytest.mark.parametrize("cheat", [ManySessions, Forger, OneSession, SecondApp])
def test_no_cheat_gains_where_the_limits_are_numbers(cheat: type[Caller]) -> None:
    # A name for each caller passes the limit of a user, as its docs say. Others are refused while the KV cache is full,
    # and the cheat gets a part of that: 82,000 of 1,210,000 tokens.
    assert lead(cheat, "limited") <= 5 * WINDOW


@pytest.mark.parametrize("cheat", [NeverEnding, Borrower, OneSession])
def test_an_interaction_without_an_end_has_no_immunity_beyond_its_caps(cheat: type[Caller]) -> None:
    assert gain(cheat, "limited", calls_max=Caller.calls) <= GAIN_MAX


def test_claiming_the_heaviest_app_gains_nothing_although_its_calls_weigh_least() -> None:
    assert gain(Heaviest, "weighed") <= GAIN_MAX


def test_idling_banks_no_credit() -> None:
    assert gain(Idler, start_s=IDLE_UNTIL_S, end_s=LATE_S, policy="wsc") <= GAIN_MAX


def test_a_tenant_that_was_idle_has_the_window_once() -> None:
    """It was idle while each of the others received 100,000 tokens."""
    assert gain(Idler, start_s=LATE_S, end_s=2 * LATE_S) <= GAIN_MAX
    calls = records(Idler, "default", CALLERS, InteractionSettings().calls_max, 2 * LATE_S, "fairserve")
    received = service(calls, IDLE_UNTIL_S, 2 * LATE_S)
    ahead = received["tested"] - sum(received[tenant] for tenant in ("one", "two", "three")) / 3
    assert ahead <= 1.5 * 20_000.0, "and what the engine runs at once"


def test_sharing_a_prefix_gains_no_more_of_the_engine_than_not_sharing() -> None:
    assert gain(SharedPrefix, cost=LinearCost(cached_weight=0.1), start_s=LATE_S, end_s=2 * LATE_S) <= GAIN_MAX
    # Where only what the cache lacks is charged, what counts is the work that the engine had to do. Served in quanta,
    # whoever is first is ahead by one.
    assert gain(SharedPrefix, policy="dlpm", cost=LinearCost(cached_weight=0.0), end_s=LATE_S) <= GAIN_MAX
