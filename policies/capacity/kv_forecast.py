"""How full will a KV cache get if one more request starts now? A forecast over the dispatched requests.

Every sequence grows by one token per step until it ends. Occupancy rises until a sequence ends, and then falls. The
peak is therefore at one of the ends (as in LightLLM's admission check). For most answers only the distribution of the
length is known. The end is then equally likely at every step of a stretch of steps. Occupancy at a step is a sum over
many requests, so its mean plus one standard deviation is used. The margin against long answers therefore grows with the
square root of their number.

The forecast is kept, not made anew: a request is noted when it starts, and forgotten when it ends. By a clock that
counts the engine's steps, nothing of it moves in between. Where a request may not have ended yet, the steps of its end
are fixed, and so is what it will hold there. Once its end is possible it is *open*: whatever it has taken, the same
stretch lies ahead of it, and only what it holds grows with the clock. Only sums are kept, of requests whose steps are
alike within a hundredth of the way there: so an event costs the same however many run, and a question costs as much as
there are different ends.
"""

from __future__ import annotations

from bisect import bisect_left
from math import inf, sqrt
from typing import Final

TOLERATED: Final = 0.1
"""Fraction of the capacity that may be unused before starts run further ahead to fill it."""
CATCHING_UP: Final = 0.5
"""Fraction of the unused capacity beyond that which may be filled at once. The rest is spread, so that a wave halves
each time."""
LATE: Final = 1.3
"""One in ten exponentially distributed lengths exceeds the mean by at least this many times the mean: ln 10 - 1."""
LOOKS: Final = 6
"""Where ends are spread, occupancy is also checked at 1/2, 1/4, ... 1/2^6 of the way to the last end."""
FINE: Final = 7
"""Steps count as one if they are nearer to each other than 1/2^FINE of the way there, or in the same step."""
PARTS: Final = 8
"""An end that does not move is noted anew after one of so many parts of the way there: the nearer it is, the finer."""
FINE_OPEN: Final = 5
"""The same of the stretches of open requests."""

NEVER: Final = -1


def still_to_come(expected: float, reserved: float, most: float, done: float) -> tuple[float, float]:
    """How many more tokens will an answer add? At least the first number, and up to the second number more.

    Similar answers take `expected` tokens on average, and nine of ten take at most `reserved`. This fits answers that
    end at random from some length on: an answer that has come that far still has the same mean ahead of it, whatever it
    has taken. An answer near its reserve may well outgrow it, and then adds a quarter of its length on average. It ends
    at `most` at the latest.
    """
    mean = max(0.0, reserved - expected) / LATE
    least = max(0.0, expected - mean - done)
    width = max(2 * mean, done / 2 - 2 * least)
    left = max(0.0, most - done)
    return min(least, left), min(width, max(0.0, left - least))


def lasts(expected: float, reserved: float, most: float, done: float, off_by: float) -> float:
    """For how many more tokens does `still_to_come` name the same end, to within about `off_by` tokens?"""
    mean = max(0.0, reserved - expected) / LATE
    least, width = still_to_come(expected, reserved, most, done)
    beyond = most - done - least - width
    if least > 0.0 and beyond <= 0.0:
        return max(least / PARTS, off_by)  # it ends at `most`, which does not move
    if least > 0.0:
        # From four fifths of the expected length on it may outgrow its reserve, by more with each token.
        steady = 0.8 * expected - done
        steady = min(least, steady if steady > 0.0 else off_by)
    else:
        steady = 4 * mean - done if done < 4 * mean else 2 * off_by
    return min(steady, beyond if beyond > 0.0 else off_by)


class Growing:
    """One request in the cache, in tokens. `grows`, `whole` and `spread` are per sequence."""

    __slots__ = (
        "age", "base", "begins", "begins_key", "due", "due_key", "ends", "ends_key", "grows", "held", "is_open",
        "lasts", "name", "noted", "sequences", "spread", "starts", "starts_key", "whole",
    )  # fmt: skip

    def __init__(
        self,
        grows: float,
        held: float,
        sequences: int,
        whole: float,
        age: float,
        spread: float = 0.0,
        lasts: float = inf,
        name: str = "",
    ) -> None:
        self.name = name
        self.lasts = lasts
        """For how many steps this is so, if it grows by a token in each."""
        self.grows = grows
        """What each sequence will add at least."""
        self.held = held
        """What it holds now, over all its sequences."""
        self.sequences = float(sequences)
        self.whole = whole
        """What each sequence adds on average from its start to its end."""
        self.age = age
        """Time since its dispatch, in steps of the engine."""
        self.spread = spread if spread >= 1.0 else 0.0
        """It may add any number of tokens from `grows` to `grows + spread`."""
        # Where it is noted, by the clock of the forecast.
        self.noted = 0.0
        self.base = 0.0
        """What it would have held when the clock was 0."""
        self.is_open = False
        self.begins = self.ends = self.starts = self.due = 0.0
        self.begins_key = self.ends_key = self.starts_key = self.due_key = 0

    def done(self) -> float:
        """What each sequence had added when it was noted."""
        return self.whole - self.grows - self.spread / 2

    def at_start(self) -> float:
        """What it held at its start."""
        return self.held - self.sequences * self.done()

    def work(self) -> float:
        """Token-steps from its start to its end."""
        return self.whole * (self.at_start() + self.sequences * self.whole / 2)

    def share_at(self, step: float) -> float:
        """Probability that it has not ended by this step."""
        if step <= self.grows:
            return 1.0
        return (self.grows + self.spread - step) / self.spread if step < self.grows + self.spread else 0.0


