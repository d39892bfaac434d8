"""What do gateways that share engines tell each other? The values that go to their common store, and what comes back.

Each gateway has an `AdmissionEngine` of its own and decides by itself. About forty times a second it tells the store
what it holds, what it charged, and what its next request needs (`Told`), and hears what the others did, in sums, and
how much of each backend is its own until it asks again (`Heard`). What is exact, what is bounded: docs/replicas.md.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "Call",
    "Charge",
    "Counted",
    "Grant",
    "Heard",
    "Holding",
    "Left",
    "Opened",
    "Presence",
    "Standing",
    "Tally",
    "Told",
]


class Standing(NamedTuple):
    """How much has the next one in the queue received? Of two that wait, the one with less goes first.

    Requests of one tenant are compared by what their flows have received. A policy that counts no service tells when
    the next one arrived instead.
    """

    tenant: str
    flow: str
    """By the name of its counter."""
    served: float
    flow_served: float


class Presence(NamedTuple):
    """Who is active in one gateway, or in all others together (see `policies.capacity.fair_shares`)?"""

    weights: float = 0.0
    held_tokens: int = 0
    running: int = 0
    absent: int = 0
    """Active tenants with nothing in the queue."""


class Holding(NamedTuple):
    """What does one gateway hold of a backend, how large does it take it to be, and what does it want of it?"""

    backend: str
    sequences: int
    kv_tokens: int
    """Reached at the largest by what is dispatched."""
    kv_tokens_now: int
    sequences_max: int
    """That the backend may have in all."""
    kv_tokens_max: int
    """0: not known."""
    waiting: int = 0
    """Requests that would start there now if there were room."""
    next_sequences: int = 0
    next_kv_tokens: int = 0
    """What the first of them needs."""
    left_sequences: int = 0
    left_kv_tokens: int = 0
    """What it leaves free: the headroom of those below their share."""


class Grant(NamedTuple):
    """How much of a backend is one gateway's own, and what do the others do there?"""

    sequences: int
    kv_tokens: int
    sequences_elsewhere: int = 0
    kv_tokens_elsewhere: int = 0
    """Held by them now."""
    sharers: int = 1
    """Gateways that have something running or waiting there, this one included."""


class Charge(NamedTuple):
    """What was a tenant or a flow charged since the last time?

    `base` is its shared counter as it is known here, `raises` says that it was lifted to that.
    """

    name: str
    base: float
    service: float
    raises: bool
    is_sole: bool = False
    """It began to wait while nobody else waited here: it is lifted to what waits elsewhere, or left last anywhere."""


class Left(NamedTuple):
    """Whose queue emptied last, among tenants or among the flows of one tenant?"""

    among: str
    """Name of the tenant whose flows they are; "": they are tenants."""
    name: str
    """By the name of its counter."""
    counter: float
    left_s: float
    """By the clock that all gateways have in common."""


class Tally(NamedTuple):
    """What was counted of one member of a population in a period, since the last time?"""

    name: str
    period: int
    ttl_s: int
    starts: int
    requests: int
    tokens: int
    base: tuple[int, int, int]
    """The same of all gateways, as it is known here."""
    is_new: bool
    """Nothing was heard of it in this period: what was counted in the one before is asked for as well."""


class Counted(NamedTuple):
    """What all gateways counted of it, in the period and in the one before (zeros where that was not asked for)."""

    starts: int
    requests: int
    tokens: int
    starts_before: int = 0
    requests_before: int = 0
    tokens_before: int = 0


class Call(NamedTuple):
    """What was added to an open interaction since the last time? Nothing: it is asked whether it is open elsewhere."""

    name: str
    calls: int
    tokens: int
    age_s: float
    idle_s: float
    """It is forgotten when it was silent for so long."""
    is_over: bool


class Opened(NamedTuple):
    """An interaction as all gateways know it."""

    calls: int
    tokens: int
    age_s: float


class Told(NamedTuple):
    """From one gateway to the others, of one pool or of what its pools have in common."""

    standings: list[Standing]
    """Of the tenants that are next, in order."""
    presence: Presence
    holdings: list[Holding]
    charges: list[Charge]
    tallies: list[Tally]
    calls: list[Call]
    under_way: list[tuple[str, int]]
    """Requests of tenants that may have so many at once."""
    lefts: list[Left]
    """Where queues emptied since the last time; the last tenant that is known to have left anywhere comes first."""
    quantum: float
    """Counters are lifted to the beginning of a round of this size; 0: there are no rounds."""


class Heard(NamedTuple):
    """What came back, in the order of what was told."""

    replicas: int
    next_elsewhere: Standing | None
    """Of all others that want something, the one that has received least."""
    standings: list[Standing]
    """Of all others that wait, those that are next at each gateway."""
    presence: Presence
    """Of all others together."""
    grants: list[Grant]
    totals: list[float]
    counted: list[Counted]
    opened: list[Opened | None]
    """None: it is not open."""
    under_way: list[tuple[str, int]]
    """Of all others together."""
    left: Left | None
    """The tenant that left last anywhere, as far as is known."""
    is_forgotten: bool
    """The store knew nothing of this gateway, which had told it something before: all that it held is lost."""
