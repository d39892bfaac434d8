"""What does each engine hold, and can it start one more request *now*?

A request inside the engine cannot be reordered. So a request is dispatched only when the engine can start it. That
takes a free sequence slot, free KV for the request and for the growth of all running requests, and room in the prefill
of about one step.

Dispatched requests without a first token model the engine's own queue, without delay. The engine's gauges correct this
model with bounded trust. A stale gauge is ignored after a while, and an absent one counts neither as zero nor as full.
An engine that no other gateway uses, and that has none of our requests, may always be tried.

`obstacle` and the other questions change nothing. A wait is an event of its own (`held_back`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any, Final

from policies.capacity.gauges import CapacitySettings, EngineFacts, Gauges, Grant
from policies.capacity.kv_cache import KvCache
from policies.capacity.lease import Lease
from policies.capacity.obstacle import Obstacle
from policies.capacity.pace import Pace, PrefillLead, PrefillPace, PrefillRate, PrefillWindow, UsualLoad
from policies.capacity.slots import Slots
from policies.request import Request

KV_IS_SHORT: Final = 0.7
"""KV occupancy above which a request in the engine's queue may wait for KV, and says nothing about slots."""
LOOK_AGAIN_S: Final = 0.01
"""Seconds until the KV cache is checked again: running requests make room as they age, and no event announces it."""
SUSTAINED_S: Final = 0.25
"""Requests keep coming if the last one arrived within this time."""


