"""How many sequences may be dispatched to an engine at once?

The number of sequences that an engine runs side by side is configured, or reported by the engine. Most pages of metrics
lack it. Then it is learned:

    from                            raised by                 lowered by
    gauges                          `raise_to`                `lower_to`
    streams                         `raise_to`                `learn_from_refusal`
    whole answers without gauges    `learn_without_gauges`    `learn_without_gauges`, if answers get slower
    a refusal for lack of room      `learn_from_refusal`      `learn_from_refusal`
"""

from __future__ import annotations

from math import ceil
from typing import Final

from policies.averages import QUICK
from policies.capacity.gauges import CapacitySettings

FIRST_SLOTS: Final = 4
"""Slots assumed for an engine about which nothing is known yet."""
TAKEN_MAX: Final = 1 / FIRST_SLOTS
"""Largest part of the slots that one request takes, so that `FIRST_SLOTS` of the largest run side by side."""


class Slots:
    """The slots of one backend, and the sequences that may be dispatched beyond them so that none stays empty."""

    def __init__(self, max_num_seqs: int | None, settings: CapacitySettings) -> None:
        self.count = FIRST_SLOTS
        self._is_learned = False
        self._reported: int | None = None
        self._learned_before = FIRST_SLOTS
        self.set(max_num_seqs, settings)
        self._on_the_way = 0
        """Sequences dispatched beyond the slots, since they are still on their way to the engine when others end."""
        self.was_short = False
        """A request has waited since the last page, because no slot was free."""
        self._seen = self._running_seen = self._waiting_seen = 0
        self._period_ends_s = 0.0
        self._answer_s = 0.0
        self._answer_s_best = float("inf")

    def set(self, max_num_seqs: int | None, settings: CapacitySettings) -> None:
        """Replace the configured limits. Learned slots stay if none are configured or reported."""
        self._configured = max_num_seqs
        self._know()
        self._waiting_target = settings.waiting_target
        self._most = settings.max_concurrency

    def set_reported(self, max_num_seqs: int | None) -> None:
        """Note the slots that the engine reports; None or 0 if it reports none."""
        max_num_seqs = max_num_seqs or None
        if max_num_seqs == self._reported:
            return
        if self._reported is None and self._configured is None:
            self._learned_before = self.count
        self._reported = max_num_seqs
        if max_num_seqs is None and self._configured is None:
            self.count = min(self.count, self._learned_before)
        self._know()

    def _know(self) -> None:
        """Take the least of the configured and the reported slots, which are both upper bounds."""
        known = [count for count in (self._configured, self._reported) if count is not None]
        self._is_known = bool(known)
        self.count = min(known) if known else self.count

    def most(self, *, is_alone: bool = False) -> int:
        """Return how many sequences may be dispatched in all.

        Nothing can pass a request that waits inside an engine. So where the slots are configured or reported, only
        requests that are all their tenants have (`is_alone`) may wait inside: `waiting_target` of them.
        Beyond learned slots as many more are dispatched for anybody, since there may be more slots. As long as none
        were learned it is twice as many: a queue above the target shows how many there are.
        """
        limit = self.count + self._on_the_way
        if not self._is_known:
            limit += self._waiting_target * (1 if self._is_learned else 2)
        elif is_alone:
            limit += self._waiting_target
        return max(1, limit if self._most is None else min(limit, self._most))

    def count_for(self, sequences: int) -> int:
        """Return the slots that a request with this many sequences takes: at most a quarter of all, if that is known.

        If the request waited for a free slot for each sequence, and held all of them until its last sequence ends, the
        engine would run empty before and after. The engine starts the sequences one by one, and while some of them wait
        inside the engine, its gauges keep other requests away. The request is charged in full.
        """
        if sequences == 1 or not (self._is_known or self._is_learned):
            return sequences
        return min(sequences, max(1, round(self.count * TAKEN_MAX)))

    def known(self) -> int | None:
        """Return the number of slots; None if it is neither configured nor reported nor learned."""
        return self.count if self._is_known or self._is_learned else None

    def raise_to(self, sequences: int) -> None:
        """Raise the number of slots to the sequences that were seen to run at once."""
        if sequences > self.count and not self._is_known:
            self.count = sequences

    def lower_to(self, running: int) -> None:
        """Lower the slots to the running gauge, which has plateaued although requests wait."""
        if not self._is_known:
            self.count = min(self.count, running)
            self._is_learned = True

    def adjust_in_flight(self, running: int, waiting: int, now: float, *, period_s: float, is_sustained: bool) -> None:
        """Adjust the in-flight allowance (dispatches beyond the slots).

        The allowance falls if the engine queues, and rises if slots stay empty.

        Suppose slots stay empty on average, over a request's life (`period_s`), although requests wait for a slot all
        that time. Then sequences are missing because they are still on their way, and half as many more may be under
        way. A shorter observation may be a burst that has just begun, or a wave of requests that ended together. A
        queue that only drains is soon over (`is_sustained`: requests keep coming). In those cases more dispatches would
        only wait inside the engine.
        """
        if not self.was_short and waiting <= self._waiting_target:
            self._seen = self._running_seen = self._waiting_seen = 0  # no request waits, so empty slots say nothing
            return
        self.was_short = False
        if not self._seen:
            self._period_ends_s = now + period_s
        self._seen += 1
        self._running_seen += running
        self._waiting_seen += waiting
        if now < self._period_ends_s:
            return
        empty = self.count - self._running_seen / self._seen
        queued = self._waiting_seen / self._seen
        if queued > self._waiting_target:
            self._on_the_way = max(0, self._on_the_way - ceil(queued - self._waiting_target))
        elif is_sustained:
            self._on_the_way = min(self.count, self._on_the_way + round(empty / 2))
        self._seen = self._running_seen = self._waiting_seen = 0

    def emptied(self) -> None:
        """Forget the sequences on their way: the next requests find an idle engine, and none replaces another."""
        self._on_the_way = 0
        self.was_short = False
        self._seen = self._running_seen = self._waiting_seen = 0

    def learn_from_refusal(self, running: int) -> None:
        """Learn the slots from an engine that refused one sequence more than it runs."""
        if not self._is_known:
            self.count = max(1, running)
            self._is_learned = True

    def learn_without_gauges(self, seconds_per_token: float, sequences: int) -> None:
        """Learn from a complete answer of an engine without gauges, with this many sequences dispatched.

        The count falls by one per answer, to `FIRST_SLOTS` at least, while the average is more than twice the best
        pace: the engine then has a queue inside. Otherwise it grows by one per answer while all slots are in use.
        """
        if self._is_known:
            return
        self._answer_s += QUICK * (seconds_per_token - self._answer_s) if self._answer_s else seconds_per_token
        self._answer_s_best = min(self._answer_s_best * 1.001, seconds_per_token)
        if self._answer_s > 2 * self._answer_s_best:
            self.count = max(FIRST_SLOTS, self.count - 1)
        elif sequences >= self.count:
            self.count += 1
