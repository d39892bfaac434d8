"""The ten workloads: which tenant asks when, and for how many tokens.

Tenants t1, t2 and t4 have weight 1, t3 has weight 3. All arrivals and lengths come from one seed. Phases scale with the
length of the run; lengths and numbers of sessions do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from tenantbench.engine_model import Profile

WEIGHTS = {"t1": 1.0, "t2": 1.0, "t3": 3.0, "t4": 1.0}
LIGHT, HEAVY = "t1", "t2"
LIGHT_PART = 0.05
"""Part of the engine's output tokens that a light tenant asks for."""
BURST_S = 0.5
"""Time in which a burst arrives: a client of one core can send its 256 requests in that time without a lag."""


@dataclass(frozen=True)
class Ask:
    """A request: its lengths in tokens, and how its client treats it."""

    prompt: int
    output: int
    abort_after: int | None = None
    """Tokens after which the client closes the connection."""
    is_bad: bool = False
    """The engine refuses such a request: it has more tokens than the context."""


@dataclass(frozen=True)
class Session:
    """Requests of one client. Open loop where `arrivals_s` has a time for each ask; else one after another."""

    tenant: str
    name: str
    begins_s: float
    ends_s: float
    asks: tuple[Ask, ...]
    arrivals_s: tuple[float, ...] = ()
    user: str = ""
    """Session that the gateway is told of, as OpenAI's `user`."""
    route: int = 0
    is_task: bool = False
    """The asks are one task with one growing context; a new task follows."""
    pause_s: float = 0.0


@dataclass(frozen=True)
class Workload:
    name: str
    title: str
    seconds: float
    sessions: tuple[Session, ...]
    join_s: float = 0.0
    leave_s: float = 0.0

    @property
    def tenants(self) -> list[str]:
        return sorted({session.tenant for session in self.sessions})


def arrivals(random: Random, per_s: float, begins_s: float, ends_s: float) -> tuple[float, ...]:
    """Return the times of a Poisson process."""
    times, now = [], begins_s + random.expovariate(per_s)
    while now < ends_s:
        times.append(now)
        now += random.expovariate(per_s)
    return tuple(times)


def lengths(random: Random, number: int, prompt: int, output: int) -> tuple[Ask, ...]:
    """Return asks whose lengths are spread evenly from half to one and a half of the means."""

    def near(mean: int) -> int:
        return round(mean * random.uniform(0.5, 1.5))

    return tuple(Ask(near(prompt), near(output)) for _ in range(number))


def open_loop(
    random: Random, tenant: str, per_s: float, span_s: tuple[float, float], tokens: tuple[int, int]
) -> Session:
    times = arrivals(random, per_s, *span_s)
    return Session(tenant, "open", *span_s, lengths(random, len(times), *tokens), times)


def light(random: Random, seconds: float, profile: Profile) -> Session:
    """Return a tenant that asks for little, steadily."""
    per_s = LIGHT_PART * profile.slots / profile.step_s / 16
    return open_loop(random, LIGHT, per_s, (0.0, seconds), (64, 16))


def clients(
    tenant: str, number: int, span_s: tuple[float, float], ask: Ask, *, is_one_session: bool = True, route: int = 0
) -> list[Session]:
    """Return closed loops that each keep one request open; of one session, or each a session of its own."""
    asks = (ask,) * 4096
    names = [f"loop-{route}-{i}" for i in range(number)]
    return [Session(tenant, name, *span_s, asks, user="one" if is_one_session else name, route=route) for name in names]


def w1(random: Random, seconds: float, profile: Profile) -> Workload:
    """A light tenant is alone for a third of the time, then beside a flood of twice the engine's capacity."""
    flood_per_s = 2 * profile.slots / profile.step_s / 128
    flood = open_loop(random, HEAVY, flood_per_s, (seconds / 3, seconds), (256, 128))
    return Workload("W1", "light beside a flood", seconds, (light(random, seconds, profile), flood), join_s=seconds / 3)


def w2(random: Random, seconds: float, profile: Profile) -> Workload:
    span, number = (0.0, seconds), 2 * profile.slots
    sessions = [*clients("t1", number, span, Ask(64, 512)), *clients("t2", number, span, Ask(512, 64))]
    return Workload("W2", "equal tenants, unlike lengths", seconds, tuple(sessions))


def w3(random: Random, seconds: float, profile: Profile) -> Workload:
    span, number = (0.0, seconds), 2 * profile.slots
    sessions = [*clients("t3", number, span, Ask(128, 64)), *clients("t1", number, span, Ask(128, 64))]
    return Workload("W3", "weights 3 to 1", seconds, tuple(sessions))


