"""What do gateways that use the same engines report to each other? The values sent to their store, and the reply.

Each gateway has an `AdmissionEngine` of its own and decides by itself. About forty times a second it reports to the
store what it uses, what it charged and what its next request needs (`ReplicaReport`). The reply has the sums over the
other gateways, and how much of each backend this gateway may use until the next sync round (`ReplicaView`).
docs/replicas.md says what is exact and what is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from policies.capacity.fair_shares import Activity
from policies.capacity.gauges import Grant
from policies.limits.sliding_counts import NOTHING, Measures
from policies.request import BATCH, is_batch

NUMBER_MAX: Final = 1e18
"""More than any gateway counts, and sums of it have room in 64 bits."""
REPORTED_MAX: Final = 256
"""Rows of one kind that are reported in one sync round. The rest follow in the next one."""
SECONDS_MAX: Final = 1e12
"""The longest time that something is kept. Redis takes no longer one."""
BUCKETS_MAX: Final = 64
"""Buckets of one count that the store keeps, and that one reply has."""
SHAPES: Final = (
    ("standings", "--nnn--"),
    ("presence", "nccc"),
    ("holdings", "-cccccccccc"),
    ("charges", "-nn--"),
    ("tallies", "-csbbn-"),
    ("calls", "-nnns-"),
    ("under_way", "-c"),
    ("lefts", "--nn"),
)
"""A letter for each value of a row. n: a finite number; c: a count, from 0; s: seconds, more than 0; b: four numbers;
-: what is not counted."""


class Unsound(ValueError):
    """A report has a number that cannot be counted: it would stay in the sums of all gateways for ever."""


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
    """How long that flow's next request has waited, as of the report or the reply that says this."""
    inside: bool
    """Is that request inside an open interaction, so that it goes before others of its flow?"""

    is_owed: bool = False
    """It can wait, and has received less than is guaranteed to such work, so that it goes before other work."""

    def can_wait(self) -> bool:
        """Is it of class batch?"""
        return is_batch(self.tenant)

    def _line(self) -> int:
        return 0 if self.is_owed else 1 + is_batch(self.tenant)

    def goes_first(self, other: Standing) -> bool:
        """Before this one, which waits at another gateway?"""
        if self.flow == other.flow:
            return self.is_earlier(other)
        if self._line() != other._line():
            return self._line() < other._line()
        if self.tenant == other.tenant and self.flow_served != other.flow_served:
            return self.flow_served < other.flow_served
        return self.served < other.served

    def is_earlier(self, other: Standing, by_s: float = 0.0) -> bool:
        """Of two of one flow: is this one inside an interaction and the other not, or did it come so much earlier?"""
        if self.inside != other.inside:
            return self.inside
        return self.waited_s > other.waited_s + by_s


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
    """The tenant whose flows these are, or else `line_of` the tenants that these are."""
    name: str
    """Name of its counter."""
    counter: float
    left_s: float
    """By the clock that all gateways have in common."""


def line_of(tenant: str) -> str:
    """Among which tenants is this one compared, as `Left.among` names them?"""
    return BATCH if is_batch(tenant) else ""


class CountDelta(NamedTuple):
    """What was counted for one member of a population in one bucket of time since the last exchange?"""

    name: str
    bucket: int
    ttl_s: int
    more: Measures
    base: Measures
    """The counts of all gateways as they are known here."""
    since: int
    """The first bucket of which the reply has the counts. What others have counted in earlier ones is known here."""
    is_lost: bool = False
    """The store has lost its data: at least `base` was counted."""

    @property
    def first(self) -> int:
        """The first bucket that is in the reply."""
        return min(self.bucket, max(self.since, self.bucket - BUCKETS_MAX + 1))


Counted = list[Measures]
"""What all gateways counted for it, in each bucket of a `CountDelta` from its `first` one."""


class CallDelta(NamedTuple):
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


