"""Who of those waiting has received least? One level of counters, kept in order as they grow.

A `Line` holds the members that have something queued, ordered by (counter, turn, name). Counters mostly grow, and grow
often (a token at a time), so the heap is corrected lazily: an entry whose member has grown since is moved when it
comes to the top. A counter that falls below its entry (a refund) gets a second entry; the older one is dropped when
it is met.

Lift (VTC, algorithm 2): a member that gets its first queued request is raised to the least counter of those waiting,
or, if nobody waits, to that of the member that left last. Idling therefore banks no credit, and `max` keeps debt.
Any value between the least and the greatest waiting counter keeps the bound (remark 4.6).
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

__all__ = ["Line", "Member"]


class Member:
    """One who waits: a tenant among tenants, or a flow inside its tenant."""

    __slots__ = ("counter", "entry_counter", "name", "queued", "running", "turn")

    def __init__(self, name: tuple[str, ...]) -> None:
        self.name = name
        self.counter = 0.0
        self.queued = 0
        self.running = 0
        self.turn = 0
        """Sequence number of its last dispatch: among equal counters, who was served longest ago goes first."""
        self.entry_counter: float | None = None
        """Counter of its valid heap entry; None when it has none."""


M = TypeVar("M", bound=Member)


class Line(Generic[M]):
    """Which member is least served? Members are created, and forgotten, when the caller says so."""

    def __init__(self) -> None:
        self.members: dict[tuple[str, ...], M] = {}
        self._heap: list[tuple[float, int, tuple[str, ...]]] = []
        self._idle: OrderedDict[tuple[str, ...], None] = OrderedDict()
        self._last_left: M | None = None
        self._turn = 0
        self._waiting = 0

    def add(self, member: M) -> None:
        self.members[member.name] = member

    def floor(self) -> float:
        """The counter to which a newcomer is lifted."""
        least = self.least()
        if least is not None:
            return least.counter
        return self._last_left.counter if self._last_left is not None else 0.0

    def least(self) -> M | None:
        """The waiting member that goes next, or None. Amortised O(log members)."""
        heap = self._heap
        while heap:
            counter, turn, name = heap[0]
            member = self.members.get(name)
            if member is None or member.entry_counter != counter or member.turn != turn:
                heappop(heap)
            elif member.counter > counter:
                member.entry_counter = member.counter
                heapreplace(heap, (member.counter, turn, name))
            else:
                return member
        return None

    def queued(self, member: M) -> None:
        """One more request of this member waits."""
        if not member.queued:
            member.counter = max(member.counter, self.floor())
            self._idle.pop(member.name, None)
            member.queued = 1
            self._waiting += 1
            self._enter(member)
        else:
            member.queued += 1

    def dispatched(self, member: M) -> None:
        """One of its waiting requests goes to a backend."""
        self._turn += 1
        member.turn = self._turn
        member.running += 1
        self._leave_one(member)
        if member.queued:
            self._enter(member)

    def withdrawn(self, member: M) -> None:
        """One of its waiting requests is gone without service."""
        self._leave_one(member)
        self._note_idle(member)

    def ended(self, member: M) -> None:
        """One of its dispatched requests is over."""
        member.running -= 1
        self._note_idle(member)

    def charged(self, member: M, service: float) -> None:
        """It has received this much more (less, if negative). O(1), or O(log members) for a refund."""
        member.counter += service
        if service < 0 and member.queued and member.entry_counter is not None and member.counter < member.entry_counter:
            self._enter(member)

    def forget_longest_idle(self) -> M | None:
        """Forget the member that has had nothing queued or running for longest, and its debt; None if there is none."""
        if not self._idle:
            return None
        name, _ = self._idle.popitem(last=False)
        return self.members.pop(name)

    def _enter(self, member: M) -> None:
        member.entry_counter = member.counter
        heappush(self._heap, (member.counter, member.turn, member.name))
        if len(self._heap) > 2 * self._waiting + 64:
            self._drop_stale_entries()

    def _drop_stale_entries(self) -> None:
        def valid(entry: tuple[float, int, tuple[str, ...]]) -> bool:
            member = self.members.get(entry[2])
            return member is not None and (member.entry_counter, member.turn) == entry[:2]

        self._heap = list({entry for entry in self._heap if valid(entry)})
        heapify(self._heap)

    def _leave_one(self, member: M) -> None:
        member.queued -= 1
        if not member.queued:
            self._waiting -= 1
            member.entry_counter = None
            self._last_left = member
            if not self._waiting:
                self._heap.clear()

    def _note_idle(self, member: M) -> None:
        if not member.queued and not member.running:
            self._idle[member.name] = None
