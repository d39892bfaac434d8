"""What do gateways that use the same engines report to each other? The values sent to their store, and the reply.

Each gateway has an `AdmissionEngine` of its own and decides by itself. About forty times a second a busy gateway
reports to the store its use of engines, its charges and the needs of its next request (`ReplicaReport`). The reply has
the sums over the other gateways, and this gateway's part of each backend until the next sync round (`ReplicaView`).
docs/replicas.md says what is exact and what is bounded.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from policies.capacity.gauges import Grant
from policies.limits.sliding_counts import Measures
from policies.request import BATCH, is_batch
from policies.tree.node import NodeUsage

NUMBER_MAX: Final = 1e18
"""Largest number in a report: more than any gateway counts, and sums of it fit into 64 bits."""
REPORTED_MAX: Final = 256
"""Rows of one kind in one sync round. The rest follow in the next round."""
BUCKETS_MAX: Final = 64
"""Buckets of one count that the store keeps, and that one reply has at most."""


class Standing(NamedTuple):
    """The place of a waiting request among those of all gateways: the service of its tenant and flow. Least goes first.

    Requests of one tenant are compared by the service of their flows, and requests of one flow by their arrival. A
    policy that counts no service has one flow without a name.
    """

    tenant: str
    flow: str
    """Name of the flow's counter."""
    served: float
    """Rank of the tenant: its counter, less the window if a call inside an interaction goes first (`rank`)."""
    flow_served: float
    """Rank of the flow inside its tenant."""
    waited_s: float
    """Seconds that the request has waited, as of the report or the reply."""
    inside: bool
    """The request goes before others of its flow, as calls inside interactions do."""

    is_owed: bool = False
    """Batch as a whole has received less than its guaranteed share, so that this batch request goes before others."""

    def _line(self) -> int:
        return 0 if self.is_owed else 1 + is_batch(self.tenant)

    def goes_first(self, other: Standing) -> bool:
        """Return whether this request goes before a request that waits at another gateway."""
        if self.flow == other.flow:
            return self.is_earlier(other)
        if self._line() != other._line():
            return self._line() < other._line()
        if self.tenant == other.tenant and self.flow_served != other.flow_served:
            return self.flow_served < other.flow_served
        return self.served < other.served

    def is_earlier(self, other: Standing, by_s: float = 0.0) -> bool:
        """Return whether this request goes before another of its flow: it alone is `inside`, or came `by_s` earlier."""
        if self.inside != other.inside:
            return self.inside
        return self.waited_s > other.waited_s + by_s


class Holding(NamedTuple):
    """A gateway's use of a backend, its estimate of the backend's size, and the needs of its next request there."""

    backend: str
    sequences: int
    kv_tokens: int
    """Largest KV occupancy that the gateway's dispatched requests are expected to reach."""
    kv_tokens_now: int
    sequences_max: int
    """Sequences that the backend can run in all."""
    kv_tokens_max: int
    """Limit of the backend's KV tokens in all; 0 if not known."""
    waiting: int = 0
    """Requests that wait at the gateway; 0 if the next one could not start at the backend even with more room."""
    next_sequences: int = 0
    next_kv_tokens: int = 0
    """KV tokens that the next request needs."""


class Charge(NamedTuple):
    """The service that a tenant or a flow was charged since the last sync round.

    `base` is the shared counter as it is known here, with new lifts. `raises`: the counter was lifted to `base`.
    """

    name: str
    base: float
    service: float
    raises: bool
    is_sole: bool = False
    """The tenant or flow began to wait while nothing else waited here. The store lifts it to the least counter that
    waits elsewhere, or else to that of the member that left last at any gateway."""


class Departure(NamedTuple):
    """The member whose queue emptied last, among all tenants of a line or among the flows of one tenant."""

    among: str
    """Name of the tenant for flows, or `line_name` for tenants."""
    name: str
    """Name of the member's counter."""
    counter: float
    left_s: float
    """Time by the clock that all gateways have in common."""


def line_name(tenant: str) -> str:
    """Return the name of the line in which a tenant node is compared: of interactive work, or of batch."""
    return BATCH if is_batch(tenant) else ""


