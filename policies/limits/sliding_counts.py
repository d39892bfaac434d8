"""What did each member of a population do within a window? Sliding counts.

Time is cut into buckets. A count is the sum of the present bucket and of all earlier buckets that overlap the window,
each counted whole. So no window of `window_s` is undercounted:

*Bound.* Let an event be admitted only where the count, the event included, is at most the limit. Then no window of
`window_s` holds more than the limit. *Proof sketch.* Let e be the last event in a window (t - window_s, t]. Its count
held its own bucket and the `parts` buckets before it. They begin at least `window_s` before e, thus before the window
does. So each event of the window was in that count, and that count was at most the limit.

*Price.* An event counts for at most a bucket longer than the window: `1 / parts` of it.
Time and memory: amortised O(1) for each event, and a row for each bucket in which the member did anything.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable
from functools import partial
from operator import mul
from typing import Final, NamedTuple

from policies.request import Limit

Measures = tuple[int, int, int, int]
"""Four counts, whose meaning depends on the population."""
NOTHING: Final = (0, 0, 0, 0)
PLACES: Final = range(len(NOTHING))
TAKES_BACK, NEW, LOST = range(3)
"""Reasons for a report, the strongest last: a reservation is taken back, a count is new, the store has lost a count."""
PARTS: Final = 60
"""Buckets in a window: an event counts for 1.7 % longer than the window."""
NO_BUCKET: Final = -(1 << 62)
"""A number before that of every bucket."""
_ROW: Final = 1 + len(NOTHING)
"""Values of a row: a bucket's number, and its counts."""


class Window(NamedTuple):
    """The cut of time into buckets, and the number of buckets that count."""

    kept: int
    """Number of buckets that count, the present one included."""
    longest_s: float
    """Longest time for which an event counts."""
    bucket: Callable[[float], int]
    """Function from a time to the number of its bucket."""
    begins_s: Callable[[int], float]
    """Function from the number of a bucket to its beginning."""

    def since_s(self, at_s: float) -> float:
        """Return when the first bucket begins that counts at this time."""
        return self.begins_s(self.bucket(at_s) - self.kept + 1)


def rolling(window_s: float, parts: int = PARTS) -> Window:
    """Return a window that slides over any stretch of `window_s`."""
    part_s = window_s / parts
    return Window(parts + 1, window_s + part_s, partial(_bucket, part_s), partial(mul, part_s))


