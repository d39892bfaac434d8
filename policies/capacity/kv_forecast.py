"""How full will a KV cache get if one more request starts now? A forecast over the dispatched requests.

Every sequence grows by one token per step until it ends. Occupancy rises until a sequence ends, and then falls. The
peak is therefore at one of the ends (as in LightLLM's admission check). For most answers only the distribution of the
length is known. The end is then taken to be equally likely at every step of a stretch. Occupancy at a step is a sum
over many requests, so its mean plus one standard deviation is used. The margin against long answers therefore grows
with the square root of their number.

The forecast is kept, not rebuilt: a request is noted when it is dispatched, and forgotten when it ends. The clock
counts the engine's steps. Before the minimum length of an answer, the stretch of its end is fixed on this clock, and so
are the tokens that it will hold there. After that the remaining length no longer depends on the tokens generated so far
(a memoryless tail): the request is *open*. A stretch of constant width lies ahead, and only the tokens held grow with
the clock. Example: answers take 100 tokens on average, and nine of ten at most 230. Then `remaining_output(100, 230,
1000, x)` is (0, 200) for x from 0 to 400: the answer may end now, and has a stretch of 200 tokens ahead.

Sums are kept over cells of requests with nearly equal steps (`FINE`). So an event costs the same however many requests
run, and a question costs as much as there are cells.
"""

from __future__ import annotations

from bisect import bisect_left
from math import inf, log, sqrt
from typing import Final

TOLERATED: Final = 0.1
"""Fraction of the capacity that may be unused before starts run further ahead to fill it."""
CATCHING_UP: Final = 0.5
"""Fraction of the unused capacity beyond `TOLERATED` that may be filled at once. The rest is spread, so that a wave
halves each time."""
LATE: Final = log(10.0) - 1.0
"""Excess over the mean, in means, of the longest tenth of exponentially distributed lengths."""
LOOKS: Final = 6
"""Number of further checks of the occupancy: at 1/2, 1/4, ... 1/2^LOOKS of the way to the last end."""
FINE: Final = 7
"""Fineness of cells: 1/2^FINE to 2/2^FINE of the way from now to their place, and at least one step."""
PARTS: Final = 8
"""An end at the upper limit of an answer is noted anew after 1/PARTS of the way there: the nearer, the finer."""
FINE_OPEN: Final = 5
"""Fineness of the cells of open requests, by the stretch ahead of them."""

NEVER: Final = -1
"""Key of the due place of a request that is never noted anew."""


def remaining_output(expected: float, reserved: float, most: float, done: float) -> tuple[float, float]:
    """Return the least number of tokens that an answer still adds, and the width of the stretch in which it then ends.

    Similar answers take `expected` tokens on average, and nine of ten take at most `reserved`. The estimate fits
    answers that end at random from some length on: the mean ahead of such an answer does not depend on the tokens it
    has taken. An answer near its reserve may well outgrow the reserve, and then adds a quarter of its length on
    average. An answer ends at `most` at the latest.
    """
    mean = max(0.0, reserved - expected) / LATE
    least = max(0.0, expected - mean - done)
    width = max(2 * mean, done / 2 - 2 * least)
    left = max(0.0, most - done)
    return min(least, left), min(width, max(0.0, left - least))


def stable_for(
    ahead: tuple[float, float], expected: float, reserved: float, most: float, done: float, off_by: float
) -> float:
    """Return for how many more tokens the forecast `ahead` (`remaining_output`) stays true to about `off_by` tokens."""
    mean = max(0.0, reserved - expected) / LATE
    least, width = ahead
    beyond = most - done - least - width
    if least > 0.0 and beyond <= 0.0:
        return max(least / PARTS, off_by)  # the answer ends at `most`, which does not move
    if least > 0.0:
        # From four fifths of the expected length on, the width grows with each token.
        steady = 0.8 * expected - done
        steady = min(least, steady if steady > 0.0 else off_by)
    else:
        steady = 4 * mean - done if done < 4 * mean else 2 * off_by
    return min(steady, beyond if beyond > 0.0 else off_by)


