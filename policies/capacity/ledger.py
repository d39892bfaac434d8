"""What does each backend hold, and can it start one more request *now*? The KV ledger.

Once a request is inside the engine nobody can reorder it, so a request is dispatched only when the engine can start it:
a free sequence slot, free KV for it and for the growth of all that run, and room in the prefill of about one step.
What is dispatched but has no first token yet is a zero-lag stand-in for the engine's own queue; the scraped gauges
correct the model with bounded trust: a stale gauge ages out, an absent one is neither zero nor full, and a backend on
which nothing of ours runs may always be probed.
"""

from __future__ import annotations

from collections import deque
from math import ceil

from policies.capacity.gauges import CapacitySettings, Gauges
from policies.capacity.kv_forecast import Growing, KvForecast, still_to_come
from policies.capacity.lease import OUTGROWN, Lease
from policies.capacity.obstacle import Obstacle
from policies.capacity.slots import Slots
from policies.replicas.messages import Grant, Holding
from policies.request import Request

__all__ = ["BackendLedger"]

PREFILL_TOKENS_MIN = 2048
PREFILL_TOKENS_MAX = 262_144
KV_IS_SHORT = 0.7
"""Above this occupancy a waiting request may wait for KV, and says nothing of the number of slots."""
LOOK_AGAIN_S = 0.01
ENDED_MAX = 1024
SUSTAINED_S = 0.25
"""Requests keep coming if the last one came within this time."""
FORECAST_S_PER_LEASE = 0.0004
"""A forecast is used for so long for each request in it: a fuller engine changes less with each."""
NOTHING_MORE = Growing(0.0, 0.0, 0, 0.0, 0.0)
TRUST_S = 2.0
"""What was granted so long ago may be somebody else's by now."""
GRANT_MEMORY_S = 5.0
"""Over which the grants of a backend are averaged: what is gone on with when other gateways cannot be heard."""