class _Cell:
    """Sums over what is at about the same place."""

    __slots__ = ("count", "h0", "h1", "h2", "place", "requests", "v0", "v1", "v2")

    def __init__(self) -> None:
        self.count = 0.0
        self.place = 0.0
        """Sum of the places."""
        self.h0 = self.h1 = self.h2 = self.v0 = self.v1 = self.v2 = 0.0
        self.requests: dict[Growing, None] = {}
        """Requests that must be noted anew from this place on."""

    def at(self) -> float:
        return self.place / self.count


class _Cells:
    """Cells in the order of their places."""

    __slots__ = ("_by_key", "_keys", "cells")

    def __init__(self) -> None:
        self.cells: list[_Cell] = []
        self._keys: list[int] = []
        self._by_key: dict[int, _Cell] = {}

    def cell(self, key: int) -> _Cell:
        cell = self._by_key.get(key)
        if cell is None:
            cell = self._by_key[key] = _Cell()
            index = bisect_left(self._keys, key)
            self._keys.insert(index, key)
            self.cells.insert(index, cell)
        return cell

    def add(
        self, key: int, sign: float, place: float, h0: float, h1: float, h2: float, v0: float, v1: float, v2: float
    ) -> None:
        """Add to the sums of a cell, or take from them (`sign` -1)."""
        cell = self.cell(key)
        cell.count += sign
        if cell.count < 0.5:
            index = bisect_left(self._keys, key)
            del self._keys[index], self.cells[index], self._by_key[key]
            return
        cell.place += sign * place
        cell.h0 += sign * h0
        cell.h1 += sign * h1
        cell.h2 += sign * h2
        cell.v0 += sign * v0
        cell.v1 += sign * v1
        cell.v2 += sign * v2


def _key(place: float, distance: float, fine: int) -> int:
    """The key of the cell of a place that is so far away. Keys are in the order of the places."""
    bits = (int(distance) >> fine).bit_length()
    return (int(place) >> bits << bits) * 64 + bits