class Growth:
    """The growth of one request in the cache, in tokens. `grows`, `whole` and `spread` are per sequence."""

    __slots__ = (
        "age", "at_start", "base", "begins", "begins_key", "done", "due", "due_key", "ends", "ends_key", "grows",
        "held", "is_open", "name", "noted", "sequences", "spread", "stable_steps", "starts", "starts_key", "whole",
    )  # fmt: skip

    def __init__(
        self,
        grows: float,
        held: float,
        sequences: int,
        whole: float,
        age: float,
        spread: float = 0.0,
        stable_steps: float = inf,
        name: str = "",
    ) -> None:
        self.name = name
        self.stable_steps = stable_steps
        """Steps for which these numbers hold, if each sequence grows by a token per step."""
        self.grows = grows
        """Least number of tokens that each sequence still adds."""
        self.held = held
        """Tokens held now, over all sequences."""
        self.sequences = float(sequences)
        self.whole = whole
        """Tokens that each sequence adds on average from its start to its end."""
        self.age = age
        """Steps of the engine since the dispatch."""
        self.spread = spread if spread >= 1.0 else 0.0
        """Width of the stretch of the end: each sequence adds from `grows` to `grows + spread` tokens."""
        self.done = whole - grows - self.spread / 2
        """Tokens that each sequence had added when the request was noted."""
        self.at_start = held - self.sequences * self.done
        """Tokens held at the start."""
        # Places by the clock of the forecast, set when the request is noted.
        self.noted = 0.0
        self.base = 0.0
        """Tokens held at clock 0, if the growth is continued backwards."""
        self.is_open = False
        self.begins = self.ends = self.starts = self.due = 0.0
        self.begins_key = self.ends_key = self.starts_key = self.due_key = 0

    def work(self) -> float:
        """Return the token-steps from start to end."""
        return self.whole * (self.at_start + self.sequences * self.whole / 2)

    def share_at(self, step: float) -> float:
        """Return the probability that the request has not ended by this step."""
        if step <= self.grows:
            return 1.0
        return (self.grows + self.spread - step) / self.spread if step < self.grows + self.spread else 0.0


class _Cell:
    """Sums over requests with nearly equal places. A place is the step of an end, of a start or of the next noting, or
    the width of the stretch ahead."""

    __slots__ = ("count", "h0", "h1", "h2", "place", "requests", "v0", "v1", "v2")

    def __init__(self) -> None:
        self.count = 0.0
        self.place = 0.0
        """Sum of the places."""
        self.h0 = self.h1 = self.h2 = self.v0 = self.v1 = self.v2 = 0.0
        self.requests: dict[Growth, None] = {}
        """Requests that must be noted anew from this place on; only in cells of due steps."""

    def at(self) -> float:
        return self.place / self.count


class _CellTable:
    """The cells of requests with one kind of place (`_Cell`), in the order of the places."""

    __slots__ = ("_keys", "cells")

    def __init__(self) -> None:
        self.cells: list[_Cell] = []
        self._keys: list[int] = []

    def add(
        self, key: int, sign: float, place: float, h0: float, h1: float, h2: float, v0: float, v1: float, v2: float
    ) -> _Cell:
        """Add to the sums of a cell, or take from them (`sign` -1). Return the cell."""
        keys, cells = self._keys, self.cells
        index = bisect_left(keys, key)
        if index == len(keys) or keys[index] != key:
            keys.insert(index, key)
            cells.insert(index, _Cell())
        cell = cells[index]
        cell.count += sign
        if cell.count < 0.5:
            del keys[index], cells[index]
            return cell
        cell.place += sign * place
        cell.h0 += sign * h0
        cell.h1 += sign * h1
        cell.h2 += sign * h2
        cell.v0 += sign * v0
        cell.v1 += sign * v1
        cell.v2 += sign * v2
        return cell


def _key(place: float, distance: float, fine: int) -> int:
    """Return the key of the cell of a place at this distance. Keys are in the order of the places."""
    bits = (int(distance) >> fine).bit_length()
    return (int(place) >> bits << bits) * 64 + bits


