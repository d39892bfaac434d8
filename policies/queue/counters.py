"""Which waiting member has received least service? One level of counters, kept in order as they grow.

`Counters` contain the members that have something queued, ordered by (counter, turn, name). Counters mostly grow, and
often: by a token at a time. So the heap is corrected lazily. An entry whose counter has grown is moved when it reaches
the top. A counter that falls below its entry (a refund) gets a second entry, and the old one is dropped when it reaches
the top.

Lift (VTC, algorithm 2): a member with its first queued request is raised to the least waiting counter. If nobody
waits, the member is raised to the counter of the member that left last. So idling banks no credit. `max` keeps debt.
Any value between the least and the greatest waiting counter keeps the bound (remark 4.6). Without `lift`, members
keep what they did not use (LCF).

Window: a preferred member (one with a call inside an interaction) goes before others as long as its counter is at
most `window` above theirs. So members are ordered by their rank: the counter, less the window if the member is
preferred. What a preferred member receives counts, so the member is ahead by the window once, not again and again.
For the same reason a member that begins to wait is raised to the least *rank*: preferred members that are ahead by
the window already do not get another window over each newcomer. This floor does not fall because of a preferred
member that begins to wait at the floor, and whose rank is then below: such members would lower the floor for one
another. All waiting counters stay within the window and what is dispatched of each other. With a window of 0 all of
this is the paper's.

Turns: among equal counters, the member served longest ago goes first. With a `quantum`, counters are read in whole
quanta. A member is then served until its counter has passed a multiple of the quantum. The members of one round go in
the order in which they began to wait (deficit round robin, see `orders.rr`). A new member is raised to the beginning of
the present round. So every member of the round may use all of it, early or late.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Any, Generic, TypeVar

Entry = Any
"""(counter or round, turn, name, member): ordered by the first three, and compared by identity. It has no tuple type,
because mypyc tuples have no identity."""


class Member:
    """One that waits: a tenant among tenants, or a flow inside its tenant."""

    __slots__ = (
        "answer_s",
        "asked_s",
        "counter",
        "entry",
        "gap_s",
        "is_asleep",
        "is_sole",
        "lifted",
        "name",
        "preferred",
        "queued",
        "reported",
        "running",
        "turn",
        "usual",
        "weight",
    )  # fmt: skip

    def __init__(self, name: tuple[str, ...]) -> None:
        self.name = name
        self.counter = 0.0
        self.lifted = 0.0
        """How much of the counter came from lifts, and not from service."""
        self.is_sole = False
        """It was raised by what is known here alone when it last began to wait, which is still to be reported."""
        self.is_asleep = False
        """Something of it waits, and none of that may go now, so the member is not in the heap."""
        self.preferred = False
        """It goes before others whose counter is not below its own by more than the window."""
        self.queued = 0
        self.running = 0
        self.turn = 0
        """Its place among equal counters."""
        self.weight = 1.0
        self.usual = 0.0
        """Charge of a request that had to wait, a moving average; 0: none has been answered."""
        self.answer_s = 0.0
        """How long an engine has such a request."""
        self.asked_s = -1.0
        """When the last one of its requests that had to wait came; -1: none has."""
        self.gap_s = 0.0
        """Between two of them, a moving average."""
        self.entry: Entry = None
        """Its valid heap entry; None while nothing of it waits."""
        self.reported: Any = None
        """What other gateways know of it: its counter, and how much of that came from lifts. Written by the code that
        reports it."""

    def __hash__(self) -> int:
        # With mypyc, a class with __lt__ has no hash. Members are dictionary keys, so they need one.
        return id(self)

    def __lt__(self, other: Member) -> bool:
        # The heap compares members only if all else is equal. One of the two is then forgotten, and is dropped later.
        return False


M = TypeVar("M", bound=Member)


class Counters(Generic[M]):
    """Which member is least served? It contains the waiting members, and the idle ones until they are forgotten."""

    def __init__(self, *, lift: bool = True, quantum: float = 0.0, window: float = 0.0) -> None:
        self.window = window
        self._lifts = lift
        self._quantum = quantum
        self._floor = 0.0
        """The floor when the last member began to wait."""
        self._heap: list[Entry] = []
        self._idle: OrderedDict[tuple[str, ...], M] = OrderedDict()
        self._asleep: dict[M, bool] = {}
        """Those by which others are measured. True: even where nobody else waits, as if awake."""
        self.last_left: M | None = None
        """The member whose queue emptied last."""
        self.times_left = 0
        """How often a queue emptied."""
        self.reported: Any = None
        """What other gateways know of the last departure: how many there were, and when it was. Written by the code
        that reports it."""
        self.unconfirmed: dict[M, None] = {}
        """Members whose lift is not known to count at other gateways yet: one that began to wait while nobody else
        waited here, and the ones that were raised to it. Without other gateways it stays so."""
        self._turn = 0
        self._waiting = self._sleeping = 0
        self.least_elsewhere: float | None = None
        """Rank of the next member that waits at another gateway; None: none is known."""
        self._is_preferred_elsewhere = False

    @property
    def waits_anywhere(self) -> bool:
        """Does anything wait, asleep or not, here or at another gateway?"""
        return self._waiting + self._sleeping > 0 or self.least_elsewhere is not None

    def __len__(self) -> int:
        """Members that wait, but for those asleep."""
        return self._waiting

    def some(self, most: int) -> list[M]:
        """Some members that wait, of all ranks: about so many, or all if there are no more."""
        heap = self._heap
        return [entry[3] for entry in heap[:: len(heap) // most + 1] if entry[3].entry is entry]

    def idle(self) -> int:
        """Members that are remembered, and have nothing waiting or running."""
        return len(self._idle)

    def floor(self) -> float:
        """Least rank of the members that wait here, asleep or not, or elsewhere. If nobody waits: that of the member
        that left last."""
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
        """The next member that waits at another gateway has this rank; None: none is known."""
        self.least_elsewhere, self._is_preferred_elsewhere = rank, is_preferred

    def least_counter_elsewhere(self) -> float:
        """Counter of the next member that waits at another gateway. inf: none is known."""
        if self.least_elsewhere is None:
            return inf
        return self.least_elsewhere + (self.window if self._is_preferred_elsewhere else 0.0)

    def ahead(self, member: M) -> float:
        """How far is its rank from that of the next one that waits? 0: it is next itself."""
        least = self.least()
        return self.rank(member) - (self.rank(least) if least is not None else self.floor())

    def least(self) -> M | None:
        """The waiting member that goes next, or None. Amortised O(log members)."""
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
        """One more request of this member waits. `preferred`: as for `prefer`."""
        member.queued += 1
        if member.queued > 1:
            self.prefer(member, preferred)
            return
        if self._lifts:
            # Raised to the floor, it banks no credit. With rounds, it is raised to the beginning of that round.
            if self.unconfirmed or (not self._waiting and not self._asleep):
                member.is_sole = True
                self.unconfirmed[member] = None
            floor = self._floor = self.floor()
            if self._quantum:
                floor -= floor % self._quantum
            if floor > member.counter:
                member.lifted += floor - member.counter
                member.counter = floor
        if self._quantum:
            self._turn += 1
            member.turn = self._turn
        if not member.running:
            self._idle.pop(member.name, None)
        self._waiting += 1
        member.preferred = preferred
        self._enter(member)

    def left(self, member: M, *, is_served: bool) -> None:
        """One of its waiting requests goes to a backend (`is_served`), or leaves without service."""
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
        self.unconfirmed.pop(member, None)
        self.last_left = member
        self.times_left += 1
        if not self._waiting:
            self._heap.clear()
        if not member.running:
            self._idle[member.name] = member

    def sleep(self, member: M, *, is_absent: bool = False, is_floor: bool = False) -> None:
        """Nothing of this waiting member may go for now, so it is not next. It keeps its counter, and is not raised
        when it wakes: it has waited all the time. `is_absent`: others are not measured by it meanwhile. `is_floor`:
        others are raised to it where nobody else waits.
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
        """Something of it may go again."""
        if member.is_asleep:
            member.is_asleep = False
            self._asleep.pop(member, None)
            self._sleeping -= 1
            self._waiting += 1
            self._enter(member)

    def ended(self, member: M) -> None:
        """One of its dispatched requests ended."""
        member.running -= 1
        if not member.running and not member.queued:
            self._idle[member.name] = member

    def charged(self, member: M, service: float) -> None:
        """It has received this much more (less if negative). O(1), or O(log members) for a refund."""
        member.counter += service
        if service < 0 and member.entry is not None and self._place(member) < member.entry[0]:
            self._enter(member)

    def prefer(self, member: M, preferred: bool) -> None:
        """From now on it goes before others within the window, or no longer."""
        if member.preferred is preferred:
            return
        member.preferred = preferred
        if member.entry is not None and self._place(member) < member.entry[0]:
            self._enter(member)

    def may_pass(self, member: M, head: M) -> bool:
        """May a request of this member go instead of one of the head? The member is within the window, and has no more
        running per weight: a member with little running does not wait for what others gain.
        """
        return member is head or (
            member.counter <= self.rank(head) + self.window
            and member.running * head.weight <= head.running * member.weight
        )

    def moved(self, member: M) -> None:
        """Its owner has changed its `turn`. A later turn costs nothing until the entry reaches the top."""
        if member.entry is not None and member.turn < member.entry[1]:
            self._enter(member)

    def resume(self, member: M, before: Member) -> None:
        """Let it go on with the counter and the place of a member of other counters, which count the same."""
        member.counter, member.lifted = before.counter, before.lifted
        member.is_sole, member.turn = before.is_sole, before.turn
        self._turn = max(self._turn, before.turn)
        if member.entry is not None:
            self._enter(member)
        elif not member.queued and not member.running:
            self._idle[member.name] = member

    def first(self, most: int, *, within: float = 1.0) -> list[M]:
        """The members that go next, in order: at most `most`, and ranked at most `within` behind the first.

        Ranks are rounds of the quantum, or counters if there is none.
        """
        entries: list[Entry] = []
        while (
            len(entries) < most
            and self.least() is not None
            and (not entries or self._heap[0][0] <= entries[0][0] + within)
        ):
            entries.append(heappop(self._heap))
        for entry in entries:
            heappush(self._heap, entry)
        return [entry[3] for entry in entries]

    def forget_longest_idle(self) -> M | None:
        """Drop the member that has had nothing queued or running for longest, with its debt; None if there is none."""
        return self._idle.popitem(last=False)[1] if self._idle else None

    def rank(self, member: M) -> float:
        """The member's rank among the waiting members, in service: its counter, less the window if it is preferred."""
        return member.counter - self.window if member.preferred else member.counter

    def _place(self, member: M) -> float:
        if self._quantum:
            return member.counter // self._quantum
        return member.counter - self.window if member.preferred else member.counter

    def _enter(self, member: M) -> None:
        member.entry = (self._place(member), member.turn, member.name, member)
        heappush(self._heap, member.entry)
        if len(self._heap) > 2 * self._waiting + 64:
            self._heap = [entry for entry in self._heap if entry[3].entry is entry]
            heapify(self._heap)
