"""What do gateways that use the same engines tell each other? The values sent to their store, and the ones it returns.

Each gateway has an `AdmissionEngine` of its own and decides by itself. About forty times a second it tells the store
what it uses, what it charged and what its next request needs (`Told`). It hears the sums over the other gateways, and
how much of each backend it may use until the next exchange (`Heard`). docs/replicas.md says what is exact and what is
bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

__all__ = [
    "TOLD_MAX", "Call", "Charge", "Counted", "Grant", "Heard", "Holding", "Left", "News", "Opened", "Presence",
    "Standing", "Tally", "Told", "Unsound", "check", "could_be_told", "is_answer",
]  # fmt: skip

NUMBER_MAX: Final = 1e18
"""More than any gateway counts, and sums of it have room in 64 bits."""
TOLD_MAX: Final = 256
"""Rows of one kind that are told in one exchange. The rest follow in the next one."""
SECONDS_MAX: Final = 1e12
"""The longest time that something is kept. Redis takes no longer one."""
SHAPES: Final = (
    ("standings", "--nnn-"),
    ("presence", "nccc"),
    ("holdings", "-cccccccccc"),
    ("charges", "-nn--"),
    ("tallies", "-csnnnb-"),
    ("calls", "-nnns-"),
    ("under_way", "-c"),
    ("lefts", "--nn"),
)
"""A letter for each value of a row. n: a finite number; c: a count, from 0; s: seconds, more than 0; b: three numbers;
-: what is not counted."""


class Unsound(ValueError):
    """A gateway told a number that cannot be counted: it would stay in the sums of all gateways for ever."""


class Standing(NamedTuple):
    """How much service has the next request's tenant and flow received? Of two that wait, the one with less goes first.

    Requests of one tenant are compared by the service of their flows, those of one flow by their arrival. A policy that
    counts no service has one flow without a name.
    """

    tenant: str
    flow: str
    """Name of its counter."""
    served: float
    flow_served: float
    waited_s: float
    """How long that flow's next request has waited, as of when this is told, or heard."""
    inside: bool
    """Is that request inside an open interaction, so that it goes before others of its flow?"""

    def goes_first(self, other: Standing) -> bool:
        """Before this one, which waits at another gateway?"""
        if self.flow == other.flow:
            return self.is_earlier(other)
        if self.tenant == other.tenant and self.flow_served != other.flow_served:
            return self.flow_served < other.flow_served
        return self.served < other.served

    def is_earlier(self, other: Standing, by_s: float = 0.0) -> bool:
        """Of two of one flow: is this one inside an interaction and the other not, or did it come so much earlier?"""
        if self.inside != other.inside:
            return self.inside
        return self.waited_s > other.waited_s + by_s


class Presence(NamedTuple):
    """Which tenants are active at one gateway, or at all others together (see `policies.capacity.fair_shares`)?"""

    weights: float = 0.0
    held_tokens: int = 0
    running: int = 0
    absent: int = 0
    """Active tenants with nothing queued."""


class Holding(NamedTuple):
    """What does one gateway use of a backend, how large does it take the backend to be, and what does it want there?"""

    backend: str
    sequences: int
    kv_tokens: int
    """Largest KV occupancy that its dispatched requests are expected to reach."""
    kv_tokens_now: int
    sequences_max: int
    """What the backend can run in all."""
    kv_tokens_max: int
    """0: not known."""
    waiting: int = 0
    """Requests that would start there now if there were room."""
    next_sequences: int = 0
    next_kv_tokens: int = 0
    """What the first of them needs."""
    left_sequences: int = 0
    left_kv_tokens: int = 0
    """What it leaves free: the headroom for tenants below their fair share."""


class Grant(NamedTuple):
    """How much of a backend may one gateway use, and what do the others use there?"""

    sequences: int
    kv_tokens: int
    sequences_elsewhere: int = 0
    kv_tokens_elsewhere: int = 0
    """KV tokens held by the others now."""
    sharers: int = 1
    """Gateways with requests running or waiting there, this one included."""


class Charge(NamedTuple):
    """What was a tenant or a flow charged since the last exchange?

    `base` is the shared counter as it is known here. `raises`: it was lifted to that value.
    """

    name: str
    base: float
    service: float
    raises: bool
    is_sole: bool = False
    """It began to wait while nobody else waited here. It is lifted to the least counter that waits elsewhere, or else
    to that of the member that left last at any gateway."""


class Left(NamedTuple):
    """Whose queue emptied last, among all tenants or among the flows of one tenant?"""

    among: str
    """The tenant whose flows these are; "": these are tenants."""
    name: str
    """Name of its counter."""
    counter: float
    left_s: float
    """By the clock that all gateways have in common."""


