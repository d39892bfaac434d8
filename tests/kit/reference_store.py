"""The script of the store once more, in Python: tests compare the two, and simulations run this one.

`ReferenceStore` and `gateway/storage/redis/exchange.lua` decide alike who goes first, how an engine is divided, and
what all gateways counted together.

An engine is divided by *grants*. A gateway keeps the slots that it uses, and gets more only of those that the grants of
all others leave free. Example: of 10 slots A was granted 6, and B runs 2, so 2 are free. B has requests of one sequence
waiting. If nothing at A goes first, B is granted 3 slots: half of the free ones more. If two requests at A go first, B
is granted 2, and the next round of A takes the free slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from math import floor as rounded_down
from operator import add
from typing import Final, Generic, NamedTuple, TypeVar

from policies.capacity.gauges import Grant
from policies.limits.sliding_counts import NOTHING, Measures
from policies.replicas.messages import (
    BUCKETS_MAX,
    NUMBER_MAX,
    CallDelta,
    Charge,
    CountDelta,
    Counted,
    Holding,
    Left,
    Opened,
    ReplicaReport,
    ReplicaView,
    Standing,
    is_countable,
    line_of,
)
from policies.replicas.schedule import ALONE_S, WAITS_S
from policies.tree.node import NodeUsage

MEMBER_MS: Final = 3000 * ALONE_S
"""Silence after which a gateway has no part of any engine."""
WAITS_MS: Final = 1000 * WAITS_S
NUMBERS_MS: Final = 3_600_000
"""Silence after which a gateway's last number is forgotten: longer, because the gateway may only have been paused."""
COUNTERS_MS: Final = 900_000
"""Time without a change after which the counter of a tenant or flow is forgotten."""
SWEEP_MS: Final = 60_000
SECONDS_MAX: Final = 1e12
"""Longest time to live of a row. Redis takes no longer one."""
SHAPES: Final = (
    ("standings", "--nnn--"),
    ("holdings", "-cccccccc"),
    ("charges", "-nn--"),
    ("tallies", "-csbbn-"),
    ("calls", "-nnns-"),
    ("usage", "-nc"),
    ("lefts", "--nn"),
)
"""A letter for each value of a row. n: a finite number; c: a count, from 0; s: seconds, more than 0; b: four numbers;
-: not checked."""


class Unsound(ValueError):
    """A report with a number that cannot be counted, and that would stay in the sums of all gateways for ever."""


T = TypeVar("T")


class _Kept(NamedTuple, Generic[T]):
    """A stored value and its expiry."""

    value: T
    until_ms: float


class _Held(NamedTuple):
    """A gateway's report about one engine, and its grant there."""

    holding: Holding
    granted: int
    granted_kv: int


class _Record:
    """The last report of one gateway."""

    def __init__(self, number: int, seen_ms: int, report: ReplicaReport) -> None:
        self.number = number
        self.seen_ms = seen_ms
        self.standings = report.standings
        self.counters: tuple[float, float] | None = None
        """Sums of the counters of the first standing's tenant and flow, as of the report; None if not reported."""
        self.usage = report.usage
        self.holdings: dict[str, _Held] = {}


class _Other(NamedTuple):
    """Another gateway as of one sync round."""

    record: _Record
    is_silent: bool
    standings: list[Standing]
    first: Standing | None
    """First of the standings, with later charges and with its wait until now."""

    def standings_now(self) -> list[Standing]:
        """Return the standings, with the first one brought up to date."""
        return self.standings if self.first is None else [self.first, *self.standings[1:]]


