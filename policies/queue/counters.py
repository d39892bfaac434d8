"""Which waiting member has received least service? One level of counters, kept in order as they grow.

A `CounterHeap` contains the members with queued requests, ordered by (counter, turn, name). Counters mostly grow, often
by a token at a time. So the heap is corrected lazily. An entry whose counter has grown is moved when it reaches the
top. A counter that falls below its entry (a refund) gets a second entry, and the old one is dropped when it reaches the
top. Invariant: each awake member has one valid entry, `member.entry`, and its place is never below that entry.

Lift (VTC, algorithm 2): a member with its first queued request is raised to the least waiting counter. If no member
waits, the new one is raised to the counter of the member that left last. So idling banks no credit. A lift never lowers
a counter, so debt stays. Any value between the least and the greatest waiting counter keeps the bound (remark 4.6).

Window: a preferred member (one with a call inside an interaction) goes before others as long as its counter is at
most `window` above theirs. So members are ordered by their rank: the counter, less the window if the member is
preferred. Service to a preferred member counts, so the member gets ahead by the window once, not repeatedly. For this
reason a member that begins to wait is raised to the least *rank*: otherwise preferred members that are ahead by the
window would get another window over each newcomer. A preferred member that begins to wait at the floor has a rank below
it, and does not lower the floor: such members would lower the floor for one another. All waiting counters stay within
the window plus the dispatched service of each other. With a window of 0 this is the paper's algorithm.

Turns: among equal counters, the member served longest ago goes first. With a `quantum`, counters are read in whole
quanta. A member is then served until its counter has passed a multiple of the quantum. The members of one round go in
the order in which they began to wait (deficit round robin, see `orders.rr`). A new member is raised to the beginning of
the present round, so that every member may use all of the round, early or late.

Example (window 0): A and B wait with counters 5 and 9. C returns with 2 and is raised to 5; with 7 it would keep 7.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Any, Generic, TypeVar

Entry = Any
"""Heap entry (rank or round, turn, name, member), ordered by the first three and compared by identity. The type is not
a tuple, because mypyc tuples have no identity."""


class CounterMember:
    """A member of one level: a tenant among tenants, or a flow among the flows of its tenant."""

    __slots__ = (
        "answer_s", "asked_s", "counter", "entry", "gap_s", "is_asleep", "is_sole", "lifted", "name", "preferred",
        "queued", "reported", "running", "turn", "usual", "weight",
    )  # fmt: skip

    def __init__(self, name: tuple[str, ...]) -> None:
        self.name = name
        self.counter = 0.0
        self.lifted = 0.0
        """Part of the counter that came from lifts, and not from service."""
        self.is_sole = False
        """True from a lift by local knowledge alone until that lift is reported to other gateways."""
        self.is_asleep = False
        """Requests wait, but none may go now, so the member is not in the heap."""
        self.preferred = False
        """The member goes before others whose counter is below its own by at most the window."""
        self.queued = 0
        self.running = 0
        self.turn = 0
        """Place among equal counters."""
        self.weight = 1.0
        self.usual = 0.0
        """Moving average of the charge of requests that had to wait; 0 until one was answered (`expected_wait`)."""
        self.answer_s = 0.0
        """Moving average of the seconds that an engine takes for such a request."""
        self.asked_s = -1.0
        """Arrival time of the last request that had to wait; -1 if there was none."""
        self.gap_s = 0.0
        """Moving average of the seconds between two such arrivals."""
        self.entry: Entry = None
        """The valid heap entry; None while no request waits, or the member sleeps."""
        self.reported: Any = None
        """Counter and lifts as other gateways know them. Written by the code that reports them."""

    def __hash__(self) -> int:
        # With mypyc, a class with __lt__ has no hash. Members are dictionary keys, so they need one.
        return id(self)

    def __lt__(self, other: CounterMember) -> bool:
        # The heap compares members only if all else is equal. One of the two entries is then stale, and dropped later.
        return False


M = TypeVar("M", bound=CounterMember)


class CounterHeap(Generic[M]):
    """The members of one level, ordered by received service. Idle members are kept until they are forgotten."""

    def __init__(self, *, quantum: float = 0.0, window: float = 0.0) -> None:
        self.window = window
        self._quantum = quantum
        self._floor = 0.0
        """The floor when the last member began to wait."""
        self._heap: list[Entry] = []
        self._idle: OrderedDict[tuple[str, ...], M] = OrderedDict()
        self._asleep: dict[M, bool] = {}
        """Sleeping members that bound the floor. True if they bound it like waiting members, so that the member that
        left last does not count."""
        self.last_left: M | None = None
        """The member whose queue emptied last."""
        self.times_left = 0
        """Number of times that a member's queue emptied."""
        self.reported: Any = None
        """Number and time of departures as other gateways know them. Written by the code that reports them."""
        self.unconfirmed: dict[tuple[str, ...], None] = {}
        """Names of members with a lift that other gateways have not confirmed: one that began to wait while no other
        member waited here, and the members raised to it. Without other gateways they stay until their queue empties."""
        self._turn = 0
        self._waiting = self._sleeping = 0
        self.least_elsewhere: float | None = None
        """Rank of the next member that waits at another gateway; None if none is known."""
        self._is_preferred_elsewhere = False

    @property
    def waits_anywhere(self) -> bool:
        """Return whether any member waits, asleep or not, here or at another gateway."""
        return self._waiting + self._sleeping > 0 or self.least_elsewhere is not None

    def __len__(self) -> int:
        """Return the number of waiting members that are awake."""
        return self._waiting

    def some(self, most: int) -> list[M]:
        """Return a sample of at most `most` waiting members, of all ranks."""
        found: list[M] = []
        for entry in self._heap[:: len(self._heap) // most + 1]:
            member: M = entry[3]
            if member.entry is entry:
                found.append(member)
        return found

    def find_floor(self) -> float:
        """Return the rank to which a new member is raised.

        The least rank of the members that wait here or elsewhere; if none waits, the rank of the member that left last.
        Sleeping members count unless they are absent (`sleep`).
        """
        least, elsewhere = self.least() if self._heap else None, self.least_elsewhere
        if least is not None and (elsewhere is None or self.rank(least) <= elsewhere):
            floor, is_preferred = self.rank(least), least.preferred
        elif elsewhere is not None:
            floor, is_preferred = elsewhere, self._is_preferred_elsewhere
        else:
            left = 0.0 if self.last_left is None else self.rank(self.last_left)
            floor, is_preferred = inf if True in self._asleep.values() else left, False
        if is_preferred:
            floor = max(floor, self._floor)
        return min([floor, *[self.rank(member) for member in self._asleep]]) if self._asleep else floor

    def wait_elsewhere(self, rank: float | None, *, is_preferred: bool = False) -> None:
        """Set the rank of the next member that waits at another gateway; None if none is known."""
        self.least_elsewhere, self._is_preferred_elsewhere = rank, is_preferred

    def least_counter_elsewhere(self) -> float:
        """Return the counter of the next member that waits at another gateway; inf if none is known."""
        if self.least_elsewhere is None:
            return inf
        return self.least_elsewhere + (self.window if self._is_preferred_elsewhere else 0.0)

    def ahead(self, member: M) -> float:
        """Return the distance of a member's rank from the rank of the next waiting member; 0 for that member."""
        least = self.least()
        return self.rank(member) - (self.rank(least) if least is not None else self.find_floor())

    def least(self) -> M | None:
        """Return the waiting member that goes next, or None. Amortised O(log members)."""
        heap = self._heap
        while heap:
            entry = heap[0]
            member: M = entry[3]
            if member.entry is not entry:
                heappop(heap)
                continue
            if len(heap) == 1:
                return member
            place = self._place(member)
            if place <= entry[0] and member.turn == entry[1]:
                return member
            member.entry = (place, member.turn, member.name, member)
            heapreplace(heap, member.entry)
        return None

    def queued(self, member: M, *, preferred: bool = False) -> None:
        """Count one more waiting request of a member. `preferred`: as for `prefer`."""
        if member.queued:
            member.queued += 1
            self.prefer(member, preferred)
            return
        member.queued = 1
        # The lift to the floor banks no credit. With rounds, the member is raised to the beginning of the round.
        if self.unconfirmed or (not self._waiting and not self._asleep):
            member.is_sole = True
            self.unconfirmed[member.name] = None
        floor = self._floor = self.find_floor()
        if self._quantum:
            floor -= floor % self._quantum
            self._turn += 1
            member.turn = self._turn
        if floor > member.counter:
            member.lifted += floor - member.counter
            member.counter = floor
        if not member.running:
            self._idle.pop(member.name, None)
        self._waiting += 1
        member.preferred = preferred
        self._enter(member)

    def left(self, member: M, *, is_served: bool) -> None:
        """Count a waiting request that is dispatched (`is_served`), or leaves without service."""
        if is_served:
            member.running += 1
            if not self._quantum:
                self._turn += 1
                member.turn = self._turn
        member.queued -= 1
        if member.queued:
            return
        if member.is_asleep:
            member.is_asleep = False
            self._sleeping -= 1
            self._asleep.pop(member, None)
        else:
            self._waiting -= 1
        member.entry = None
        self.unconfirmed.pop(member.name, None)
        self.last_left = member
        self.times_left += 1
        if not self._waiting:
            self._heap.clear()
        if not member.running:
            self._idle[member.name] = member

    def sleep(self, member: M, *, is_absent: bool = False, is_floor: bool = False) -> None:
        """Take a waiting member out of the heap while none of its requests may go.

        The member keeps its counter and is not lifted when it wakes, because it has waited all the time. `is_absent`:
        the member does not bound the floor meanwhile. `is_floor`: the member bounds the floor like a waiting one, so
        that the member that left last does not count.
        """
        if not member.is_asleep:
            member.is_asleep = True
            member.entry = None
            self._waiting -= 1
            self._sleeping += 1
        if is_absent:
            self._asleep.pop(member, None)
        else:
            self._asleep[member] = is_floor

    def wake(self, member: M) -> None:
        """Return a sleeping member to the heap."""
        if member.is_asleep:
            member.is_asleep = False
            self._asleep.pop(member, None)
            self._sleeping -= 1
            self._waiting += 1
            self._enter(member)

    def ended(self, member: M) -> None:
        """Count the end of a dispatched request."""
        member.running -= 1
        if not member.running and not member.queued:
            self._idle[member.name] = member

    def charged(self, member: M, service: float) -> None:
        """Add service to a member's counter (subtract if negative). O(1), or O(log members) for a refund."""
        member.counter += service
        if service < 0.0:
            self.fell(member)

    def fell(self, member: M) -> None:
        """Give a member whose rank has fallen its new place."""
        if member.entry is not None and self._place(member) < member.entry[0]:
            self._enter(member)

    def prefer(self, member: M, preferred: bool) -> None:
        """Set whether a member goes before others within the window."""
        if member.preferred is preferred:
            return
        member.preferred = preferred
        self.fell(member)

    def may_pass(self, member: M, head: M) -> bool:
        """Return whether a request of this member may go instead of one of the head.

        The member must be within the window, and must not have more running per weight than the head: otherwise a head
        that runs little would wait for the gain of others.
        """
        runs_more = member.running * head.weight > head.running * member.weight
        return member is head or (not runs_more and self.is_within(member, self.rank(head)))

    def is_within(self, member: M, counter: float) -> bool:
        """Return whether the counter of a member is at most the window above another counter."""
        return member.counter <= counter + self.window

    def moved(self, member: M) -> None:
        """Update the heap after the owner has changed `member.turn`. O(1) for a later turn."""
        if member.entry is not None and member.turn < member.entry[1]:
            self._enter(member)

    def take_over(self, member: M, before: CounterMember) -> None:
        """Copy counter and place from a member of other counters, which have equal units."""
        member.counter, member.lifted = before.counter, before.lifted
        member.is_sole, member.turn = before.is_sole, before.turn
        self._turn = max(self._turn, before.turn)
        if member.entry is not None:
            self._enter(member)
        elif not member.queued and not member.running:
            self._idle[member.name] = member

    def first(self, most: int, *, within: float = 1.0) -> list[M]:
        """Return the members that go next, in order: at most `most`, and ranked at most `within` behind the first.

        Ranks are rounds of the quantum, or counters if there is none.
        """
        entries: list[Entry] = []
        while len(entries) < most and self.least() is not None:
            if entries and self._heap[0][0] > entries[0][0] + within:
                break
            entries.append(heappop(self._heap))
        for entry in entries:
            heappush(self._heap, entry)
        return [entry[3] for entry in entries]

    def forget_longest_idle(self) -> M | None:
        """Drop the member that has been idle longest, with its debt. Return it, or None if no member is idle."""
        return self._idle.popitem(last=False)[1] if self._idle else None

    def rank(self, member: M) -> float:
        """Return a member's rank in units of service: the counter, less the window if the member is preferred."""
        return member.counter - self.window if member.preferred else member.counter

    def _place(self, member: M) -> float:
        """Return the first key of a member's heap entry: its round of the quantum, or else its rank."""
        if self._quantum:
            return member.counter // self._quantum
        return member.counter - self.window if member.preferred else member.counter

    def _enter(self, member: M) -> None:
        member.entry = (self._place(member), member.turn, member.name, member)
        heappush(self._heap, member.entry)
        if len(self._heap) > 2 * self._waiting + 64:
            self._heap = [entry for entry in self._heap if entry[3].entry is entry]
            heapify(self._heap)