class KvForecast:
    """The dispatched requests of one engine, by when they end."""

    def __init__(self) -> None:
        self.clock = 0.0
        """Steps of the engine, set by the caller before each question. No noted request may be due by then."""
        self._steps = _Cells()
        """Where the ends of requests become possible, and where they must have come: how what is held changes there,
        and its variance, as polynomials in the step."""
        self._open = _Cells()
        """Open requests, by the stretch ahead of them: base, sequences; base squared, base * sequences, sequences
        squared."""
        self._due = _Cells()
        """Until when what was noted is so."""
        self._starts = _Cells()
        """By when they started: their work, as a polynomial in the step."""
        self._count = 0
        self._h0 = self._h1 = 0.0
        """What those hold that are not open, as a polynomial in the step."""
        self._w0 = self._w1 = self._w2 = 0.0
        """All work."""
        self._l0 = self._l1 = 0.0
        """What all hold on average over their lives."""
        # What the last questions found: it holds until something is noted or forgotten.
        self._full_at = self._full_own = -1.0
        self._full_tokens = 0.0
        """At this step the last candidate did not fit, and so much is held without it."""
        self._lead_tokens = self._lead_clock = self._lead_capacity = -1.0

    def __len__(self) -> int:
        """Requests that are noted."""
        return self._count

    def due(self) -> list[Growing]:
        """Requests that must be noted anew, as they are now."""
        due: list[Growing] = []
        for cell in self._due.cells:
            if cell.at() >= self.clock:
                break
            due += cell.requests
        return due

    def next_due(self) -> float:
        """When must the first one be noted anew, by the clock?"""
        return self._due.cells[0].at() if self._due.cells else inf

    def add(self, one: Growing) -> None:
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
        until = one.lasts if one.is_open or one.lasts < one.grows else one.grows
        one.due = clock + until
        one.due_key = _key(one.due, until, FINE) if until < inf else NEVER
        self._count += 1
        self._sum(one, 1.0)

    def remove(self, one: Growing) -> None:
        """Forget a request as it was noted."""
        self._count -= 1
        self._sum(one, -1.0)
        if not self._count:
            self._h0 = self._h1 = self._w0 = self._w1 = self._w2 = self._l0 = self._l1 = 0.0

    def _sum(self, one: Growing, sign: float) -> None:
        self._full_at = self._lead_clock = -1.0
        base, n, width = one.base, one.sequences, one.spread
        at_start, whole = one.at_start(), one.whole
        if one.due_key != NEVER:
            if sign > 0:
                self._due.cell(one.due_key).requests[one] = None
            else:
                del self._due.cell(one.due_key).requests[one]
            self._due.add(one.due_key, sign, one.due, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        w1 = w2 = l1 = 0.0
        if one.is_open:
            self._open.add(one.begins_key, sign, width, base, n, 0.0, base * base, base * n, n * n)
            # By the clock its whole length is `whole + clock`.
            whole -= one.noted
            w1, w2, l1 = at_start + n * whole, n / 2, n / 2
        else:
            self._h0 += sign * base
            self._h1 += sign * n
            self._sum_steps(one, sign)
        w0, l0 = whole * (at_start + n * whole / 2), at_start + n * whole / 2
        self._starts.add(one.starts_key, sign, one.starts, w0, w1, w2, 0.0, 0.0, 0.0)
        self._w0 += sign * w0
        self._w1 += sign * w1
        self._w2 += sign * w2
        self._l0 += sign * l0
        self._l1 += sign * l1

    def _sum_steps(self, one: Growing, sign: float) -> None:
        base, n, begins, ends, width = one.base, one.sequences, one.begins, one.ends, one.spread
        if not width:
            self._steps.add(one.begins_key, sign, begins, -base, -n, 0.0, 0.0, 0.0, 0.0)
            return
        # The mean is (base + n * step) * p, where p is the probability of not having ended. It falls from 1 to 0 over
        # the width. The variance is held**2 * p * (1 - p).
        h0, h1, h2 = base * ends / width, (n * ends - base) / width, -n / width
        q = ((one.held + n * one.grows / 2) / width) ** 2
        v0, v1, v2 = -q * begins * ends, q * (begins + ends), -q
        self._steps.add(one.begins_key, sign, begins, h0 - base, h1 - n, h2, v0, v1, v2)
        self._steps.add(one.ends_key, sign, ends, -h0, -h1, -h2, -v0, -v1, -v2)

    def held(self) -> float:
        """What all hold now."""
        return sum([cell.h0 + cell.h1 * self.clock for cell in self._open.cells], self._h0 + self._h1 * self.clock)

    def _peak_at_full(self, candidate: Growing, delay: float) -> float:
        """Occupancy with this candidate at the step where the last one did not fit; 0 if that says nothing."""
        ahead = self._full_at - self.clock
        if ahead < 0.0 or (ahead < delay and self._full_own != candidate.grows):
            return 0.0
        return self._full_tokens + candidate.share_at(ahead) * (candidate.held + candidate.sequences * ahead)

    def peak_with(self, candidate: Growing, delay: float = 0.0, limit: float = inf) -> float:
        """Largest occupancy ahead, in tokens, if the candidate starts in `delay` steps and nothing starts after it.

        Requests that end before then make room for it. Above the `limit`, the first occupancy found is returned.
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
        """What open requests hold, and its variance, as polynomials in the steps ahead."""
        clock = self.clock
        m0 = m1 = m2 = u1 = u2 = 0.0
        for cell in self._open.cells:
            width, held = cell.at(), cell.h0 + cell.h1 * clock
            q = (cell.v0 + (2.0 * cell.v1 + cell.v2 * clock) * clock) / width
            m0, m1, m2 = m0 + held, m1 + cell.h1 - held / width, m2 - cell.h1 / width
            u1, u2 = u1 + q, u2 - q / width
        return m0, m1, m2, u1, u2

    def is_level_with(self, candidate: Growing, capacity_tokens: float) -> bool:
        """Would starts still be evenly spread if the candidate started now?

        Requests that start together end together. The cache is half empty at the start of such a wave and full at its
        end, and then the next wave starts together. With evenly spread starts the same cache holds more on average.

        A full cache gets through `capacity_tokens` token-steps per step. So within the last k steps, for every k, no
        more than k * `capacity_tokens` token-steps of work may have been started. Two amounts are allowed on top: the
        candidate itself, and part of what is missing in a cache that has become empty. Answers whose lengths differ by
        `spread` steps end that far apart, even if they start together.
        """
        work = candidate.work()
        level = (self._l0 + self._l1 * self.clock) / capacity_tokens
        missing = max(0.0, 1.0 - TOLERATED - level)
        ahead = work / capacity_tokens + candidate.whole * CATCHING_UP * missing + candidate.spread
        return self._lead(capacity_tokens) + work <= capacity_tokens * ahead

    def _lead(self, capacity_tokens: float) -> float:
        """How much more work has been started than a cache of this size gets through, within the k steps where that is
        most?
        """
        clock = self.clock
        if clock != self._lead_clock or capacity_tokens != self._lead_capacity:
            lead, work = 0.0, 0.0
            all_work = self._w0 + (self._w1 + self._w2 * clock) * clock
            for cell in reversed(self._starts.cells):
                allowed = capacity_tokens * (clock - cell.at())
                if all_work - allowed <= lead:
                    break
                own = cell.h0 + (cell.h1 + cell.h2 * clock) * clock
                beyond = work + own * (1.0 - 1.0 / cell.count) - allowed
                if beyond > lead:
                    lead = beyond
                work += own
            self._lead_tokens, self._lead_clock, self._lead_capacity = lead, clock, capacity_tokens
        return self._lead_tokens