class ReferenceStore:
    """The store of the gateways of one pool, or of the limits and interactions of all pools."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._counters: dict[str, _Kept[float]] = {}
        self._lefts: dict[str, _Kept[Left]] = {}
        self._sums: dict[str, _Kept[dict[int, Measures]]] = {}
        """Counts in each bucket, by name."""
        self._open: dict[str, _Kept[tuple[int, int, int]]] = {}
        """Calls, tokens, and the beginning (ms) of each open interaction."""
        self._swept_ms = 0

    def exchange(self, me: str, number: int, report: ReplicaReport, now_ms: int) -> ReplicaView:
        """Return the reply to the report of one gateway.

        A `number` comes twice if its reply was lost. The report is then answered again, but counted once. Raises
        Unsound for a number that cannot be counted; nothing of the report is kept then.
        """
        check(number, report)
        self._sweep(now_ms)
        before = self._records.get(me)
        others = self._others(me, now_ms)
        is_repeated = before is not None and number <= before.number
        waiting = [one for record in others for one in self._seen(record, now_ms).standings_now()]
        floors = [self._floor(one.name, waiting, report.quantum) if one.is_sole else None for one in report.charges]
        totals = [
            self._charged(one, floor, now_ms, is_repeated, before is not None)
            for one, floor in zip(report.charges, floors, strict=True)
        ]
        for left in report.lefts:
            known = self._lefts.get(left.among)
            if known is None or left.left_s > known.value.left_s:
                self._lefts[left.among] = _Kept(left, now_ms + COUNTERS_MS)
        sums = [self._tallied(one, now_ms, is_repeated, before is not None) for one in report.tallies]
        opened = [self._called(one, now_ms, is_repeated) for one in report.calls]
        standings, counters = _as_of_now(report, totals)
        standing = standings[0] if standings else None
        seen = [self._seen(record, now_ms) for record in others]
        next_elsewhere: Standing | None = None
        for other in seen:
            for held in other.record.holdings.values():
                first = other.first
                if first is None or not held.holding.waiting:
                    continue
                if next_elsewhere is None or first.goes_first(next_elsewhere):
                    next_elsewhere = first
        mine = [_divided(holding, standing, seen) for holding in report.holdings]
        record = _Record(max(number, before.number if before is not None else 0), now_ms, report)
        record.standings = standings
        record.counters = counters
        record.holdings = {one.holding.backend: one for one, _ in mine}
        self._records[me] = record
        return ReplicaView(
            len(others) + 1,
            next_elsewhere,
            [one for other in seen for one in other.standings],
            [grant for _, grant in mine],
            totals,
            sums,
            opened,
            _sum_usage(seen),
            self._left(),
            before is None and number > 1,
        )

    def leave(self, me: str) -> None:
        """Remove a gateway that is gone, with its part of every engine."""
        self._records.pop(me, None)

    # --- which gateways are present ---

    def _others(self, me: str, now_ms: int) -> list[_Record]:
        """Return the last reports of the other gateways that are not silent."""
        found = []
        for name, record in sorted(self._records.items()):
            # After a failover of the server, its clock may be behind that of its predecessor.
            age_ms = abs(now_ms - record.seen_ms)
            if name == me:
                continue
            if age_ms > NUMBERS_MS:
                del self._records[name]
            elif age_ms <= MEMBER_MS:
                found.append(record)
        return found

    def _seen(self, record: _Record, now_ms: int) -> _Other:
        """Return a gateway as of this round: silent, or with its first standing brought up to date."""
        age_ms = abs(now_ms - record.seen_ms)
        if age_ms > WAITS_MS:
            return _Other(record, True, [], None)
        first = record.standings[0] if record.standings else None
        if first is not None:
            first = first._replace(waited_s=first.waited_s + age_ms / 1000)
        if first is not None and record.counters is not None and first.flow:
            # The counter as reported, plus what any gateway has charged to it since. Without the later charges, every
            # gateway that serves this flow would compare itself with an outdated, too small counter of the others.
            tenant = self._counter(first.tenant)
            flow = self._counter(first.flow)
            known_tenant, known_flow = record.counters
            first = first._replace(
                served=first.served + (known_tenant if tenant is None else tenant) - known_tenant,
                flow_served=first.flow_served + (known_flow if flow is None else flow) - known_flow,
            )
        return _Other(record, False, record.standings, first)

    def _sweep(self, now_ms: int) -> None:
        """Drop the entries that have expired, once in `SWEEP_MS`."""
        if abs(now_ms - self._swept_ms) < SWEEP_MS:
            return
        self._swept_ms = now_ms
        kept: tuple[dict[object, _Kept[object]], ...] = (  # type: ignore[assignment]
            self._counters, self._lefts, self._sums, self._open,
        )  # fmt: skip
        for table in kept:
            for key in [key for key, one in table.items() if one.until_ms <= now_ms]:
                del table[key]

    # --- what was charged ---

    def _counter(self, name: str) -> float | None:
        kept = self._counters.get(name)
        return None if kept is None else kept.value

    def _charged(self, charge: Charge, floor: float | None, now_ms: int, is_repeated: bool, was_here: bool) -> float:
        """Add one charge to its counter, and return the counter.

        A counter that is not known here has expired, was lost or is new. It continues from the value that its gateway
        knows.
        """
        known = self._counter(charge.name)
        total = charge.base if known is None else known
        if not is_repeated:
            # The store may have lost its data. The highest value that any gateway knows is then the right one.
            if charge.raises or not was_here:
                total = max(total, charge.base)
            if floor is not None:
                total = max(total, floor)
            total += charge.service
        if total != known:
            self._counters[charge.name] = _Kept(total, now_ms + COUNTERS_MS)
        return total

    def _left(self) -> Left | None:
        """Return the tenant that left last, with its present counter."""
        kept = self._lefts.get("")
        if kept is None:
            return None
        counter = self._counter(kept.value.name)
        return kept.value if counter is None else kept.value._replace(counter=counter)

    def _floor(self, name: str, waiting: list[Standing], quantum: float) -> float | None:
        """Return the counter to which a member is lifted that arrives while no other waits at its own gateway.

        The least counter that waits elsewhere or, if nothing waits anywhere, the counter of the member that left last.
        None for a member that waits elsewhere itself, or that left last itself.
        """
        among, is_flow, _ = name.partition("\x1f")
        if not is_flow:
            among = line_of(name)
        if any(name == (one.flow if is_flow else one.tenant) for one in waiting):
            return None
        served = [
            one.flow_served if is_flow else one.served
            for one in waiting
            if (one.tenant if is_flow else line_of(one.tenant)) == among
        ]
        if served:
            floor = min(served)
        else:
            kept = self._lefts.get(among)
            if kept is None or kept.value.name == name:
                return None
            counter = self._counter(kept.value.name)
            floor = kept.value.counter if counter is None else counter
        return floor - floor % quantum if quantum else floor

    # --- what was counted, and which interactions are open ---

    def _tallied(self, tally: CountDelta, now_ms: int, is_repeated: bool, was_here: bool) -> Counted:
        """Add what a gateway counted, and return the sums of the buckets in the window."""
        kept = self._sums.get(tally.name)
        buckets = kept.value if kept is not None else {}
        sums = buckets.get(tally.bucket, tally.base)
        if not was_here or tally.is_lost:
            sums = _each(max, sums, tally.base)
        if not is_repeated and (any(tally.more) or tally.is_lost):
            buckets[tally.bucket] = sums = _each(add, sums, tally.more)
            for bucket in [each for each in buckets if each <= tally.bucket - BUCKETS_MAX]:
                del buckets[bucket]
            self._sums[tally.name] = _Kept(buckets, now_ms + tally.ttl_s * 1000)
        return [*[buckets.get(each, NOTHING) for each in range(tally.first, tally.bucket)], sums]

    def _called(self, call: CallDelta, now_ms: int, is_repeated: bool) -> Opened | None:
        """Add the calls of an interaction, and return its sums; None if it is over or was never begun."""
        kept = self._open.get(call.name)
        known = kept.value if kept is not None else (0, 0, 0)
        if call.is_over:
            self._open.pop(call.name, None)
            return None
        if known[2] == 0:
            if not call.calls and not call.tokens:
                return None
            known = (0, 0, rounded_down(now_ms - call.age_s * 1000))
        if not is_repeated:
            known = (known[0] + call.calls, known[1] + call.tokens, known[2])
        self._open[call.name] = _Kept(known, now_ms + ceil(call.idle_s * 1000))
        return Opened(known[0], known[1], (now_ms - known[2]) / 1000)


def _each(of_two: Callable[[int, int], int], one: Measures, other: Measures) -> Measures:
    return of_two(one[0], other[0]), of_two(one[1], other[1]), of_two(one[2], other[2]), of_two(one[3], other[3])


def _as_of_now(report: ReplicaReport, totals: list[float]) -> tuple[list[Standing], tuple[float, float] | None]:
    """Return the standings with the charges of others, and the sums of the first one's two counters if reported."""
    at = {one.name: (one.base + one.service, total) for one, total in zip(report.charges, totals, strict=True)}
    standings, counters = [], None
    for place, one in enumerate(report.standings):
        tenant, flow = at.get(one.tenant), at.get(one.flow)
        if one.flow and tenant is not None and flow is not None:
            served, flow_served = one.served + tenant[1] - tenant[0], one.flow_served + flow[1] - flow[0]
            one = one._replace(served=served, flow_served=flow_served)
            if place == 0:
                counters = tenant[1], flow[1]
        standings.append(one)
    return standings, counters