class Tally(NamedTuple):
    """What was counted for one member of a population in one period since the last exchange?"""

    name: str
    period: int
    ttl_s: int
    starts: int
    requests: int
    tokens: int
    base: tuple[int, int, int]
    """The counts of all gateways as they are known here: starts, requests, tokens."""
    is_new: bool
    """Nothing was heard of it in this period yet. The answer then includes the counts of the previous period."""


class Counted(NamedTuple):
    """What all gateways counted for it in this period and in the previous one (zeros where that was not asked)."""

    starts: int
    requests: int
    tokens: int
    starts_before: int = 0
    requests_before: int = 0
    tokens_before: int = 0


class Call(NamedTuple):
    """What was added to an open interaction since the last exchange? Nothing added: is it open elsewhere?"""

    name: str
    calls: int
    tokens: int
    age_s: float
    idle_s: float
    """It is forgotten after this long without a call."""
    is_over: bool


class Opened(NamedTuple):
    """An interaction as all gateways know it."""

    calls: int
    tokens: int
    age_s: float


class Told(NamedTuple):
    """What one gateway tells the others, about one pool or about what its pools have in common."""

    standings: list[Standing]
    """Of the tenants that are next, in order."""
    presence: Presence
    holdings: list[Holding]
    charges: list[Charge]
    tallies: list[Tally]
    calls: list[Call]
    under_way: list[tuple[str, int]]
    """Requests queued and dispatched, of tenants with a limit on concurrent requests."""
    lefts: list[Left]
    """Where queues have emptied since the last exchange. The tenant that is known to have left last at any gateway
    comes first."""
    quantum: float
    """Counters are lifted to the beginning of a round of this size; 0: there are no rounds."""


class Heard(NamedTuple):
    """What the store returns, in the order of what was told."""

    replicas: int
    next_elsewhere: Standing | None
    """Of the requests that want room at other gateways, the one whose tenant has received least."""
    standings: list[Standing]
    """What is next at each of the other gateways."""
    presence: Presence
    """Of all other gateways together."""
    grants: list[Grant]
    totals: list[float]
    counted: list[Counted]
    opened: list[Opened | None]
    """None: it is not open."""
    under_way: list[tuple[str, int]]
    """Of all other gateways together."""
    left: Left | None
    """The tenant that left last at any gateway, as far as is known."""
    is_forgotten: bool
    """The store does not know this gateway, although it told something before: the store has lost its data."""


class News(NamedTuple):
    """What one gateway tells all others of the prompts that it sent since it last did (see `replicas.prefixes`)."""

    version: int
    replica: str
    """Its name: whoever tells hears it as well."""
    sent: dict[str, list[tuple[int, ...]]]
    """By engine: the hashes of the blocks of each prompt, in the order in which they were sent."""
    charged: dict[str, dict[str, float]]
    """By engine and tenant: what was charged to the deficits there, where the policy has any."""


def could_be_told(message: object) -> bool:
    """Are all numbers in it within `NUMBER_MAX`? What is not a number, or infinite, would stay in the sums for ever."""
    if isinstance(message, (list, tuple)):
        return all([could_be_told(each) for each in message])
    return not isinstance(message, (int, float)) or -NUMBER_MAX <= message <= NUMBER_MAX


def check(number: int, told: Told) -> None:
    """Raises Unsound for an exchange with a number that cannot be counted."""
    place = _unsound_place(number, told)
    if place is not None:
        raise Unsound(f"{place} of what this gateway told is no number that can be counted here")


def _unsound_place(number: int, told: Told) -> str | None:
    if not _is_sound("c", number):
        return "number"
    parts: tuple[Sequence[tuple[object, ...]], ...] = (
        told.standings, [told.presence], told.holdings, told.charges, told.tallies, told.calls, told.under_way,
        told.lefts,
    )  # fmt: skip
    for (name, kinds), rows in zip(SHAPES, parts, strict=True):
        for i, row in enumerate(rows):
            for place, kind in enumerate(kinds):
                if not _is_sound(kind, row[place]):
                    return f"{name}[{i}][{place}]"
    return None if _is_sound("c", told.quantum) else "quantum"


def _is_sound(kind: str, value: object) -> bool:
    if kind == "-":
        return True
    if kind == "b":
        return isinstance(value, tuple) and len(value) == 3 and could_be_told(value)
    if not isinstance(value, (int, float)) or not -NUMBER_MAX <= value <= NUMBER_MAX:
        return False
    return kind == "n" or (value >= 0 if kind == "c" else 0 < value <= SECONDS_MAX)


def is_answer(heard: Heard, told: Told) -> bool:
    """Can this be what the store made of what was told: as much of everything, and of numbers that could be told?"""
    return (
        len(heard.grants) == len(told.holdings)
        and len(heard.totals) == len(told.charges)
        and len(heard.counted) == len(told.tallies)
        and len(heard.opened) == len(told.calls)
        and could_be_told(heard)
    )