class CountDelta(NamedTuple):
    """The counts of one member of a population in one bucket of time since the last sync round."""

    name: str
    bucket: int
    ttl_s: int
    more: Measures
    base: Measures
    """The counts of all gateways as they are known here."""
    since: int
    """First bucket whose counts this gateway wants: it knows all earlier counts of the other gateways."""
    is_lost: bool = False
    """The store has lost its data: at least `base` was counted."""

    @property
    def first(self) -> int:
        """First bucket in the reply."""
        return min(self.bucket, max(self.since, self.bucket - BUCKETS_MAX + 1))


Counted = list[Measures]
"""The counts of all gateways for a `CountDelta`, in each bucket from its `first` one."""


class InteractionDelta(NamedTuple):
    """The calls and tokens of an open interaction since the last sync round.

    With 0 calls and 0 tokens, the question whether the interaction is open at any gateway.
    """

    name: str
    calls: int
    tokens: int
    age_s: float
    idle_s: float
    """Seconds without a call after which the store forgets the interaction."""
    is_over: bool


class InteractionTotals(NamedTuple):
    """An open interaction, with the sums over all gateways."""

    calls: int
    tokens: int
    age_s: float


class ReplicaReport(NamedTuple):
    """A gateway's report to the others, about one pool, or about the limits and interactions of all pools."""

    standings: list[Standing]
    """Next requests of the tenants that go next, in order."""
    holdings: list[Holding]
    charges: list[Charge]
    tallies: list[CountDelta]
    calls: list[InteractionDelta]
    usage: list[NodeUsage]
    """Usage of the nodes of the pool's tree. Without a pool: requests queued and dispatched, of members with a limit on
    concurrent ones."""
    lefts: list[Departure]
    """Queues that have emptied since the last sync round. The tenant that is known to have left last at any gateway
    comes first."""
    quantum: float
    """Size of a round, to whose beginning counters are lifted; 0 if there are no rounds."""


class ReplicaView(NamedTuple):
    """The store's reply to a report, in the order of the report."""

    replicas: int
    next_elsewhere: Standing | None
    """The request that goes first among those that want room at other gateways."""
    standings: list[Standing]
    """Next requests at each of the other gateways."""
    grants: list[Grant]
    totals: list[float]
    counted: list[Counted]
    opened: list[InteractionTotals | None]
    """Interactions asked for; None if not open."""
    usage: list[NodeUsage]
    """Sums over all other gateways."""
    left: Departure | None
    """The tenant that left last at any gateway, as far as the store knows."""
    is_forgotten: bool
    """The store does not know this gateway, although the gateway has reported before: the store has lost its data."""


class PrefixReport(NamedTuple):
    """A gateway's report to all others: the prompts that it sent since its last report, and what it charged for them
    (`replicas.prefixes`)."""

    version: int
    replica: str
    """Name of the gateway. A gateway receives its own reports as well, and drops them by this name."""
    sent: dict[str, list[tuple[int, ...]]]
    """Hashes of the blocks of each prompt, by engine, in the order in which the prompts were sent."""
    charged: dict[str, dict[str, float]]
    """Charges to the deficits of a policy that has them, by engine and tenant."""


def is_countable(message: object) -> bool:
    """Return whether all numbers in a message are within `NUMBER_MAX`. Infinite ones would spoil the sums for ever."""
    if isinstance(message, (list, tuple)):
        return all([is_countable(each) for each in message])
    return not isinstance(message, (int, float)) or -NUMBER_MAX <= message <= NUMBER_MAX


def is_answer(view: ReplicaView, report: ReplicaReport) -> bool:
    """Return whether the view can be the reply to the report.

    The view must have an entry for each entry of the report, and only numbers that can be counted.
    """
    return (
        len(view.grants) == len(report.holdings)
        and len(view.totals) == len(report.charges)
        and [len(counted) for counted in view.counted] == [one.bucket - one.first + 1 for one in report.tallies]
        and len(view.opened) == len(report.calls)
        and is_countable(view)
    )