def _divided(own: Holding, standing: Standing | None, others: list[_Other]) -> tuple[_Held, Grant]:
    """Return this gateway's record and grant of one engine."""
    most, kv_most = own.sequences_max, own.kv_tokens_max
    granted = granted_kv = elsewhere = kv_elsewhere = 0
    sharers = 1
    is_wanted = False
    first: list[Holding] = []
    for other in others:
        held = other.record.holdings.get(own.backend)
        if held is None:
            continue
        # A gateway that has used the engine for longer may have seen it run more sequences.
        most, kv_most = max(most, held.holding.sequences_max), max(kv_most, held.holding.kv_tokens_max)
        granted, granted_kv = granted + held.granted, granted_kv + held.granted_kv
        waits = other.first is not None and held.holding.waiting > 0
        if not other.is_silent:
            # The engine's own gauges show better what a silent gateway still runs there.
            elsewhere, kv_elsewhere = elsewhere + held.holding.sequences, kv_elsewhere + held.holding.kv_tokens_now
            sharers += held.holding.sequences > 0 or waits
        if waits and other.first is not None:
            is_wanted = True
            if standing is None or other.first.goes_first(standing):
                first.append(held.holding)
    wanted, wanted_kv = 0, 0
    # Only requests that find a free slot can start, so only those need KV now. Otherwise the requests that wait for
    # slots would keep all of the KV cache free.
    for before in first:
        startable = ceil((most - granted - own.sequences - wanted) / max(1, before.next_sequences))
        starts = max(1, min(before.waiting, startable))
        wanted, wanted_kv = wanted + starts * before.next_sequences, wanted_kv + starts * before.next_kv_tokens
    live = len(others) + 1
    sequences = own.sequences + _part(
        most - granted - own.sequences, wanted, is_wanted, own.next_sequences, own.waiting, live
    )
    tokens = own.kv_tokens + _part(
        kv_most - granted_kv - own.kv_tokens, wanted_kv, is_wanted, own.next_kv_tokens, own.waiting, live
    )
    return _Held(own, sequences, tokens), Grant(sequences, tokens, elsewhere, kv_elsewhere, sharers)


