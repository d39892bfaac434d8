"""How full is an engine's KV cache, how full will it get, and has it room for one more request?

Three numbers model the cache. `held_tokens` is the sum of all dispatched requests, each at the largest size that it is
expected to reach. `_foreign_tokens` is the excess of the engine's gauge over the ledger: other clients of the engine.
`_prompt_part` is the fraction of prompt tokens that the gauge shows: the rest are prefixes that prompts share.

A request has room if `held_tokens` with it stays below the ceiling. Otherwise a forecast over the ends of the running
requests decides (`kv_forecast`). Example: with 90 of 100 blocks reserved and 40 filled, a request of 20 may start if
enough other requests end before it has grown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import ceil, inf
from typing import Final, NamedTuple

from policies.averages import USUAL
from policies.capacity.gauges import CapacitySettings, Gauges, Grant
from policies.capacity.kv_forecast import Growth, KvForecast, remaining_output, stable_for
from policies.capacity.lease import OUTGROWN, Lease
from policies.capacity.obstacle import Obstacle
from policies.capacity.pace import Pace
from policies.request import Request

ENDED_MAX: Final = 1024
EVENLY: Final = 0.94
"""Part of the KV limit for which starts are spread. Bursty starts produce bursty ends, and those bursty starts again.
Starts paced slightly below capacity damp this; the rest of the cache is filled by starts that replace ends."""
PROMPT_PART_SHARE_PER_S: Final = 10 * USUAL
"""Weight of one comparison of gauge and ledger, per second since the comparison before it: hundreds of steps in a
second say no more about shared prefixes than ten pages do."""
OFF_BY_TOKENS: Final = 1.0
OFF_BY_TOKENS_PER_LEASE: Final = 0.01
"""Tokens per sequence by which a request may differ from its forecast before it is noted anew: a fixed number, plus a
number for each lease at the engine."""
OFF_BY_PART: Final = 0.02
"""Change of the held part of prompts after which the forecast is rebuilt."""
CLOCK_MAX: Final = 65536.0
"""Steps by the clock of a forecast after which it is rebuilt, so that its sums stay exact."""
NOTHING_MORE: Final = Growth(0.0, 0.0, 0, 0.0, 0.0)


class KvUse(NamedTuple):
    """KV tokens of one gateway at one engine: held now, expected peak, and limit."""

    now: int
    peak: int
    limit: int
    """Limit of the tokens held; 0 if the capacity is not known or other clients hold all of it."""


class KvCache:
    """The KV cache of one engine, in tokens. Each sequence also costs half a block, for the block not yet filled."""

    def __init__(self, settings: CapacitySettings, leases: Mapping[str, Lease], pace: Pace) -> None:
        self.capacity_tokens: int | None = None
        self.held_tokens = 0
        """Tokens of all dispatched requests, each at its largest."""
        self.settings = settings
        self._unsure_tokens = 0
        """Tokens reserved at dispatch for requests whose answers may take more."""
        self._leases = leases
        self._pace = pace
        self._block_size = 16
        self._foreign_tokens = 0.0
        self._ended: deque[tuple[float, float]] = deque(maxlen=ENDED_MAX)
        """Ends since the last gauge, and the tokens then held. A gauge taken before an end still counts them."""
        self._compared_s = float("-inf")
        self._prompt_part = 1.0
        """Fraction of the prompt tokens that is really held. The rest are prefixes shared with other prompts."""
        self._prompts = self._outputs = 0.0
        """Tokens of the prompts of started requests, and of all outputs, half blocks included."""
        self._unstreamed: dict[str, Lease] = {}
        """Leases of started requests that are not streamed, so their outputs are estimated."""
        self._forecast = KvForecast()
        """Forecast of all leases. The forecast's clock was `_forecast_clock` at the time `_forecast_s`."""
        self._forecast_s = 0.0
        self._forecast_clock = 0.0
        self._forecast_part = 1.0

    # --- questions ---

    def footprint_tokens(self, request: Request) -> float:
        """Return the KV tokens of a request at its largest, with half-filled blocks."""
        reserved = request.progress.output_tokens_reserved
        return request.prompt_tokens + reserved + request.sequences * self._block_size / 2

    def fraction(self, more_tokens: float) -> float:
        """Return the largest occupancy that the dispatched requests and `more_tokens` may reach (1.0 = full).

        The capacity must be known.
        """
        assert self.capacity_tokens is not None
        return (self.held_tokens + self._foreign_tokens + more_tokens) / self.capacity_tokens

    def obstacle(
        self, request: Request, now: float, *, allowance: Grant | None, slots: int | None, sequences: int
    ) -> Obstacle | None:
        """Return `KV` if there is no room, `SPREAD` if a start now would be uneven, None if the request may start.

        Args:
            allowance: part of the engine that this gateway may use; None if no other gateway uses the engine.
            slots: the slots of the engine if starts are to be spread, because more of the tenant waits than can start.
            sequences: sequences that would then be dispatched, this request's included.
        """
        capacity = self.capacity_tokens
        if capacity is None:
            return None
        footprint_tokens = self.footprint_tokens(request)
        held_tokens = self.held_tokens + footprint_tokens
        may_outgrow = request.progress.output_tokens_reserved < request.output_tokens_max
        unsure_tokens = self._unsure_tokens + (footprint_tokens if may_outgrow else 0.0)
        limit = whole = self._ceiling_tokens(capacity, unsure_tokens / held_tokens) - self._foreign_tokens
        if allowance is not None:
            if not self._leases and allowance.kv_tokens >= int(limit):
                return None
            limit = min(limit, allowance.kv_tokens)
        if limit <= 0:  # requests of others fill the cache
            return Obstacle.KV
        fits_whole = held_tokens <= limit
        # Where such requests could fill every slot, slots are the scarce resource. Starts then need no spread.
        spreads = slots is not None and held_tokens * slots > whole * sequences
        if fits_whole and not spreads:
            return None
        forecast = self._looked_ahead(now)
        candidate = self._candidate(request, now)
        if spreads and not forecast.keeps_pace(candidate, EVENLY * limit):
            return Obstacle.SPREAD
        if fits_whole or forecast.peak_with(candidate, self._first_token_steps(), limit) <= limit:
            return None
        return Obstacle.KV

    def use(self, starting_tokens: int, now: float) -> KvUse:
        """Return the tokens held now, the expected peak and the limit."""
        peak, limit = float(self.held_tokens), self.limit_tokens()
        if self.capacity_tokens is not None and self._leases:
            peak = min(peak, self._looked_ahead(now).peak_with(NOTHING_MORE))
        held = round(self._prompt_part * self._prompts + self._outputs) + starting_tokens
        return KvUse(held, round(peak), limit)

    def limit_tokens(self) -> int:
        """Return the tokens that may be held in all; 0 if the capacity is not known."""
        if self.capacity_tokens is None:
            return 0
        unsure_part = self._unsure_tokens / self.held_tokens if self.held_tokens else 0.0
        return max(0, round(self._ceiling_tokens(self.capacity_tokens, unsure_part) - self._foreign_tokens))

    def needed_tokens(self, request: Request, use: KvUse, now: float) -> int:
        """Return the tokens that must be free beyond `use.peak` before this request can start."""
        needed = min(self.footprint_tokens(request), float(use.limit))
        if self._leases and self.capacity_tokens is not None:
            candidate = self._candidate(request, now)
            with_it = self._looked_ahead(now).peak_with(candidate, self._first_token_steps())
            needed = min(needed, max(0.0, with_it - use.peak))
        return ceil(needed)

    # --- events ---

    def add(self, lease: Lease) -> None:
        request = lease.request
        lease.footprint_tokens = round(self.footprint_tokens(request))
        if request.progress.output_tokens_reserved < request.output_tokens_max:  # the answer may outgrow its reserve
            lease.unsure_tokens = lease.footprint_tokens
        self._unsure_tokens += lease.unsure_tokens
        self.held_tokens += lease.footprint_tokens
        self._outputs += request.sequences * self._block_size / 2
        self.advance_forecast(lease.dispatched_s)
        self._note(lease, lease.dispatched_s)

    def started(self, lease: Lease, now: float) -> None:
        """Note that a request has its first token."""
        self._prompts += lease.request.prompt_tokens
        if not lease.request.streamed:
            self._unstreamed[lease.request.id] = lease
        self.advance_forecast(now)
        self._note(lease, now)

    def regrown(self, lease: Lease, now: float) -> None:
        """Count the output of a lease, and raise its size if the answer is about to outgrow its reserve."""
        request, growth, forecast = lease.request, lease.growth, self._forecast
        self._count_output(lease)
        if growth is not None:
            off_by = lease.output_each() - growth.done - (forecast.clock - growth.noted)
            if abs(off_by) > self._off_by():
                self._note(lease, now)
        if lease.output_tokens * OUTGROWN <= request.progress.output_tokens_reserved:
            return
        held = request.prompt_tokens + lease.output_tokens + lease.reserve_left() * request.sequences
        held += request.sequences * self._block_size / 2
        if held > lease.footprint_tokens:
            self.held_tokens += round(held) - lease.footprint_tokens
            lease.footprint_tokens = round(held)

    def remove(self, lease: Lease, now: float) -> None:
        request = lease.request
        self.held_tokens -= lease.footprint_tokens
        self._unsure_tokens -= lease.unsure_tokens
        self._outputs -= lease.counted_tokens + request.sequences * self._block_size / 2
        if lease.started_s is not None:
            self._prompts -= request.prompt_tokens
            self._unstreamed.pop(request.id, None)
            self._ended.append((now, request.prompt_tokens + lease.output_tokens))
        if lease.growth is not None:
            self._forecast.remove(lease.growth)
            lease.growth = None
        if not self._leases:
            self._outputs = 0.0
            self._look_anew(now)
        else:
            self.advance_forecast(now)

    def observe(
        self, gauges: Gauges, now: float, *, starting_tokens: int, elsewhere: Grant | None, preempted: bool
    ) -> None:
        """Correct the model by the engine's gauges.

        Args:
            elsewhere: use of the engine by other gateways.
            preempted: the engine has preempted requests that the ledger counts as running. Preempted requests hold no
                KV, so a gauge below the ledger says nothing about shared prefixes.
        """
        if gauges.block_size and gauges.block_size != self._block_size:
            sequences = sum([lease.request.sequences for lease in self._leases.values()])
            self._outputs += sequences * (gauges.block_size - self._block_size) / 2
            self._block_size = gauges.block_size
            self._look_anew(now)
        if gauges.kv_capacity_tokens:
            is_new, self.capacity_tokens = self.capacity_tokens is None, gauges.kv_capacity_tokens
            if is_new:
                self._look_anew(now)
        if gauges.kv_usage is not None and self.capacity_tokens is not None:
            held_then = sum([tokens for ended_s, tokens in self._ended if ended_s >= gauges.taken_s])
            used_tokens = gauges.kv_usage * self.capacity_tokens - held_then
            passed_s, self._compared_s = gauges.taken_s - self._compared_s, gauges.taken_s
            share = 0.0 if preempted else min(USUAL, PROMPT_PART_SHARE_PER_S * max(0.0, passed_s))
            self._correct(used_tokens, starting_tokens, elsewhere, share)
        self._ended.clear()

    # --- the model ---

    def _correct(
        self, used_tokens: float, starting_tokens: int, elsewhere: Grant | None, prompt_part_share: float
    ) -> None:
        """Compare the gauge with the ledger. A surplus belongs to other clients, a shortfall to shared prefixes.

        `prompt_part_share`: weight of this comparison in `_prompt_part`.
        """
        prompts, outputs, others = self._prompts, self._outputs, 0
        if elsewhere is not None:
            used_tokens -= elsewhere.kv_tokens_elsewhere
            others = elsewhere.sequences_elsewhere
        if not self._leases and not others:
            # An idle engine's gauge may be frozen at an old value, which must not keep requests away.
            self._foreign_tokens = 0.0
            return
        beyond = max(0.0, used_tokens - prompts - outputs - float(starting_tokens))
        self._foreign_tokens += 0.5 * (beyond - self._foreign_tokens)
        if prompts > 0:
            part = min(1.0, max(0.05, (used_tokens - outputs) / prompts))
            self._prompt_part += prompt_part_share * (part - self._prompt_part)

    def _count_output(self, lease: Lease) -> None:
        self._outputs += lease.output_tokens - lease.counted_tokens
        lease.counted_tokens = lease.output_tokens

    def _ceiling_tokens(self, capacity_tokens: float, unsure_part: float) -> float:
        """Return the tokens that may be held in all. `unsure_part`: fraction of tokens whose answers may take more.

        The rest of the capacity is kept for answers longer than reserved: nothing if all lengths are known.
        """
        return capacity_tokens * (1.0 - (1.0 - self.settings.kv_ceiling) * min(1.0, unsure_part))

    def _first_token_steps(self) -> float:
        """Return the engine's steps until a request dispatched now has its first token."""
        return self._pace.first_token_s / self._pace.token_s

    def advance_forecast(self, now: float) -> None:
        """Advance the forecast to `now`: replace outdated entries, or rebuild the forecast.

        Do nothing while the capacity is not known.
        """
        if self.capacity_tokens is None:
            return
        forecast = self._forecast
        is_off = abs(self._prompt_part - self._forecast_part) > OFF_BY_PART
        if is_off or now < self._forecast_s or forecast.clock > CLOCK_MAX:
            self._look_anew(now)
        else:
            self._looked_ahead(now)
            self._forecast_s, self._forecast_clock = now, forecast.clock
            for growth in forecast.due():
                self._note(self._leases[growth.name], now)

    def estimate(self, now: float) -> float:
        """Estimate the answers that are not streamed. Return the time at which this must be called again.

        inf while the capacity is not known.
        """
        for lease in self._unstreamed.values():
            lease.output_tokens = self._pace.output_tokens(lease, now)
            self._count_output(lease)
        self.advance_forecast(now)
        if self._unstreamed:
            return now
        forecast = self._forecast
        if self.capacity_tokens is None:
            return inf
        return now + (min(forecast.next_due(), CLOCK_MAX) - forecast.clock) * self._pace.token_s

    def _look_anew(self, now: float) -> None:
        """Rebuild the forecast from all leases."""
        if self._forecast.count:
            self._forecast = KvForecast()
        self._forecast.clock = 0.0
        self._forecast_s, self._forecast_clock, self._forecast_part = now, 0.0, self._prompt_part
        for lease in self._leases.values():
            lease.growth = None
            self._note(lease, now)

    def _looked_ahead(self, now: float) -> KvForecast:
        """Return the forecast with its clock set to now."""
        forecast = self._forecast
        forecast.clock = self._forecast_clock + (now - self._forecast_s) / self._pace.token_s
        return forecast

    def _note(self, lease: Lease, now: float) -> None:
        """Replace the lease's entry in the forecast by the lease's present growth."""
        if self.capacity_tokens is None:
            return
        forecast = self._forecast
        if lease.growth is not None:
            forecast.remove(lease.growth)
        wait_s = self._pace.first_token_s - (now - lease.dispatched_s) if lease.started_s is None else 0.0
        lease.growth = self._growth(lease, now, max(0.0, wait_s))
        forecast.add(lease.growth)

    def _candidate(self, request: Request, now: float) -> Growth:
        return self._growth(Lease(request, "", now), now, 0.0)

    def _growth(self, lease: Lease, now: float, wait_s: float) -> Growth:
        """Return the growth of a lease whose first token comes after `wait_s`."""
        request, each, token_s = lease.request, lease.request.sequences, self._pace.token_s
        done = lease.output_tokens / each
        prompt = request.prompt_tokens * (self._prompt_part if lease.started_s is not None else 1.0)
        held = prompt + lease.output_tokens + each * self._block_size / 2
        reserved = request.progress.output_tokens_reserved / each
        expected = request.progress.output_tokens_expected / each or reserved
        most, wait = request.output_tokens_max / each, wait_s / token_s
        ahead = remaining_output(expected, reserved, most, done)
        grows, spread = ahead[0] + wait, ahead[1]
        same = wait + stable_for(ahead, expected, reserved, most, done, self._off_by())
        starting_s = (now if lease.started_s is None else lease.started_s) - lease.dispatched_s
        age = done + starting_s / token_s
        return Growth(grows, held, each, done + grows + spread / 2, age, spread, same, request.id)

    def _off_by(self) -> float:
        """Return the tokens per sequence by which a request may differ from its forecast: more in a fuller engine."""
        return OFF_BY_TOKENS + OFF_BY_TOKENS_PER_LEASE * len(self._leases)