class KvForecast:
    """The dispatched requests of one engine, by when they end."""

    def __init__(self) -> None:
        self.clock = 0.0
        """Steps of the engine, set by the caller before each question. No noted request may be due by then."""
        self._steps = _CellTable()
        """First and last possible ends of requests that are not open: the change there of the tokens held and of
        their variance, as polynomials in the step."""
        self._open = _CellTable()
        """Open requests, by the stretch ahead of them: base, sequences; base squared, base * sequences, sequences
        squared."""
        self._due = _CellTable()
        """Requests by the step at which they must be noted anew."""
        self._starts = _CellTable()
        """Work of the requests by the step of their dispatch, as a polynomial in the step."""
        self.count = 0
        """Number of noted requests."""
        self._h0 = self._h1 = 0.0
        """Tokens held by requests that are not open, as a polynomial in the step."""
        self._w0 = self._w1 = self._w2 = 0.0
        """Work of all requests, as a polynomial in the step."""
        self._l0 = self._l1 = 0.0
        """Tokens that all requests hold on average over their lives, as a polynomial in the step."""
        # The last result, valid until a request is noted or forgotten.
        self._full_at = self._full_own = -1.0
        self._full_tokens = 0.0
        """Tokens held at the step `_full_at`, without the last candidate, which did not fit there."""

    def due(self) -> list[Growth]:
        """Return the requests that must be noted anew by now."""
        due: list[Growth] = []
        for cell in self._due.cells:
            if cell.place / cell.count >= self.clock:
                break
            due += cell.requests
        return due

    def next_due(self) -> float:
        """Return the step at which the first request must be noted anew; inf if none must."""
        return self._due.cells[0].at() if self._due.cells else inf

    def add(self, one: Growth) -> None:
        """Note a request as it is now."""
        clock = self.clock
        one.noted = clock
        one.base = one.held - one.sequences * clock
        one.is_open = one.grows <= 0.0 and one.spread > 0.0
        one.begins = clock + one.grows
        one.ends = one.begins + one.spread
        one.starts = clock - one.age
        if one.is_open:
            one.begins_key = _key(one.spread, one.spread, FINE_OPEN)
        else:
            one.begins_key = _key(one.begins, one.grows, FINE)
            one.ends_key = _key(one.ends, one.ends - clock, FINE)
        one.starts_key = _key(one.starts, one.age, FINE)
        until = one.stable_steps if one.is_open or one.stable_steps < one.grows else one.grows
        one.due = clock + until
        one.due_key = _key(one.due, until, FINE) if until < inf else NEVER
        self.count += 1
        self._add_to_sums(one, 1.0)

    def remove(self, one: Growth) -> None:
        """Forget a request as it was noted."""
        self.count -= 1
        self._add_to_sums(one, -1.0)
        if not self.count:
            self._h0 = self._h1 = self._w0 = self._w1 = self._w2 = self._l0 = self._l1 = 0.0

    def _add_to_sums(self, one: Growth, sign: float) -> None:
        """Add a request to all sums, or subtract it (`sign` -1)."""
        self._full_at = -1.0
        base, n, begins, ends, width = one.base, one.sequences, one.begins, one.ends, one.spread
        at_start, whole = one.at_start, one.whole
        if one.due_key != NEVER:
            due = self._due.add(one.due_key, sign, one.due, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
            if sign > 0:
                due.requests[one] = None
            else:
                del due.requests[one]
        w1 = w2 = l1 = 0.0
        if one.is_open:
            self._open.add(one.begins_key, sign, width, base, n, 0.0, base * base, base * n, n * n)
            # An open request's whole length at a clock is this `whole` + clock.
            whole -= one.noted
            w1, w2, l1 = at_start + n * whole, n / 2, n / 2
        else:
            self._h0 += sign * base
            self._h1 += sign * n
            h0 = h1 = h2 = v0 = v1 = v2 = 0.0
            if width:
                # The mean is (base + n * step) * p, where p is the probability of not having ended. It falls from 1 to
                # 0 over the width. The variance is held**2 * p * (1 - p).
                h0, h1, h2 = base * ends / width, (n * ends - base) / width, -n / width
                q = ((one.held + n * one.grows / 2) / width) ** 2
                v0, v1, v2 = -q * begins * ends, q * (begins + ends), -q
            self._steps.add(one.begins_key, sign, begins, h0 - base, h1 - n, h2, v0, v1, v2)
            if width:
                self._steps.add(one.ends_key, sign, ends, -h0, -h1, -h2, -v0, -v1, -v2)
        w0, l0 = whole * (at_start + n * whole / 2), at_start + n * whole / 2
        self._starts.add(one.starts_key, sign, one.starts, w0, w1, w2, 0.0, 0.0, 0.0)
        self._w0 += sign * w0
        self._w1 += sign * w1
        self._w2 += sign * w2
        self._l0 += sign * l0
        self._l1 += sign * l1

    def held(self) -> float:
        """Return the tokens that all requests hold now."""
        return sum([cell.h0 + cell.h1 * self.clock for cell in self._open.cells], self._h0 + self._h1 * self.clock)

    def _peak_at_full(self, candidate: Growth, delay: float) -> float:
        """Return the occupancy with this candidate at the step where the last one did not fit; 0 if not known."""
        ahead = self._full_at - self.clock
        if ahead < 0.0 or (ahead < delay and self._full_own != candidate.grows):
            return 0.0
        return self._full_tokens + candidate.share_at(ahead) * (candidate.held + candidate.sequences * ahead)

    def peak_with(self, candidate: Growth, delay: float = 0.0, limit: float = inf) -> float:
        """Return the largest occupancy ahead, in tokens, if the candidate starts in `delay` steps and no other does.

        Requests that end before that start make room. Above the `limit`, the first occupancy found is returned.
        """
        peak = self._peak_at_full(candidate, delay)
        if peak > limit:
            return peak
        clock, own_end, own_held, own_n = self.clock, candidate.grows, candidate.held, candidate.sequences
        fixed, opened = self._steps.cells, self._open.cells
        fixed_count, open_count = len(fixed), len(opened)
        h0, h1, h2, v0, v1, v2 = self._h0, self._h1, 0.0, 0.0, 0.0, 0.0
        m0, m1, m2, u1, u2 = self._open_ahead()
        last = max(fixed[-1].at() - clock if fixed_count else 0.0, opened[-1].at() if open_count else 0.0)
        look, looks = last / 2.0**LOOKS, LOOKS
        own_at = own_end if own_end > delay else delay
        i, j, peak = 0, 0, 0.0
        next_fixed = fixed[0].at() - clock if fixed_count else inf
        next_open = opened[0].at() if open_count else inf
        while True:
            # The next step at which anything changes, or is to be checked.
            step = next_fixed if next_fixed <= next_open else next_open
            is_change = step < look and step < own_at
            if not is_change:
                step = own_at if own_at <= look else look
                if step == inf:
                    return peak
            if step >= delay:
                ahead = own_end if step == own_at else step
                at, share = clock + ahead, candidate.share_at(ahead)
                held = h0 + (h1 + h2 * at) * at + m0 + (m1 + m2 * ahead) * ahead
                variance = v0 + (v1 + v2 * at) * at + (u1 + u2 * ahead) * ahead
                level = held + share * (own_held + own_n * ahead)
                level += sqrt(max(0.0, variance + share * (1.0 - share) * own_held * own_held))
                if level > peak:
                    peak = level
                    if peak > limit:
                        self._full_at, self._full_own = at, own_end if step == own_at else -1.0
                        self._full_tokens = held + sqrt(max(0.0, variance))
                        return peak
            if not is_change:
                if step == own_at:
                    own_at = inf
                else:
                    looks -= 1
                    look = last / 2.0**looks if looks > 0 else inf
            elif next_fixed <= next_open:
                cell = fixed[i]
                h0, h1, h2 = h0 + cell.h0, h1 + cell.h1, h2 + cell.h2
                v0, v1, v2 = v0 + cell.v0, v1 + cell.v1, v2 + cell.v2
                i += 1
                next_fixed = fixed[i].at() - clock if i < fixed_count else inf
            else:
                cell = opened[j]
                width, held = step, cell.h0 + cell.h1 * clock
                q = (cell.v0 + (2.0 * cell.v1 + cell.v2 * clock) * clock) / width
                m0, m1, m2 = m0 - held, m1 - cell.h1 + held / width, m2 + cell.h1 / width
                u1, u2 = u1 - q, u2 + q / width
                j += 1
                next_open = opened[j].at() if j < open_count else inf

    def _open_ahead(self) -> tuple[float, float, float, float, float]:
        """Return the tokens that open requests hold, and the variance, as polynomials in the steps ahead."""
        clock = self.clock
        m0 = m1 = m2 = u1 = u2 = 0.0
        for cell in self._open.cells:
            width, held = cell.at(), cell.h0 + cell.h1 * clock
            q = (cell.v0 + (2.0 * cell.v1 + cell.v2 * clock) * clock) / width
            m0, m1, m2 = m0 + held, m1 + cell.h1 - held / width, m2 - cell.h1 / width
            u1, u2 = u1 + q, u2 - q / width
        return m0, m1, m2, u1, u2

    def keeps_pace(self, candidate: Growth, capacity_tokens: float) -> bool:
        """Return whether starts stay evenly spread if the candidate starts now.

        Requests that start together end together. The cache is half empty at the start of such a wave and full at its
        end, and then the next wave starts together. With evenly spread starts the cache holds more on average.

        A full cache gets through `capacity_tokens` token-steps per step. So within the last k steps, for every k, no
        more than k * `capacity_tokens` token-steps of work may have been started. Three amounts are allowed on top: the
        candidate itself, a part of the unused capacity of a cache that has become empty, and `spread` steps, since
        answers whose lengths differ by so much end that far apart even if they start together.
        """
        work = candidate.work()
        level = (self._l0 + self._l1 * self.clock) / capacity_tokens
        missing = max(0.0, 1.0 - TOLERATED - level)
        ahead = work / capacity_tokens + candidate.whole * CATCHING_UP * missing + candidate.spread
        return self._excess_work(capacity_tokens) + work <= capacity_tokens * ahead

    def _excess_work(self, capacity_tokens: float) -> float:
        """Return the token-steps of started work beyond what the capacity serves.

        The value is the maximum over the last k steps, for any k, and 0 at least.
        """
        clock, lead, work = self.clock, 0.0, 0.0
        all_work = self._w0 + (self._w1 + self._w2 * clock) * clock
        for cell in reversed(self._starts.cells):
            allowed = capacity_tokens * (clock - cell.at())
            if all_work - allowed <= lead:
                break
            own = cell.h0 + (cell.h1 + cell.h2 * clock) * clock
            lead = max(lead, work + own * (1.0 - 1.0 / cell.count) - allowed)
            work += own
        return lead