def _part(free: int, wanted_before: int, wanted_elsewhere: bool, needed: int, waiting: int, live: int) -> int:
    """Return this gateway's part of the free slots or tokens.

    A gateway with a waiting request gets what that request needs, or an equal part per gateway if that is more and its
    requests can use it. The needs of requests that go first stay free. A gateway without a waiting request gets nothing
    while another waits, and otherwise an equal part in advance.
    """
    if waiting > 0:
        free -= wanted_before
        return max(0, min(free, max(needed, min(needed * waiting, ceil(free / live)))))
    if wanted_elsewhere:
        return 0
    return max(0, rounded_down(free / live))


def _sum_usage(others: list[_Other]) -> list[NodeUsage]:
    sums: dict[tuple[str, int], float] = {}
    for other in others:
        for node, resource, amount in other.record.usage:
            sums[node, resource] = sums.get((node, resource), 0.0) + amount
    return [NodeUsage(node, resource, amount) for (node, resource), amount in sums.items()]


def check(number: int, report: ReplicaReport) -> None:
    """Raise Unsound if the number of the sync round, or a number in its report, cannot be counted."""
    place = _unsound_place(number, report)
    if place is not None:
        raise Unsound(f"{place} of what this gateway reported is no number that can be counted here")


def _unsound_place(number: int, report: ReplicaReport) -> str | None:
    if not _is_sound("c", number):
        return "number"
    parts: tuple[Sequence[tuple[object, ...]], ...] = (
        report.standings, report.holdings, report.charges, report.tallies, report.calls,
        report.usage, report.lefts,
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