class BackendLedger:
    """How full is this backend, by our own books and by its gauges?

    Sequences are counted one by one, KV in tokens; each sequence costs half a block for the block it has not filled.
    """

    def __init__(self, name: str, settings: CapacitySettings, *, max_num_seqs: int | None = None) -> None:
        self.name = name
        self.healthy = True
        self.leases: dict[str, Lease] = {}
        self._settings = settings
        self.grant: Grant | None = None
        """What of it is ours until the next exchange with other gateways; None: there are none."""
        self._usual_sequences = self._usual_tokens = 0.0
        self._left_over = 0.0
        self._granted_s = float("-inf")
        self._owned_until_s = float("inf")
        self._slots = Slots(
            max_num_seqs,
            waiting_target=settings.waiting_target,
            headroom=settings.headroom,
            most=settings.concurrency_max,
        )
        self._sequences = 0
        self._held_tokens = 0
        self._starting: dict[str, Lease] = {}
        self._starting_tokens = 0
        self._prefill_tokens = PREFILL_TOKENS_MIN
        self._prefill_limited = False
        self._gauges: Gauges | None = None
        self._starts_since_gauges = 0
        self._ends_since_gauges = 0
        self._kv_capacity_tokens: int | None = None
        self._block_size = 16
        self._foreign_tokens = 0.0
        self._ended: deque[tuple[float, float]] = deque(maxlen=ENDED_MAX)
        """When requests ended since the last scrape, and the tokens they held: an older page still counts them."""
        self._prompt_share = 1.0
        self._kv_limited = False
        self._lifetime_s = 1.0
        self._spare_tokens = 0.0
        self._forecast: KvForecast | None = None
        self._forecast_s = 0.0
        self._closed_until_s = 0.0
        self._backoff_s = 0.0
        self._first_token_s = 0.05
        self._token_s = 0.02

    def __repr__(self) -> str:
        kv = "?" if self._kv_capacity_tokens is None else f"{self.kv_fraction():.0%}"
        return (
            f"<BackendLedger {self.name}: {self._sequences}/{self._slots.count} sequences, "
            f"{len(self._starting)} starting, kv {kv}{'' if self.healthy else ', unhealthy'}>"
        )

    # --- may it start one more? ---

    def obstacle(
        self, request: Request, *, spare: bool, absent: bool, now: float, paced: bool = False
    ) -> Obstacle | None:
        """What keeps this request from being started now? None: nothing.

        Args:
            spare: its tenant is below its fair share, so it may use the headroom.
            absent: some tenant that comes and goes is not in the queue, so the headroom is kept for it.
            paced: more of its tenant waits than can start soon, so starts are spread to keep the KV evenly full.
        """
        grant = self.grant
        if not self.healthy or now < self._closed_until_s or (grant is not None and now > self._owned_until_s):
            return "closed"
        if not self.leases and grant is None:
            return None
        if self._held_back(now):
            return "waiting"
        keep = absent and not spare
        prefill_limit = self._prefill_tokens * (1.5 if spare and absent else 1.0)
        if grant is None:
            if not self._slots.has_room(self._sequences + request.sequences, keep_headroom=keep):
                return "slots"
        elif self._sequences + request.sequences > grant.sequences:
            # Where the others hold less than they were granted, slots stay empty for that, not for being on their way.
            self._slots.has_room(self._sequences + grant.sequences_elsewhere + request.sequences, keep_headroom=False)
            return "slots"
        else:
            prefill_limit /= grant.sharers
        # What an engine takes at once is known only where it says nothing of its queue and the configuration does.
        is_paced = self._gauges is not None or self._settings.concurrency_max is None
        if is_paced and self._starting and self._starting_tokens + request.prompt_tokens > prefill_limit:
            self._prefill_limited = True
            return "prefill"
        obstacle = self._kv_obstacle(request, now, keep_headroom=keep, paced=paced)
        if obstacle is not None:
            self._kv_limited = True
        return obstacle

    def kv_fraction(self) -> float:
        """Largest KV occupancy that what is dispatched is expected to reach, of the capacity (1.0 = full).

        Without a known capacity, sequences over slots: enough to compare backends of one pool.
        """
        sequences, tokens = self._elsewhere()
        if self._kv_capacity_tokens is None:
            return (self._sequences + sequences) / self._slots.count
        return (self._held_tokens + self._foreign_tokens + tokens) / self._kv_capacity_tokens

    def occupancy(self, head: Request | None, obstacle: Obstacle | None, now: float) -> tuple[float, str]:
        """How full is the KV cache, of its capacity, and how is that known? Measured, or else projected.

        `head`: what waits for `obstacle`. If that is KV, the cache is full: it would be at its ceiling with it. While
        starts are spread, and where only a grant is used up, it counts as full as it would be with it. A cache of which
        nothing is known is not called full: that an engine is busy does not say that its KV is short.
        """
        if not self.leases and not self._elsewhere()[0]:
            return 0.0, "KV cache, idle,"
        gauges = self._gauges
        if gauges is not None and gauges.kv_usage is not None and now < gauges.taken_s + self._settings.gauge_trust_s:
            level = gauges.kv_usage, "KV cache, measured,"
        elif self._kv_capacity_tokens is not None:
            level = self.kv_fraction(), "KV cache, projected,"
        else:
            return 0.0, "KV cache, unknown,"
        if head is None or self._kv_capacity_tokens is None or obstacle not in ("kv", "spread"):
            return level
        if obstacle == "kv" and self.grant is None:
            return max(level, (1.0, "KV cache, projected with the next request,"))
        with_head = self.kv_fraction() + self._footprint_tokens(head) / self._kv_capacity_tokens
        return max(level, (with_head, "KV cache, projected with the next request,"))

    def counts(self) -> tuple[int, int, int]:
        """(sequences dispatched, requests without a first token, slots believed)."""
        return self._sequences, len(self._starting), self._slots.count

    def opens_s(self, now: float) -> float | None:
        """When will time alone remove an obstacle? None: it will not."""
        times = []
        if now < self._closed_until_s:
            times.append(self._closed_until_s)
        if self._gauges is not None and self._held_back(now):
            times.append(self._gauges.taken_s + self._settings.gauge_trust_s)
        starting = self._starting.values() if self._has_gauges() else ()
        unseen = [lease.dispatched_s for lease in starting if not lease.request.streamed]
        if unseen:
            times.append(max(min(unseen) + self._first_token_s, now + 0.005))
        if self._kv_limited:
            # What runs makes room as it gets older, and nothing else says so.
            times.append(now + LOOK_AGAIN_S)
        return min(times, default=None)

    def _held_back(self, now: float) -> bool:
        """Does a gauge we still trust say that the engine has a queue of its own?"""
        gauges = self._gauges
        if gauges is None or gauges.waiting is None or now >= gauges.taken_s + self._settings.gauge_trust_s:
            return False
        # First come, first served: whoever has started since then has left the engine's queue, and whoever has ended
        # has let one start.
        left = max(self._starts_since_gauges, self._ends_since_gauges)
        return gauges.waiting - left > self._settings.waiting_target

    # --- with other gateways ---

    def holding(self, head: Request | None, waiting: int, now: float, *, spare: bool, absent: bool) -> Holding:
        """What is held of it, and what does the next one of those that wait here (`waiting` in all) want of it?"""
        capacity = self._kv_capacity_tokens
        peak, limit = float(self._held_tokens), 0.0
        if capacity is not None:
            limit = max(0.0, capacity * self._settings.kv_ceiling - self._foreign_tokens)
            if self.leases:
                peak = min(peak, self._looked_ahead(now).peak_with(NOTHING_MORE))
        prompts, outputs = self._held_now()
        most = self._slots.most(unkept=True)
        told = Holding(
            self.name,
            self._sequences,
            round(peak),
            round(self._prompt_share * prompts + outputs) + self._starting_tokens,
            most,
            round(limit),
        )
        if head is None or self.obstacle(head, spare=spare, absent=absent, now=now) not in (None, "slots", "kv"):
            return told
        needed = min(self._footprint_tokens(head), limit)
        if self.leases and capacity is not None:
            candidate = self._growing(Lease(head, self.name, now), now)
            delay = self._first_token_s / self._token_s
            needed = min(needed, max(0.0, self._looked_ahead(now).peak_with(candidate, delay) - peak))
        told = told._replace(waiting=waiting, next_sequences=head.sequences, next_kv_tokens=ceil(needed))
        if spare or not absent:
            return told
        return told._replace(
            left_sequences=most - self._slots.most(unkept=False), left_kv_tokens=round(self._kept_tokens(limit))
        )

    def granted(self, grant: Grant, now: float) -> None:
        """This is ours until the next exchange, or until it is too long ago."""
        self.grant = grant
        weight = min(1.0, max(0.0, (now - self._granted_s) / GRANT_MEMORY_S))
        self._usual_sequences += weight * (grant.sequences - self._usual_sequences)
        self._usual_tokens += weight * (grant.kv_tokens - self._usual_tokens)
        self._granted_s = now
        self._owned_until_s = now + TRUST_S

    def cut_off(self) -> None:
        """Other gateways cannot be heard: go on with what was ours of late, as they do.

        Where nothing ever was, all of it is, and what others do shows in its gauges only.
        """
        self._owned_until_s = float("inf")
        if self.grant is None or self._granted_s == float("-inf"):
            self.grant = None
            return
        # In whole sequences, of which some are too few for a share: what one look takes too little the next one adds.
        self._left_over += self._usual_sequences
        whole = int(self._left_over)
        self._left_over -= whole
        # Grants were given for whole requests. In a fixed one half a request stays unused: of few it is a larger part.
        half = self._held_tokens / self._sequences / 2 if self._sequences else 0.0
        self.grant = Grant(max(1, whole), round(self._usual_tokens + half), sharers=self.grant.sharers)

    def _elsewhere(self) -> tuple[int, int]:
        """Sequences and KV tokens that other gateways hold of it."""
        grant = self.grant
        return (0, 0) if grant is None else (grant.sequences_elsewhere, grant.kv_tokens_elsewhere)

    def _has_gauges(self) -> bool:
        return self._gauges is not None and self._gauges.waiting is not None

    # --- the KV model ---

    def _footprint_tokens(self, request: Request) -> float:
        """KV tokens of a request at its largest, half-filled blocks included."""
        return request.prompt_tokens + request.output_tokens_reserved + request.sequences * self._block_size / 2

    def _kv_obstacle(self, request: Request, now: float, *, keep_headroom: bool, paced: bool) -> Obstacle | None:
        capacity = self._kv_capacity_tokens
        if capacity is None:
            return None
        limit = whole = capacity * self._settings.kv_ceiling - self._foreign_tokens
        if self.grant is not None:
            if not self.leases and self.grant.kv_tokens >= int(limit):
                return None
            limit = min(limit, self.grant.kv_tokens)
            if limit <= 0:
                return "kv"
        elif keep_headroom:
            # Room for the next request of those below their share: as large as theirs have been.
            limit -= self._kept_tokens(capacity)
        held_tokens = self._held_tokens + self._footprint_tokens(request)
        fits_whole = held_tokens <= limit
        # Where every slot can be filled with such requests, slots are what is short, and there is nothing to spread.
        paced = paced and held_tokens * self._slots.count > whole * (self._sequences + request.sequences)
        if fits_whole and not paced:
            return None
        forecast = self._looked_ahead(now)
        candidate = self._growing(Lease(request, self.name, now), now)
        if paced and not forecast.is_level_with(candidate, limit):
            return "spread"
        delay = self._first_token_s / self._token_s
        if fits_whole or forecast.peak_with(candidate, delay, limit) <= limit:
            return None
        return "kv"

    def _kept_tokens(self, capacity_tokens: float) -> float:
        return min(self._spare_tokens, capacity_tokens * self._settings.headroom)

    def _looked_ahead(self, now: float) -> KvForecast:
        if self._forecast is None or not 0 <= now - self._forecast_s < FORECAST_S_PER_LEASE * len(self.leases):
            self._forecast = KvForecast([self._growing(lease, now) for lease in self.leases.values()])
            self._forecast_s = now
        return self._forecast

    def _growing(self, lease: Lease, now: float) -> Growing:
        request, done, each = lease.request, lease.output_each(), lease.request.sequences
        prompt = request.prompt_tokens * (self._prompt_share if lease.started_s is not None else 1.0)
        held = prompt + lease.output_tokens + each * self._block_size / 2
        grows, spread = still_to_come(
            request.output_tokens_expected / each,
            request.output_tokens_reserved / each,
            request.output_tokens_max / each,
            done,
        )
        starting_s = (now if lease.started_s is None else lease.started_s) - lease.dispatched_s
        return Growing(grows, held, each, done + grows + spread / 2, done + starting_s / self._token_s, spread)

    # --- what happens ---

    def add(self, lease: Lease, *, spare: bool = False) -> None:
        """A request was dispatched to it; `spare`: its tenant is below its fair share."""
        request = lease.request
        lease.held_tokens = round(self._footprint_tokens(request))
        if spare:
            self._spare_tokens += 0.2 * (lease.held_tokens - self._spare_tokens)
        self.leases[request.id] = lease
        self._starting[request.id] = lease
        self._starting_tokens += request.prompt_tokens
        self._sequences += request.sequences
        self._held_tokens += lease.held_tokens
        self._forecast = None

    def started(self, lease: Lease, now: float) -> None:
        """Its first token was seen: the engine had room for it."""
        if lease.started_s is not None:
            return
        lease.started_s = now
        self._starts_since_gauges += 1
        if self._starting.pop(lease.request.id, None) is not None:
            self._starting_tokens -= lease.request.prompt_tokens
        if lease.request.streamed:
            self._first_token_s += 0.1 * (now - lease.dispatched_s - self._first_token_s)
            self._slots.seen_running(self._running())
        self._backoff_s = 0.0
        self._forecast = None

    def _running(self) -> int:
        """Sequences that are known to have started."""
        return self._sequences - sum(lease.request.sequences for lease in self._starting.values())

    def regrown(self, lease: Lease) -> None:
        """Its output has gone beyond what it was counted with."""
        request = lease.request
        if lease.output_tokens * OUTGROWN <= request.output_tokens_reserved:
            return
        held = request.prompt_tokens + lease.output_tokens + lease.reserve_left() * request.sequences
        held += request.sequences * self._block_size / 2
        if held > lease.held_tokens:
            self._held_tokens += round(held) - lease.held_tokens
            lease.held_tokens = round(held)
            self._forecast = None

    def remove(self, lease: Lease, now: float) -> None:
        """The request is over, in whatever way."""
        request = lease.request
        del self.leases[request.id]
        if self._starting.pop(request.id, None) is not None:
            self._starting_tokens -= request.prompt_tokens
            self._starts_since_gauges += 1
        self._ends_since_gauges += 1
        self._sequences -= request.sequences
        self._held_tokens -= lease.held_tokens
        if not self.leases:
            self._slots.emptied()
        if lease.started_s is not None:
            self._ended.append((now, request.prompt_tokens + lease.output_tokens))
        self._forecast = None
        self._lifetime_s += 0.1 * (now - lease.dispatched_s - self._lifetime_s)
        if lease.started_s is not None and lease.output_each() >= 1:
            self._token_s += 0.1 * ((now - lease.started_s) / lease.output_each() - self._token_s)

    def answered(self, lease: Lease, now: float) -> None:
        """An answer came whole, with no sign of its start."""
        if lease.started_s is None and not self._has_gauges():
            sequences = self._sequences + self._elsewhere()[0]
            self._slots.answered((now - lease.dispatched_s) / max(1.0, lease.output_each()), sequences)

    def refused(self, now: float) -> None:
        """It refused or could not be reached: leave it alone for a moment that doubles each time in a row."""
        if now < self._closed_until_s:
            return  # of the same incident
        settings = self._settings
        self._backoff_s = min(max(settings.retry_backoff_s, 2 * self._backoff_s), settings.retry_backoff_s_max)
        self._closed_until_s = now + self._backoff_s

    def full(self) -> None:
        """It refused for being full: it has as many slots as it is running."""
        self._slots.refused(self._running())

    def observe(self, gauges: Gauges, now: float, *, arrived_s: float = float("-inf")) -> None:
        """It was scraped: correct the model. `arrived_s`: when the last request arrived."""
        gauges = gauges.share(self._settings.share)
        before, self._gauges = self._gauges, gauges
        self._starts_since_gauges = 0
        self._ends_since_gauges = 0
        self._kv_limited = False
        if gauges.block_size:
            self._block_size = gauges.block_size
        if gauges.kv_capacity_tokens:
            self._kv_capacity_tokens = gauges.kv_capacity_tokens
        if gauges.waiting is not None:
            self._infer_starts(gauges, now)
            self._adapt(gauges, before, now, is_sustained=now - arrived_s < SUSTAINED_S)
        if gauges.kv_usage is not None and self._kv_capacity_tokens is not None:
            held_then = sum(tokens for ended_s, tokens in self._ended if ended_s >= gauges.taken_s)
            self._correct_kv(gauges.kv_usage * self._kv_capacity_tokens - held_then)
        self._ended.clear()
        self._forecast = None

    def unseen(self, now: float) -> None:
        """Estimate the progress of answers that are not streamed, from the pace of those that are or that ended."""
        if self._has_gauges():
            for lease in list(self._starting.values()):
                if not lease.request.streamed and now - lease.dispatched_s >= self._first_token_s:
                    self.started(lease, now)
        for lease in self.leases.values():
            request = lease.request
            if not request.streamed and lease.started_s is not None:
                pace = (now - lease.started_s) / self._token_s
                lease.output_tokens = int(min(pace, request.output_tokens_reserved / request.sequences))
                lease.output_tokens *= request.sequences

    def _infer_starts(self, gauges: Gauges, now: float) -> None:
        """The engine is first come, first served: all but the last `waiting` of what it had received have started."""
        received = [
            lease
            for lease in self._starting.values()
            if not lease.request.streamed and lease.dispatched_s + self._first_token_s / 2 < gauges.taken_s
        ]
        for lease in received[: max(0, len(received) - (gauges.waiting or 0))]:
            self.started(lease, now)

    def _adapt(self, gauges: Gauges, before: Gauges | None, now: float, *, is_sustained: bool) -> None:
        """Learn the number of slots and the size of the prefill window from whether the engine holds a queue."""
        running, waiting = min(gauges.running or 0, self._sequences + self._elsewhere()[0]), gauges.waiting or 0
        if waiting > self._settings.waiting_target:
            self._prefill_tokens = max(PREFILL_TOKENS_MIN, self._prefill_tokens * 3 // 4)
            has_kv = gauges.kv_usage is None or gauges.kv_usage < KV_IS_SHORT
            if has_kv and before is not None and gauges.running == before.running == running > 0:
                self._slots.levels_off(running)
        elif not waiting:
            self._slots.seen_running(running)
            if self._prefill_limited:
                self._prefill_tokens = min(PREFILL_TOKENS_MAX, self._prefill_tokens * 5 // 4)
        self._slots.seen(running, waiting, now, lifetime_s=self._lifetime_s, is_sustained=is_sustained)
        self._prefill_limited = False

    def _correct_kv(self, used_tokens: float) -> None:
        """Compare the gauge with the books: what is more belongs to others, what is less is shared prefixes."""
        prompts, outputs = self._held_now()
        starting = float(self._starting_tokens)
        sequences, tokens = self._elsewhere()
        used_tokens -= tokens
        if not self.leases and not sequences:
            # An idle engine's gauge may be frozen at an old value: it is no reason to stay away.
            self._foreign_tokens = 0.0
            return
        self._foreign_tokens += 0.5 * (max(0.0, used_tokens - prompts - outputs - starting) - self._foreign_tokens)
        if prompts > 0:
            share = min(1.0, max(0.05, (used_tokens - outputs) / prompts))
            self._prompt_share += 0.05 * (share - self._prompt_share)

    def _held_now(self) -> tuple[float, float]:
        """Tokens of the prompts and of the outputs of what runs."""
        prompts = outputs = 0.0
        for lease in self.leases.values():
            outputs += lease.output_tokens + lease.request.sequences * self._block_size / 2
            if lease.started_s is not None:
                prompts += lease.request.prompt_tokens
        return prompts, outputs