class BackendLedger:
    """The load of one engine, by the requests dispatched to it and by its gauges."""

    def __init__(self, name: str, settings: CapacitySettings, *, max_num_seqs: int | None = None) -> None:
        self.name = name
        self.healthy = True
        self.leases: dict[str, Lease] = {}
        self.allowance: Grant | None = None
        """The gateway's part of the engine; None if no other gateway uses the engine."""
        self.allowed_until_s = float("inf")
        """End of the allowance, after which this gateway starts nothing here."""
        self.granted: Any = None
        """Average of the allowances; None before the first. Written by `replicas.grants`."""
        self.pace = Pace()
        self.usual = UsualLoad()
        self.prefill = PrefillWindow()
        self.prefill_rate = PrefillRate()
        self.prefill_pace = PrefillPace()
        self.prefill_leads: dict[str, PrefillLead] = {}
        """Prefill that tenant nodes have begun and not paid for, as of `leads_paid_s`."""
        self.leads_paid_s = -inf
        self.kv = KvCache(settings, self.leases, self.pace)
        self.slots = Slots(max_num_seqs, settings)
        self.sequences = 0
        """Dispatched sequences."""
        self.slots_taken = 0
        """Slots that the dispatched requests take (`Slots.count_for`)."""
        self._streaming = 0
        """Sequences whose first token was seen and that have not ended."""
        self.starting: dict[str, Lease] = {}
        """Dispatched requests without a first token."""
        self._starting_sequences = 0
        self.starting_tokens = 0
        self.prefill_tokens = 0
        """Starting tokens that are not expected to be cached, so the engine must compute them."""
        self.adapters: dict[str, int] = {}
        """Number of dispatched requests by adapter."""
        self._settings = settings
        self._gauges: Gauges | None = None
        self.preemptions_total: int | None = None
        """Preemptions inside the engine, by its own count; None if it reports none."""
        self._preempted = 0
        """Sequences that the engine has preempted and that wait inside it, as of its last step."""
        self._starts_since_gauges = 0
        self._ends_since_gauges = 0
        self._closed_until_s = 0.0
        self._backoff_s = 0.0

    def __repr__(self) -> str:
        kv = "?" if self.kv.capacity_tokens is None else f"{self.kv_fraction():.0%}"
        return (
            f"<BackendLedger {self.name}: {self.sequences}/{self.slots.count} sequences, "
            f"{len(self.starting)} starting, kv {kv}{'' if self.healthy else ', unhealthy'}>"
        )

    # --- questions ---

    def obstacle(
        self, request: Request, now: float, *, is_alone: bool = False, paced: bool = False, cached_tokens: int = 0
    ) -> Obstacle | None:
        """Return the obstacle that keeps this request from starting now; None if there is none.

        Args:
            is_alone: the tenant has no other request, so this one may wait inside the engine.
            paced: more of the tenant waits than can start soon, so starts are spread to keep the KV evenly full.
            cached_tokens: part of the prompt that the engine need not compute.
        """
        allowance = self.allowance
        if not self.healthy or now < self._closed_until_s or (allowance is not None and now > self.allowed_until_s):
            return Obstacle.CLOSED
        if (request.engine or request.progress.closed is not None) and now < self.closed_until_s(request):
            return Obstacle.CLOSED
        if not self.leases and allowance is None:
            return None
        gauges = self._gauges
        if gauges is not None and gauges.waiting and self._queues(gauges, now):
            return Obstacle.WAITING
        if not self._has_slots(request, is_alone=is_alone):
            return Obstacle.SLOTS
        if not self._may_prefill(request.prompt_tokens - cached_tokens):
            return Obstacle.PREFILL
        if self.kv.capacity_tokens is None:
            return None
        slots, sequences = self.slots.count if paced else None, self.sequences + request.sequences
        return self.kv.obstacle(request, now, allowance=allowance, slots=slots, sequences=sequences)

    def fits_without(
        self, request: Request, ended: Sequence[Lease], *, is_alone: bool = False, cached_tokens: int = 0
    ) -> bool:
        """Return whether the engine could start a request that has no slot or no KV if these leases had ended."""
        slots, sequences = sum([one.slots for one in ended]), sum([one.request.sequences for one in ended])
        if not self._has_slots(request, is_alone=is_alone, freed_slots=slots, freed_sequences=sequences):
            return False
        prefill_tokens = sum([one.prefill_tokens for one in ended if one.request.id in self.starting])
        if not self._may_prefill(request.prompt_tokens - cached_tokens, freed_tokens=prefill_tokens):
            return False
        if (capacity := self.kv.capacity_tokens) is None:
            return True
        left = self.kv_fraction() * capacity - sum([one.footprint_tokens for one in ended])
        return left + self.kv.footprint_tokens(request) <= self.kv.limit_tokens()

    def _has_slots(self, request: Request, *, is_alone: bool, freed_slots: int = 0, freed_sequences: int = 0) -> bool:
        if (allowance := self.allowance) is not None:
            return self.sequences - freed_sequences + request.sequences <= allowance.sequences
        # Some sequences of a request may wait inside, so that slots are used which become free one by one.
        slots = max(1, self.slots.count_for(request.sequences) - self._settings.waiting_target)
        return self.slots_taken - freed_slots + slots <= self.slots.most(is_alone=is_alone)

    def _may_prefill(self, tokens: int, *, freed_tokens: int = 0) -> bool:
        """Return whether the prefill window has room for these tokens.

        An engine without gauges does not show its queue. If its concurrency is configured, that is the only known
        limit, and the prefill window does not apply.
        """
        begun = self.prefill_tokens - freed_tokens
        if not begun or (self._gauges is None and self._settings.max_concurrency is not None):
            return True
        return begun + tokens <= self.prefill.tokens / (1 if self.allowance is None else self.allowance.sharers)

    def kv_fraction(self) -> float:
        """Return the largest KV occupancy that the dispatched requests are expected to reach (1.0 = full).

        If the capacity is not known: sequences divided by slots, which is enough to compare the engines of one pool.
        """
        if self.kv.capacity_tokens is None:
            return self.sequences_in_all() / self.slots.count
        return self.kv.fraction(0.0 if self.allowance is None else self.allowance.kv_tokens_elsewhere)

    def sequences_in_all(self) -> int:
        """Return the sequences that this gateway and others have dispatched to the engine."""
        return self.sequences + (0 if self.allowance is None else self.allowance.sequences_elsewhere)

    def occupancy(self, head: Request | None, obstacle: Obstacle | None, now: float) -> tuple[float, str]:
        """Return the KV occupancy (1.0 = full) and its source: measured if possible, otherwise projected.

        `head` is the request that waits for `obstacle`. If that is KV, the cache counts as full, because this request
        would take it to its ceiling. If starts are spread, or only an allowance is used up, the cache counts as full as
        it would be with this request. A cache without any gauge is not called full: a busy engine need not be short of
        KV.
        """
        if not self.leases and (self.allowance is None or not self.allowance.sequences_elsewhere):
            return 0.0, "KV cache, idle,"
        gauges, capacity = self._gauges, self.kv.capacity_tokens
        if gauges is not None and gauges.kv_usage is not None and now < gauges.taken_s + self._settings.gauge_trust_s:
            level = gauges.kv_usage, "KV cache, measured,"
        elif capacity is not None:
            level = self.kv_fraction(), "KV cache, projected,"
        else:
            return 0.0, "KV cache, unknown,"
        if head is None or capacity is None or obstacle not in (Obstacle.KV, Obstacle.SPREAD):
            return level
        fills = obstacle is Obstacle.KV and self.allowance is None
        with_head = 1.0 if fills else self.kv_fraction() + self.kv.footprint_tokens(head) / capacity
        return max(level, (with_head, "KV cache, projected with the next request,"))

    def closed_until_s(self, request: Request) -> float:
        """Return the time until which the engine is left alone, or closed to this request; inf without an end."""
        if request.engine not in ("", self.name):
            return inf
        closed = request.progress.closed
        return self._closed_until_s if closed is None else max(self._closed_until_s, closed.get(self.name, 0.0))

    def opens_s(self, request: Request, obstacle: Obstacle, now: float) -> float:
        """Return the time at which this obstacle may disappear without an event; inf if it never does."""
        if obstacle is Obstacle.CLOSED:
            until_s = self.closed_until_s(request)
            return until_s if now < until_s else inf
        if obstacle is Obstacle.WAITING:
            assert self._gauges is not None
            return self._gauges.taken_s + self._settings.gauge_trust_s
        if obstacle is Obstacle.PREFILL:
            # The first of these to start makes room.
            starting = self.starting.values() if self.has_gauges() else ()
            unseen = [lease.dispatched_s for lease in starting if not lease.request.streamed]
            return max(min(unseen) + self.pace.first_token_s, now + LOOK_AGAIN_S) if unseen else inf
        if obstacle is Obstacle.SLOTS:
            return inf
        # Running requests make room as they age. No event announces it.
        return now + LOOK_AGAIN_S

    def has_gauges(self) -> bool:
        """Return whether the engine reports how many requests wait inside it."""
        return self._gauges is not None and self._gauges.waiting is not None

    def _queues(self, gauges: Gauges, now: float) -> bool:
        """Return whether gauges that are still trusted show preempted requests or a queue above the target."""
        if now >= gauges.taken_s + self._settings.gauge_trust_s:
            return False
        if self._preempted:
            # The engine restarts preempted requests first, and a request that took their room would preempt more.
            return True
        # The engine serves in order of arrival. Each request that started since the gauge has left the engine's queue,
        # and each that ended has let another one start.
        left = max(self._starts_since_gauges, self._ends_since_gauges)
        return gauges.waiting_for_room - left > self._settings.waiting_target

    # --- events ---

    def set(self, settings: CapacitySettings, *, max_num_seqs: int | None) -> None:
        """Replace the settings by which capacity is judged. Running requests and learned values stay."""
        self._settings = self.kv.settings = settings
        self.slots.set(max_num_seqs, settings)

    def held_back(self, request: Request, obstacle: Obstacle) -> None:
        """Learn from the obstacle that kept the head of a queue from starting here."""
        if obstacle is Obstacle.SLOTS:
            # Slots that other gateways are granted and do not use stay empty, but not because requests are on their
            # way.
            if self.allowance is None or self.sequences_in_all() + request.sequences > self.slots.most(is_alone=True):
                self.slots.was_short = True
        elif obstacle is Obstacle.PREFILL:
            self.prefill.held_back = True

    def add(self, lease: Lease) -> None:
        """Count a dispatched request."""
        request = lease.request
        self.usual.ran(self.sequences_in_all(), lease.dispatched_s)
        self.kv.add(lease)
        self.leases[request.id] = lease
        self.starting[request.id] = lease
        self._starting_sequences += request.sequences
        self.starting_tokens += request.prompt_tokens
        lease.is_first = not self.prefill_tokens
        # Without gauges nothing shows the start of an answer in one piece, so such a prompt would fill the window until
        # its answer ends.
        if request.streamed or self._gauges is not None:
            lease.prefill_tokens = request.prompt_tokens - request.progress.cached_tokens
        self.prefill_tokens += lease.prefill_tokens
        self.sequences += request.sequences
        lease.slots = self.slots.count_for(request.sequences)
        self.slots_taken += lease.slots
        if request.adapter:
            self.adapters[request.adapter] = self.adapters.get(request.adapter, 0) + 1

    def started(self, lease: Lease, now: float) -> None:
        """Note that a request has its first token, seen or inferred: the engine had room for it."""
        lease.started_s = now
        self.prefill_pace.started_tokens += lease.prefill_tokens
        self._drop_starting(lease)
        if lease.request.streamed:
            self.pace.started(lease, now)
            self._streaming += lease.request.sequences
            self.slots.raise_to(self.sequences - self._starting_sequences)
            if lease.passed and lease.was_taken():
                self._closed_until_s = 0.0
        self._backoff_s = 0.0
        self.kv.started(lease, now)

    def remove(self, lease: Lease, now: float) -> None:
        """Take out a request that ended, in whatever way."""
        request = lease.request
        self.usual.ran(self.sequences_in_all(), now)
        del self.leases[request.id]
        if lease.started_s is None:
            self._drop_starting(lease)
        elif request.streamed:
            self._streaming -= request.sequences
        self._ends_since_gauges += 1
        self.sequences -= request.sequences
        self.slots_taken -= lease.slots
        if request.adapter:
            self.adapters[request.adapter] -= 1
            if not self.adapters[request.adapter]:
                del self.adapters[request.adapter]
        if not self.leases:
            self.slots.emptied()
        self.kv.remove(lease, now)
        self.pace.ended(lease, now)

    def _drop_starting(self, lease: Lease) -> None:
        """Take a request out of those without a first token."""
        self._starts_since_gauges += 1
        del self.starting[lease.request.id]
        self._starting_sequences -= lease.request.sequences
        self.starting_tokens -= lease.request.prompt_tokens
        self.prefill_tokens -= lease.prefill_tokens

    def came_whole(self, lease: Lease, now: float) -> None:
        """Learn from a complete answer that was not streamed."""
        if lease.passed and lease.was_taken():
            self._closed_until_s = self._backoff_s = 0.0
        if lease.started_s is None and not self.has_gauges():
            seconds_per_token = (now - lease.dispatched_s) / max(1.0, lease.output_each())
            self.slots.learn_without_gauges(seconds_per_token, self.sequences_in_all())

    def back_off(self, now: float, *, full_for: Lease | None = None) -> None:
        """Leave the engine alone after a refusal or a failed connection, twice as long after each failure.

        `full_for`: the request that was refused for lack of room; None if the engine could not be reached. After such a
        refusal the slots are set to the sequences that run. But an engine that takes a request sent later was not full.
        """
        if now >= self._closed_until_s:  # otherwise the failure belongs to the incident before
            settings = self._settings
            self._backoff_s = min(max(settings.retry_backoff_s, 2 * self._backoff_s), settings.retry_backoff_s_max)
            self._closed_until_s = now + self._backoff_s
        if full_for is None:
            return
        after = None
        for lease in reversed(self.leases.values()):
            if lease is full_for:
                break
            after = lease
        if after is not None:
            after.passed += [*full_for.passed, full_for.request]
            if after.started_s is not None and after.was_taken():
                self._closed_until_s = self._backoff_s = 0.0
        elif running := self.sequences - self._starting_sequences:
            self.slots.learn_from_refusal(running)

    def observe(self, gauges: Gauges, now: float, *, arrived_s: float = float("-inf")) -> None:
        """Correct the model by the engine's gauges, from a page of metrics or after a step.

        The requests and the KV usage of gauges older than `gauge_trust_s` are ignored. `arrived_s`: when the last
        request came.
        """
        self.usual.ran(self.sequences_in_all(), now)
        before, self._gauges = self._gauges, gauges
        if now > gauges.taken_s + self._settings.gauge_trust_s:
            gauges = replace(gauges, running=None, waiting=None, kv_usage=None)
        if gauges.preemptions_total is not None:
            self.preemptions_total = gauges.preemptions_total
        self._starts_since_gauges = 0
        self._ends_since_gauges = 0
        if gauges.max_num_seqs is not None:
            self.slots.set_reported(gauges.max_num_seqs)
        if gauges.is_step:
            self.prefill_rate.saw_step(gauges)
            self.prefill.set_reported(gauges.scheduled_tokens_max)
        self.prefill_pace.looked(now, starting=len(self.starting), streaming=self._streaming)
        if gauges.waiting is not None:
            self._infer_starts(gauges, now)
            self._adapt(gauges, before, now, is_sustained=now - arrived_s < SUSTAINED_S)
            self._preempted = max(0, gauges.waiting - self._starting_sequences) if gauges.is_step else 0
        tokens, preempted = self.starting_tokens, self._preempted > 0
        self.kv.observe(gauges, now, starting_tokens=tokens, elsewhere=self.allowance, preempted=preempted)

    def recognised(self, facts: EngineFacts) -> None:
        """Set the slots of an engine that comes into service, and forget the gauges of another kind of engine."""
        self.slots.set_reported(facts.slots)
        if facts.is_other_kind:
            self._gauges = self.kv.capacity_tokens = None

    def estimate(self, now: float) -> float:
        """Estimate the answers that are not streamed: each counts as started after the usual time to a first token.

        Return the time at which this must be called again if nothing happens here before.
        """
        due_s = self.kv.estimate(now)
        if self.starting and self.has_gauges():
            for lease in list(self.starting.values()):
                if not lease.request.streamed:
                    due_s = min(due_s, lease.dispatched_s + self.pace.first_token_s)
                    if now - lease.dispatched_s >= self.pace.first_token_s:
                        self.started(lease, now)
        return due_s

    def _infer_starts(self, gauges: Gauges, now: float) -> None:
        """Mark unstreamed requests as started, except the last `waiting`: the engine serves in order of arrival."""
        unseen = [lease for lease in self.starting.values() if not lease.request.streamed]
        received = [one for one in unseen if one.dispatched_s + self.pace.first_token_s / 2 < gauges.taken_s]
        for lease in received[: max(0, len(received) - (gauges.waiting or 0))]:
            self.started(lease, now)

    def _adapt(self, gauges: Gauges, before: Gauges | None, now: float, *, is_sustained: bool) -> None:
        """Learn the number of slots and the size of the prefill window from whether the engine has a queue.

        The engine runs at least the sequences that are seen to stream, whatever its gauge says.
        """
        running = max(self._streaming, min(gauges.running or 0, self.sequences_in_all()))
        waiting = gauges.waiting_for_room
        queues = waiting > self._settings.waiting_target
        if queues:
            has_kv = gauges.kv_usage is None or gauges.kv_usage < KV_IS_SHORT
            if has_kv and before is not None and gauges.running == before.running == running > 0:
                self.slots.lower_to(running)
        elif not waiting:
            self.slots.raise_to(running)
        self.prefill.observed(engine_queues=queues, engine_waits=waiting > 0)
        period_s = max(self._settings.gauge_trust_s, self.pace.lifetime_s)
        self.slots.adjust_in_flight(running, waiting, now, period_s=period_s, is_sustained=is_sustained)