class ReplicaReport(NamedTuple):
    """What one gateway reports to the others, about one pool or about what its pools have in common."""

    standings: list[Standing]
    """Of the tenants that are next, in order."""
    presence: Activity
    holdings: list[Holding]
    charges: list[Charge]
    tallies: list[CountDelta]
    calls: list[CallDelta]
    under_way: list[tuple[str, int]]
    """By tenant. Of what the pools have in common: requests queued and dispatched, where concurrent ones have a limit.
    Of a pool: KV tokens of the working set (`capacity.working_set`), and those of smaller tenants under ""."""
    lefts: list[Left]
    """Where queues have emptied since the last exchange. The tenant that is known to have left last at any gateway
    comes first."""
    quantum: float
    """Counters are lifted to the beginning of a round of this size; 0: there are no rounds."""


class ReplicaView(NamedTuple):
    """The store's reply to a report, in the order of the report."""

    replicas: int
    next_elsewhere: Standing | None
    """Of the requests that want room at other gateways, the one whose tenant has received least."""
    standings: list[Standing]
    """What is next at each of the other gateways."""
    presence: Activity
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
    """The store does not know this gateway, although the gateway has reported before: the store has lost its data."""


class News(NamedTuple):
    """What one gateway reports to all others of the prompts that it sent since its last news (see
    `replicas.prefixes`)."""

    version: int
    replica: str
    """Its name. A gateway receives its own news as well, and drops them by this name."""
    sent: dict[str, list[tuple[int, ...]]]
    """By engine: the hashes of the blocks of each prompt, in the order in which they were sent."""
    charged: dict[str, dict[str, float]]
    """By engine and tenant: what was charged to the deficits there, where the policy has any."""


def is_countable(message: object) -> bool:
    """Are all numbers in it within `NUMBER_MAX`? What is not a number, or infinite, would stay in the sums for ever."""
    if isinstance(message, (list, tuple)):
        return all([is_countable(each) for each in message])
    return not isinstance(message, (int, float)) or -NUMBER_MAX <= message <= NUMBER_MAX


def check(number: int, report: ReplicaReport) -> None:
    """Raises Unsound for an exchange with a number that cannot be counted."""
    place = _unsound_place(number, report)
    if place is not None:
        raise Unsound(f"{place} of what this gateway reported is no number that can be counted here")


def _unsound_place(number: int, report: ReplicaReport) -> str | None:
    if not _is_sound("c", number):
        return "number"
    parts: tuple[Sequence[tuple[object, ...]], ...] = (
        report.standings, [report.presence], report.holdings, report.charges, report.tallies, report.calls,
        report.under_way, report.lefts,
    )  # fmt: skip
    for (name, kinds), rows in zip(SHAPES, parts, strict=True):
        for i, row in enumerate(rows):
            for place, kind in enumerate(kinds):
                if not _is_sound(kind, row[place]):
                    return f"{name}[{i}][{place}]"
    return None if _is_sound("c", report.quantum) else "quantum"


def _is_sound(kind: str, value: object) -> bool:
    if kind == "-":
        return True
    if kind == "b":
        return isinstance(value, (list, tuple)) and len(value) == len(NOTHING) and is_countable(value)
    if not isinstance(value, (int, float)) or not -NUMBER_MAX <= value <= NUMBER_MAX:
        return False
    return kind == "n" or (value >= 0 if kind == "c" else 0 < value <= SECONDS_MAX)


def is_answer(view: ReplicaView, report: ReplicaReport) -> bool:
    """Can this be the store's reply to the report: an entry for each entry of the report, and only numbers that can be
    counted?"""
    return (
        len(view.grants) == len(report.holdings)
        and len(view.totals) == len(report.charges)
        and [len(counted) for counted in view.counted] == [one.bucket - one.first + 1 for one in report.tallies]
        and len(view.opened) == len(report.calls)
        and is_countable(view)
    )
