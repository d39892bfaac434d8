"""How full is an engine's KV cache, how full will it get, and has it room for one more request?

The books count every dispatched request with what it holds at its largest. The gauge corrects them: what it shows
beyond the books belongs to others, and what it shows less is shared between prompts. Where the books alone would say
no, a forecast over the ends of what runs decides (`kv_forecast`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import ceil
from typing import Final

from policies.capacity.gauges import Allowance, CapacitySettings, Gauges
from policies.capacity.kv_forecast import Growing, KvForecast, still_to_come
from policies.capacity.lease import OUTGROWN, Lease
from policies.capacity.obstacle import Obstacle
from policies.capacity.pace import Pace
from policies.request import Request

__all__ = ["KvCache", "KvUse"]

ENDED_MAX: Final = 1024
FORECAST_S_PER_LEASE: Final = 0.0004
"""A forecast is used for so long for each request in it: a fuller engine changes less with each."""
NOTHING_MORE: Final = Growing(0.0, 0.0, 0, 0.0, 0.0)


class KvUse:
    """KV tokens of one gateway at one engine: held now, reached at the largest, the limit, and kept free below it."""

    __slots__ = ("kept", "limit", "now", "peak")

    def __init__(self, now: int, peak: int, limit: int, kept: int) -> None:
        self.now = now
        self.peak = peak
        self.limit = limit
        """0: the capacity is not known."""
        self.kept = kept
        """For the next request of tenants below their fair share."""


class KvCache:
    """The KV cache of one engine. Tokens; each sequence costs half a block for the block that it has not filled."""

    def __init__(self, settings: CapacitySettings, leases: Mapping[str, Lease], pace: Pace) -> None:
        self.capacity_tokens: int | None = None
        self.held_tokens = 0
        """At the largest, of all that is dispatched."""
        self._settings = settings
        self._leases = leases
        self._pace = pace
        self._block_size = 16
        self._foreign_tokens = 0.0
        self._ended: deque[tuple[float, float]] = deque(maxlen=ENDED_MAX)
        """When requests ended since the last scrape, and the tokens they held: an older page still counts them."""
        self._prompt_part = 1.0
        """Of the prompts' tokens, so many are held: the rest is shared with other prompts."""
        self._spare_tokens = 0.0
        self._forecast: KvForecast | None = None
        self._forecast_s = 0.0

    # --- questions ---

    def footprint_tokens(self, request: Request) -> float:
        """KV tokens of a request at its largest, half-filled blocks included."""
        reserved = request.progress.output_tokens_reserved
        return request.prompt_tokens + reserved + request.sequences * self._block_size / 2

    def fraction(self, more_tokens: float = 0.0) -> float:
        """Largest occupancy that what is dispatched is expected to reach, and so much more, of a known capacity."""
        assert self.capacity_tokens is not None
        return (self.held_tokens + self._foreign_tokens + more_tokens) / self.capacity_tokens

    def obstacle(
        self,
        request: Request,
        now: float,
        *,
        allowance: Allowance | None,
        keep_headroom: bool,
        slots: int | None,
        sequences: int,
    ) -> Obstacle | None:
        """Is there no room for it, or is it early for an even spread of starts? None: it may start.

        Args:
            slots: the slots of the engine if starts are to be spread, because more of its tenant waits than can start.
            sequences: those that would be dispatched with it.
        """
        capacity = self.capacity_tokens
        if capacity is None:
            return None
        limit = whole = capacity * self._settings.kv_ceiling - self._foreign_tokens
        if allowance is not None:
            if not self._leases and allowance.kv_tokens >= int(limit):
                return None
            limit = min(limit, allowance.kv_tokens)
            if limit <= 0:
                return Obstacle.KV
        elif keep_headroom:
            # Room for the next request of those below their share: as large as theirs have been.
            limit -= self._kept_tokens(capacity)
        held_tokens = self.held_tokens + self.footprint_tokens(request)
        fits_whole = held_tokens <= limit
        # Where every slot can be filled with such requests, slots are what is short, and there is nothing to spread.
        spreads = slots is not None and held_tokens * slots > whole * sequences
        if fits_whole and not spreads:
            return None
        forecast = self._looked_ahead(now)
        candidate = self._candidate(request, now)
        if spreads and not forecast.is_level_with(candidate, limit):
            return Obstacle.SPREAD
        if fits_whole or forecast.peak_with(candidate, self._first_token_steps(), limit) <= limit:
            return None
        return Obstacle.KV

    def use(self, starting_tokens: int, now: float) -> KvUse:
        """What is held of it, now and at the largest, and within which limit?"""
        capacity = self.capacity_tokens
        peak, limit = float(self.held_tokens), 0.0
        if capacity is not None:
            limit = max(0.0, capacity * self._settings.kv_ceiling - self._foreign_tokens)
            if self._leases:
                peak = min(peak, self._looked_ahead(now).peak_with(NOTHING_MORE))
        prompts, outputs = self._held_now()
        held = round(self._prompt_part * prompts + outputs) + starting_tokens
        return KvUse(held, round(peak), round(limit), round(self._kept_tokens(limit)))

    def needed_tokens(self, request: Request, use: KvUse, now: float) -> int:
        """How much must be free beyond what is in use, so that this one can start?"""
        needed = min(self.footprint_tokens(request), float(use.limit))
        if self._leases and self.capacity_tokens is not None:
            candidate = self._candidate(request, now)
            with_it = self._looked_ahead(now).peak_with(candidate, self._first_token_steps())
            needed = min(needed, max(0.0, with_it - use.peak))
        return ceil(needed)

    # --- events ---

    def add(self, lease: Lease, *, spare: bool) -> None:
        lease.held_tokens = round(self.footprint_tokens(lease.request))
        if spare:
            self._spare_tokens += 0.2 * (lease.held_tokens - self._spare_tokens)
        self.held_tokens += lease.held_tokens
        self._forecast = None

    def changed(self) -> None:
        """Something that runs has started or grown: what was forecast is out of date."""
        self._forecast = None

    def regrown(self, lease: Lease) -> None:
        """Its output has gone beyond what it was counted with."""
        request = lease.request
        if lease.output_tokens * OUTGROWN <= request.progress.output_tokens_reserved:
            return
        held = request.prompt_tokens + lease.output_tokens + lease.reserve_left() * request.sequences
        held += request.sequences * self._block_size / 2
        if held > lease.held_tokens:
            self.held_tokens += round(held) - lease.held_tokens
            lease.held_tokens = round(held)
            self._forecast = None

    def remove(self, lease: Lease, now: float) -> None:
        self.held_tokens -= lease.held_tokens
        if lease.started_s is not None:
            self._ended.append((now, lease.request.prompt_tokens + lease.output_tokens))
        self._forecast = None

    def observe(self, gauges: Gauges, *, starting_tokens: int, elsewhere: Allowance | None) -> None:
        """The engine was scraped; other gateways hold of it what `elsewhere` says."""
        if gauges.block_size:
            self._block_size = gauges.block_size
        if gauges.kv_capacity_tokens:
            self.capacity_tokens = gauges.kv_capacity_tokens
        if gauges.kv_usage is not None and self.capacity_tokens is not None:
            held_then = sum(tokens for ended_s, tokens in self._ended if ended_s >= gauges.taken_s)
            self._correct(gauges.kv_usage * self.capacity_tokens - held_then, starting_tokens, elsewhere)
        self._ended.clear()
        self._forecast = None

    # --- the model ---

    def _correct(self, used_tokens: float, starting_tokens: int, elsewhere: Allowance | None) -> None:
        """Compare the gauge with the books: what is more belongs to others, what is less is shared prefixes."""
        prompts, outputs = self._held_now()
        others = 0
        if elsewhere is not None:
            used_tokens -= elsewhere.kv_tokens_elsewhere
            others = elsewhere.sequences_elsewhere
        if not self._leases and not others:
            # An idle engine's gauge may be frozen at an old value: it is no reason to stay away.
            self._foreign_tokens = 0.0
            return
        beyond = max(0.0, used_tokens - prompts - outputs - float(starting_tokens))
        self._foreign_tokens += 0.5 * (beyond - self._foreign_tokens)
        if prompts > 0:
            part = min(1.0, max(0.05, (used_tokens - outputs) / prompts))
            self._prompt_part += 0.05 * (part - self._prompt_part)

    def _held_now(self) -> tuple[float, float]:
        """Tokens of the prompts and of the outputs of what runs."""
        prompts = outputs = 0.0
        for lease in self._leases.values():
            outputs += lease.output_tokens + lease.request.sequences * self._block_size / 2
            if lease.started_s is not None:
                prompts += lease.request.prompt_tokens
        return prompts, outputs

    def _kept_tokens(self, capacity_tokens: float) -> float:
        return min(self._spare_tokens, capacity_tokens * self._settings.headroom)

    def _first_token_steps(self) -> float:
        """Steps of the engine until a request that is dispatched now has its first token."""
        return self._pace.first_token_s / self._pace.token_s

    def _looked_ahead(self, now: float) -> KvForecast:
        if self._forecast is None or not 0 <= now - self._forecast_s < FORECAST_S_PER_LEASE * len(self._leases):
            self._forecast = KvForecast([self._growing(lease, now) for lease in self._leases.values()])
            self._forecast_s = now
        return self._forecast

    def _candidate(self, request: Request, now: float) -> Growing:
        return self._growing(Lease(request, "", now), now)

    def _growing(self, lease: Lease, now: float) -> Growing:
        request, done, each = lease.request, lease.output_each(), lease.request.sequences
        prompt = request.prompt_tokens * (self._prompt_part if lease.started_s is not None else 1.0)
        held = prompt + lease.output_tokens + each * self._block_size / 2
        grows, spread = still_to_come(
            request.progress.output_tokens_expected / each,
            request.progress.output_tokens_reserved / each,
            request.output_tokens_max / each,
            done,
        )
        starting_s = (now if lease.started_s is None else lease.started_s) - lease.dispatched_s
        return Growing(grows, held, each, done + grows + spread / 2, done + starting_s / self._pace.token_s, spread)