def _bucket(part_s: float, at_s: float) -> int:
    return int(at_s // part_s)


class _History:
    """The rows of the buckets in which one member did anything, the oldest first, and the sums over the rows."""

    __slots__ = ("answered", "rows", "sums")

    def __init__(self) -> None:
        self.rows = array("q")
        self.sums = [0] * len(NOTHING)
        self.answered = NO_BUCKET
        """Last bucket for which other gateways have answered with their counts. Written by the code that asks them."""

    def forget_before(self, bucket: int) -> None:
        rows, end = self.rows, 0
        while end < len(rows) and rows[end] < bucket:
            for place in PLACES:
                self.sums[place] -= rows[end + 1 + place]
            end += _ROW
        if end:
            del rows[:end]

    def measures(self, bucket: int) -> Measures:
        rows, at = self.rows, self._place(bucket)
        if at < 0 or rows[at] != bucket:
            return NOTHING
        return rows[at + 1], rows[at + 2], rows[at + 3], rows[at + 4]

    def add(self, bucket: int, amounts: Measures) -> None:
        at = self._place(bucket)
        if at < 0 or self.rows[at] != bucket:
            at += _ROW
            self.rows[at:at] = array("q", (bucket, *NOTHING))
        for place in PLACES:
            # A count that was forgotten cannot be taken back, so none falls below 0.
            more = max(amounts[place], -self.rows[at + 1 + place])
            self.rows[at + 1 + place] += more
            self.sums[place] += more

    def _place(self, bucket: int) -> int:
        """Return the index of the last row that is not after this bucket; negative if there is none."""
        rows = self.rows
        at = len(rows) - _ROW
        while at >= 0 and rows[at] > bucket:
            at -= _ROW
        return at


NO_HISTORY: Final = _History()
"""The history of a member that did nothing. Never changed."""


class SlidingCounts:
    """Counts of each member of a population within the window.

    Bounded: a member without events in a window is forgotten, and beyond `members_max` members the half that did least.
    So a client that invents members cannot drive out the counts of busy ones. A clock that jumps by more than the
    window, in either direction, starts the counts anew.
    """

    def __init__(self, window: Window, *, members_max: int = 200_000) -> None:
        self.window = window
        self.epoch_s = 0.0
        """Seconds by which the clock that cuts time into buckets is ahead of `now`."""
        self.bucket = NO_BUCKET
        """Number of the present bucket."""
        self.pending: dict[Hashable, dict[int, list[int]]] | None = None
        """Counts not yet reported to other gateways, by member and bucket, each with the reason of its report. Bounded:
        the oldest are dropped. None if there are no other gateways."""
        self._members_max = members_max
        self._histories: dict[Hashable, _History] = {}
        self._changes_s = (0.0, 0.0)
        """Beginning and end of the present bucket."""

    def __len__(self) -> int:
        return len(self._histories)

    @property
    def oldest(self) -> int:
        """Number of the oldest bucket that counts."""
        return self.bucket - self.window.kept + 1

    def at(self, now: float) -> None:
        """Move to this time: begin a new bucket if one is due."""
        at_s = now + self.epoch_s
        begins_s, ends_s = self._changes_s
        if begins_s <= at_s < ends_s:
            return
        window, last = self.window, self.bucket
        bucket = window.bucket(at_s)
        if last - window.kept < bucket <= last:
            return  # a clock that is set back a little must not clear the counts
        self.bucket = bucket
        self._changes_s = window.begins_s(bucket), window.begins_s(bucket + 1)
        if not last < bucket < last + window.kept:
            self._histories = {}
        elif last // window.kept != bucket // window.kept:
            self._forget_silent()

    def add(self, member: Hashable, amounts: Measures, bucket: int | None = None, *, reports: bool = True) -> None:
        """Count amounts for the member, now or in an earlier bucket. `reports`: also report them to other gateways."""
        if bucket is None:
            bucket = self.bucket
        elif bucket < self.oldest:
            return
        history = self._histories.get(member)
        if history is None:
            if len(self._histories) >= self._members_max:
                self._forget_least()
            history = self._histories[member] = _History()
        history.forget_before(self.oldest)
        history.add(bucket, amounts)
        if reports and self.pending is not None:
            pending = self.pend(member, bucket, NEW)
            for place in PLACES:
                pending[place] += amounts[place]
            if len(self.pending) > self._members_max:
                del self.pending[next(iter(self.pending))]

    def pend(self, member: Hashable, bucket: int, why: int) -> list[int]:
        """Mark a bucket of the member to be reported. Returns its unreported counts, for the caller to add to."""
        assert self.pending is not None
        pending = self.pending.setdefault(member, {}).setdefault(bucket, [*NOTHING, why])
        pending[-1] = max(pending[-1], why)
        return pending

    def pend_all(self) -> None:
        """Mark all counts to be reported again of the members that other gateways have answered for."""
        for member, history in self._histories.items():
            if history.answered >= self.oldest:
                for bucket in history.rows[::_ROW]:
                    self.pend(member, bucket, LOST)

    def measures(self, member: Hashable, bucket: int) -> Measures:
        """Return the counts of the member in one bucket."""
        return self._histories.get(member, NO_HISTORY).measures(bucket)

    def last(self, member: Hashable) -> int | None:
        """Return the last bucket in which the member did anything; None if no bucket is remembered."""
        rows = self._histories.get(member, NO_HISTORY).rows
        return rows[-_ROW] if rows else None

    def answered(self, member: Hashable) -> int:
        """Return the last bucket for which other gateways have answered with their counts of the member."""
        return self._histories.get(member, NO_HISTORY).answered

    def apply_reply(self, member: Hashable, bucket: int, known: Measures) -> None:
        """Set a bucket to the sum of all gateways, plus the counts here that are not reported yet."""
        if bucket < self.oldest or self.pending is None:
            return
        before = self.measures(member, bucket)
        own = self.pending.get(member, {}).get(bucket, NOTHING)
        more = [known[place] + own[place] - before[place] for place in PLACES]
        if any(more):
            self.add(member, (more[0], more[1], more[2], more[3]), bucket, reports=False)
        history = self._histories.get(member)
        if history is not None:
            history.answered = max(history.answered, bucket)

    def sums(self, member: Hashable, now: float | None = None) -> Measures:
        """Return the counts of the member within the window. Changes nothing; `now` may be in the future."""
        history = self._histories.get(member, NO_HISTORY)
        found, rows, oldest, at = history.sums[:], history.rows, self._oldest_at(now), 0
        while at < len(rows) and rows[at] < oldest:
            for place in PLACES:
                found[place] -= rows[at + 1 + place]
            at += _ROW
        return found[0], found[1], found[2], found[3]

    def limit(self, name: str, place: int, member: Hashable, more: float, limit: float, now: float) -> Limit:
        """Return how much of a limit is left for a member that wants `more` of the measure at this place.

        `reset_s` is the time until the member may have that much; 0 if now. A request for more than the whole limit
        waits until nothing counts. Changes nothing; `now` may be in the future.
        """
        used = self.sums(member, now)[place]
        left = max(0, min(int(limit), int(limit - used)))
        reset_s = 0.0 if used + more <= limit else self._reset_s(place, member, used, limit - more, now)
        return Limit(name, int(limit), left, reset_s, self.window.longest_s)

    def _reset_s(self, place: int, member: Hashable, used: float, room: float, now: float) -> float:
        """Return the seconds until at most `room` is used."""
        window, oldest = self.window, self._oldest_at(now)
        rows, reset_s = self._histories.get(member, NO_HISTORY).rows, window.longest_s
        for at in range(0, len(rows), _ROW):
            if rows[at] >= oldest:
                reset_s = max(0.0, window.begins_s(rows[at] + window.kept) - now - self.epoch_s)
                used -= rows[at + 1 + place]
                if used <= room:
                    break
        return reset_s

    def _oldest_at(self, now: float | None) -> int:
        """Return the oldest bucket that counts at this time; None for the time of the last `at`."""
        if now is None or now + self.epoch_s < self._changes_s[1]:
            return self.oldest
        return self.window.bucket(now + self.epoch_s) - self.window.kept + 1

    def _forget_silent(self) -> None:
        """Forget the members without events in the window. Called once in a window."""
        for member in [member for member, history in self._histories.items() if history.rows[-_ROW] < self.oldest]:
            del self._histories[member]

    def _forget_least(self) -> None:
        """Forget the half of the members that did least, by the sum over the measures of their part of all."""
        wholes = [sum([history.sums[place] for history in self._histories.values()]) or 1 for place in PLACES]
        most_first = sorted(
            self._histories.items(),
            key=lambda item: sum([item[1].sums[place] / wholes[place] for place in PLACES]),
            reverse=True,
        )
        self._histories = dict(most_first[: len(most_first) // 2])