def w4(random: Random, seconds: float, profile: Profile) -> Workload:
    """Fifty sessions of one request each beside one session of as many requests as the engine has slots."""
    span = (0.0, seconds)
    many = clients(HEAVY, 50, span, Ask(128, 64), is_one_session=False)
    return Workload("W4", "fifty sessions", seconds, (*many, *clients(LIGHT, profile.slots, span, Ask(128, 64))))


def w5(random: Random, seconds: float, profile: Profile) -> Workload:
    join, leave, number = seconds / 3, 2 * seconds / 3, 2 * profile.slots
    stays = clients("t2", number, (0.0, seconds), Ask(128, 64))
    comes = clients("t1", number, (join, leave), Ask(128, 64))
    return Workload("W5", "a tenant comes and goes", seconds, (*stays, *comes), join, leave)


def w6(random: Random, seconds: float, profile: Profile) -> Workload:
    """Four bursts of 16 times the slots; a light tenant asks steadily."""
    number = 16 * profile.slots
    times = tuple(seconds * (1 + 2 * burst) / 10 + BURST_S * i / number for burst in range(4) for i in range(number))
    burst = Session(HEAVY, "burst", 0.0, seconds, lengths(random, len(times), 128, 32), times)
    return Workload("W6", "bursts beyond the queue", seconds, (light(random, seconds, profile), burst))


def w7(random: Random, seconds: float, profile: Profile) -> Workload:
    """Agents whose contexts together have twice the KV, in tasks of five calls; a chat tenant beside them."""
    last = min(2 * profile.kv_tokens // profile.slots, profile.context_tokens_max - 64)
    agents = 2 * profile.kv_tokens // last
    calls = tuple(Ask(last * (i + 1) // 5, 32) for i in range(5))
    names = [f"agent-{i}" for i in range(agents)]
    tasks = [Session(HEAVY, name, 0.0, seconds, calls, user=name, is_task=True, pause_s=0.5) for name in names]
    chat = open_loop(random, LIGHT, 1.0, (0.0, seconds), (128, 64))
    return Workload("W7", "agents of twice the KV beside chat", seconds, (*tasks, chat))


def w8(random: Random, seconds: float, profile: Profile) -> Workload:
    """A tenant closes half of its connections early and sends bad requests; another tenant is honest."""
    bad = Ask(profile.context_tokens_max, 8, is_bad=True)
    asks, names = (Ask(128, 128, abort_after=8), bad) * 4096, [f"abort-{i}" for i in range(profile.slots)]
    hostile = [Session(HEAVY, name, 0.0, seconds, asks, pause_s=0.1) for name in names]
    honest = clients(LIGHT, 2 * profile.slots, (0.0, seconds), Ask(128, 64))
    return Workload("W8", "aborts and refused requests", seconds, (*hostile, *honest))


def w9(random: Random, seconds: float, profile: Profile) -> Workload:
    """Before two gateways, t1 asks at both, 4 to 1; t2 asks at the second one alone."""
    span, many = (0.0, seconds), 16 * profile.slots // 5
    ask = Ask(128, 64)
    sessions = clients("t1", many, span, ask, route=0) + clients("t1", many // 4, span, ask, route=1)
    sessions += clients("t2", 2 * profile.slots, span, ask, route=1)
    return Workload("W9", "two gateways, skewed ingress", seconds, tuple(sessions))


def w10(random: Random, seconds: float, profile: Profile) -> Workload:
    alone = open_loop(random, LIGHT, profile.slots / profile.step_s / 128, (0.0, seconds), (64, 64))
    return Workload("W10", "one alone", seconds, (alone,))


MAKERS: dict[str, Callable[[Random, float, Profile], Workload]] = {
    "W1": w1, "W2": w2, "W3": w3, "W4": w4, "W5": w5, "W6": w6, "W7": w7, "W8": w8, "W9": w9, "W10": w10,
}  # fmt: skip


LENGTHS = {
    "W1": 1.3, "W2": 2.0, "W3": 0.5, "W4": 0.5, "W5": 1.2, "W6": 0.8, "W7": 2.0, "W8": 0.5, "W9": 0.7, "W10": 0.5,
}  # fmt: skip
"""Lengths over `--seconds`, their mean: what settles late runs for longer."""


def workload(name: str, seconds: float, seed: int, profile: Profile) -> Workload:
    """Return a workload, equal for equal arguments. Clients of all tenants begin in a mixed order."""
    random = Random(f"{seed} {name}")
    made = MAKERS[name](random, seconds * LENGTHS[name], profile)
    return replace(made, sessions=tuple(random.sample(made.sessions, len(made.sessions))))
