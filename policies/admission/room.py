"""Which engines of a pool can start a request now? `schedule` asks this while it looks for the next request.

The obstacles of a request are checked in this order: a rival at another gateway (TURN), a full node of the tree
(CEILING), the working set (WORKING_SET), and then each engine by itself (`BackendLedger.obstacle`, `PrefillParts`).

Engines are asked as seldom as possible. `_answers` keeps the obstacles of blocked requests, and only engines that have
`changed` since are asked again. `_full` has the engines without a slot, and `_open` all others. Both are kept twice:
for requests that may wait inside an engine, and for all others. `_opens` has the times at which an obstacle may
disappear without an event: at that time its engine counts as changed. So after an event at one engine only that engine
is asked, and after a wake only the engines whose time has come.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import islice
from math import inf
from typing import Final, Protocol

from policies.admission.policy import Policy
from policies.capacity.lease import Lease
from policies.capacity.ledger import BackendLedger
from policies.capacity.obstacle import Blocked, Obstacle
from policies.capacity.pool_load import PoolLoad
from policies.capacity.working_set import WorkingSet
from policies.placements.prefill_parts import PrefillParts
from policies.placements.prefix_index import PrefixIndex, tokens_of_blocks
from policies.queue.backlog import Backlog
from policies.request import Request
from policies.tree.pool_tree import PoolTree
from policies.tree.preemption import Preemption

OF_ITS_SIZE: Final = frozenset({Obstacle.SLOTS, Obstacle.PREFILL, Obstacle.KV})
"""Obstacles at engines that may have room for a smaller request. So may an engine closed to one request alone."""
FREED: Final = frozenset({Obstacle.SLOTS, Obstacle.KV})
"""Obstacles that the preemption of another request removes."""
NOT_SOON: Final = frozenset({Obstacle.CLOSED, Obstacle.TURN, Obstacle.CEILING, Obstacle.WORKING_SET, None})
"""Obstacles whose end at an engine cannot be foreseen."""
ANSWERS_MAX: Final = 64
"""Requests whose answers are kept. An order asks repeatedly about few requests."""


class RemoteWaiters(Protocol):
    """Requests that wait at other gateways for the engines of this pool."""

    def is_preceded(self, request: Request, now: float) -> bool:
        """Return whether a request that waits at another gateway goes before this request."""


class DueTimes:
    """Timers, one per engine: the earliest time at which an obstacle may disappear without an event."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, str]] = []
        """Times and engines, the earliest first."""
        self._earliest_s: dict[str, float] = {}
        """Earliest time by engine. Later times of an engine in the heap are stale."""

    def note(self, engine: str, due_s: float) -> None:
        """Add a time; inf adds nothing."""
        if due_s < self._earliest_s.get(engine, inf):
            self._earliest_s[engine] = due_s
            heappush(self.heap, (due_s, engine))

    def pop(self, now: float) -> list[str]:
        """Remove and return the engines whose time has come."""
        engines: list[str] = []
        while self.heap and self.heap[0][0] <= now:
            due_s, engine = heappop(self.heap)
            if self._earliest_s.get(engine) == due_s:
                del self._earliest_s[engine]
                engines.append(engine)
        return engines


StartTraits = tuple[bool, bool, bool]
"""Traits of a request that decide where it may start: (alone, paced, spent). Alone: its tenant has no other request at
the pool (`PoolTree.alone_and_flooding`). Paced: its start must be spread. Spent: it is batch work that could exceed the
bound of waste (`tree.preemption`)."""
Answers = tuple[Blocked, StartTraits, int]
"""The answers about a blocked request: its obstacles, its traits, and the number of the last change they include."""


class PoolRoom:
    """The engines of one pool, within one event (`admission.scheduler.PoolEngines`).

    Call these methods only while an event is decided: `find_room` also records in the ledgers why a request had to
    wait.
    """

    def __init__(
        self, backends: Mapping[str, BackendLedger], working_set: WorkingSet, tree: PoolTree, preemption: Preemption
    ) -> None:
        self._tree: Final = tree
        self._preemption: Final = preemption
        self.rivals: RemoteWaiters | None = None
        """Requests at other gateways; None if this gateway is the only one."""
        self.prefixes: PrefixIndex | None = None
        """Prompts that the engines are expected to have cached; None if the policy does not read them."""
        self._backends: Final = backends
        self._working_set: Final = working_set
        self.prefill_parts: Final = PrefillParts(backends)
        self._answers: dict[str, Answers] = {}
        """Answers by request."""
        self._opens = DueTimes()
        """Times at which an obstacle may disappear without an event."""
        self._changes = 0
        self._changed: dict[str, int] = {}
        """Number of the last change of each engine that changed since the last reset, the latest last."""
        self.load = PoolLoad(backends)
        self._full: tuple[dict[str, None], dict[str, None]] = {}, {}
        """Engines without a slot, which need not be asked until they change. At False: for requests that are not alone
        (`StartTraits`). At True: for those that are."""
        self._open: tuple[dict[str, BackendLedger], dict[str, BackendLedger]] = {}, {}
        """Engines that are not in `_full`, at False and at True."""
        self._backlog: Backlog | None = None
        """Backlog of the order, if it has one."""
        self._policy: Policy
        self._reserved = ("", "")
        """Id of the request with a reservation, and the engine that is reserved for it."""
        self._now = 0.0
        self.asked = ""
        """Id of the request that was asked about last. If a decision fails half way, this request is the cause."""

    def changed(self, engine: str | None = None) -> None:
        """Note an event at this engine, or with None at any engine: blocked requests may have room there now."""
        self._changes += 1
        if engine is None:
            self._answers.clear()
            self._changed.clear()
            self.load = PoolLoad(self._backends)
            self._opens = DueTimes()
            self._full = {}, {}
            self._open = dict(self._backends), dict(self._backends)
            return
        if engine in self._changed:
            del self._changed[engine]
        self._changed[engine] = self._changes
        self.load.changed(engine)
        for full, is_open in zip(self._full, self._open, strict=True):
            if engine in full:
                del full[engine]
                is_open[engine] = self._backends[engine]

    def update_capacity(self, engine: str) -> None:
        """Set the capacity of the tree to the sum over the engines in service, after a change at this engine.

        The sum is unknown if one capacity is unknown: shares of the other engines alone would be too small.
        """
        self.load.changed(engine)
        self._tree.sized(*self.load.sum_sizes())

    def follow(self, policy: Policy) -> None:
        """Read prefixes, waiting starts and backlog from a new policy."""
        self.prefixes = policy.prefixes
        self._working_set.first_start = policy.first_start if policy.order.admits_wholes else None
        self._working_set.may_pass_starts = policy.may_pass_starts
        self._policy = policy
        self._backlog = backlog = policy.order.backlog
        self._working_set.batch_share = backlog.batch_share if backlog is not None else 0.0
        has_parts = backlog is not None and policy.order.has_prefill_parts
        self.prefill_parts.window_tokens = backlog.tenants.window if backlog is not None and has_parts else inf

    def at(self, now: float) -> None:
        """Set the time: expire contexts, and note a change at the engines whose time has come."""
        self._now = now
        self._working_set.expire(now)
        if self._opens.heap:
            for engine in self._opens.pop(now):
                self.changed(engine)

    def opens_s(self) -> float:
        """Return the time at which a blocked request may have room without an event; inf if never."""
        return min(self._opens.heap[0][0] if self._opens.heap else inf, self._working_set.expires_s())

    def find_room(self, request: Request, but: str | None = None) -> Sequence[BackendLedger] | Blocked:
        if (blocked := self._blocked_anywhere(request, self._backends)) is not None:
            return blocked
        traits, known = self._start_traits(request), self._answers.get(request.id)
        full: dict[str, None] = {}
        ledgers: Mapping[str, BackendLedger] = self._backends
        if not request.engine and request.progress.closed is None:  # otherwise a full engine may also be closed to it
            full, ledgers = self._full[traits[0]], self._open[traits[0]]
        if known is not None and known[1] == traits:
            return self._ask_changed(request, known, full, but)
        return self._ask_ledgers(request, traits, None, full, list(ledgers.values()), but)

    def _ask_changed(
        self, request: Request, known: Answers, full: dict[str, None], but: str | None
    ) -> Sequence[BackendLedger] | Blocked:
        """Ask only the engines that have changed since the known answers, and may have a slot."""
        blocked, traits, changes = known
        if self._changes == changes:
            return blocked
        ledgers: list[BackendLedger] = []
        for name in reversed(self._changed):
            if self._changed[name] <= changes:
                break
            if name in full:
                blocked.set(name, Obstacle.SLOTS)
            else:
                ledgers.append(self._backends[name])
        return self._ask_ledgers(request, traits, blocked, full, ledgers, but)

    def _ask_ledgers(
        self, request: Request, traits: StartTraits, blocked: Blocked | None, full: dict[str, None],
        ledgers: list[BackendLedger], but: str | None,
    ) -> Sequence[BackendLedger] | Blocked:  # fmt: skip
        """Return those of these engines that have room, or `Blocked` with their obstacles added to the known ones.

        If no obstacles are known, the engines in `full` have no slot.
        """
        free: list[BackendLedger] = []
        found: dict[str, Obstacle | None] = {}
        for ledger in ledgers:
            is_small = self._fits_elsewhere(request, ledger)
            obstacle = found[ledger.name] = Obstacle.KV if is_small else self._obstacle(request, ledger, traits)
            if obstacle is None:
                free.append(ledger)
            elif obstacle is Obstacle.SLOTS and _is_full(ledger, is_alone=traits[0]):
                self._full[traits[0]][ledger.name] = None
                self._open[traits[0]].pop(ledger.name, None)
        if free:
            self._answers.pop(request.id, None)
            if len(free) > 1:  # a queue inside an engine only hides latency, so engines with a free slot are preferred
                free = [ledger for ledger in free if _has_slot(ledger, request)] or free
            if but is not None:
                free = [ledger for ledger in free if ledger.name != but]
            if free:
                return free
        if blocked is None:
            blocked = Blocked.everywhere(request, full, Obstacle.SLOTS)
        for name, why in found.items():
            blocked.set(name, why)
        if None in found.values():
            return blocked
        if len(self._answers) >= ANSWERS_MAX:
            self._answers.clear()
        self._answers[request.id] = blocked, traits, self._changes
        return blocked

    def _fits_elsewhere(self, request: Request, ledger: BackendLedger) -> bool:
        """Return whether the prompt exceeds the whole KV cache of this engine, but not that of another in service."""
        tokens = request.prompt_tokens
        return tokens > (ledger.kv.capacity_tokens or inf) and any(
            [other.healthy and (other.kv.capacity_tokens or 0) >= tokens for other in self._backends.values()]
        )

    def reserve(self, blocked: Blocked) -> str | None:
        engine, closed = blocked.request.engine, blocked.request.progress.closed or {}
        if engine and Obstacle.CLOSED in blocked.obstacles.values():
            return engine  # no other engine can serve the request, so the others are free for other requests
        if len(self._backends) < 2 or blocked.nearest() in NOT_SOON:
            return None
        # An engine that is full for all but lone requests counts as open, because another request may be alone.
        found = (name for name in self._open[True] if blocked.obstacles.get(name) in OF_ITS_SIZE or name in closed)
        waits = [*islice(found, 2)]
        if not waits:
            return None
        request_id, engine = self._reserved
        if request_id != blocked.request.id or blocked.obstacles.get(engine) in NOT_SOON:
            soon = self._least_full(blocked)
            if soon is None:
                return None
            engine = soon
            self._reserved = blocked.request.id, engine
        return engine if waits != [engine] else None

    def _least_full(self, blocked: Blocked) -> str | None:
        """Return the engine that is expected to have room first for the request, the least full one; or None.

        Batch work does not count where its preemption would make room for the request.
        """
        request, ranks = blocked.request, self.load.ranks()
        if self._preemption.running and not request.is_batch:
            freed = {name: self._freed(request, name, batch) for name, batch in self._batch_leases().items()}
            ranks = sorted([(fraction - freed.get(name, 0.0), name) for fraction, name in ranks])
        for _, name in ranks:
            is_soon = blocked.obstacles.get(name) not in NOT_SOON
            if is_soon and not self._fits_elsewhere(request, self._backends[name]):
                return name
        return None

    def _freed(self, request: Request, engine: str, batch: Sequence[Lease]) -> float:
        """Return the part of the engine's KV that preempting `batch` frees, 0.0 if the request still lacks room."""
        capacity = self._backends[engine].kv.capacity_tokens
        if capacity is None or not self._fits_without(request, engine, batch):
            return 0.0
        return sum([lease.footprint_tokens for lease in batch]) / capacity

    def _fits_without(self, request: Request, engine: str, batch: Sequence[Lease]) -> bool:
        """Return whether an interactive request could start at the engine if this batch work were preempted."""
        cached_tokens, (is_alone, _) = self._cached_tokens(request, engine), self._tree.alone_and_flooding(request)
        return not request.is_batch and self._backends[engine].fits_without(
            request, batch, is_alone=is_alone, cached_tokens=cached_tokens
        )

    def _batch_leases(self) -> dict[str, list[Lease]]:
        """Return the running batch requests by engine, except for answers of which a client has seen something."""
        found: dict[str, list[Lease]] = {}
        for id, (_, engine, _) in self._preemption.running.items():
            lease = self._backends[engine].leases[id]
            if lease.started_s is None or not lease.request.streamed:
                found.setdefault(engine, []).append(lease)
        return found

    def preempts_at(self, blocked: Blocked, *others: tuple[Request, int]) -> list[str]:
        """Return the engines where batch work may be preempted for the next in order: its reserved one, if any.

        A request at a ceiling needs an engine, too. If one has room, each end below the node lets the request start.
        """
        request, (request_id, engine) = blocked.request, self._reserved
        found: Mapping[str, Obstacle | None] = blocked.obstacles
        if blocked.nearest() is Obstacle.CEILING:
            if not self._fits_below(request, *others):
                return []
            traits = self._start_traits(request)
            found = {name: self._obstacle(request, self._backends[name], traits) for name in blocked.obstacles}
            if None in found.values():
                return list(self._backends)
        elif blocked.nearest() not in FREED:
            return []
        elif request_id == request.id and engine in self._backends:
            found = {engine: found.get(engine)}
        freed = [each for each in self._batch_leases().items() if found.get(each[0]) in FREED]
        return [name for name, batch in freed if self._fits_without(request, name, batch)]

    def blocked_at(self, request: Request, engine: str) -> Blocked | None:
        if (blocked := self._blocked_anywhere(request, (engine,))) is not None:
            return blocked
        obstacle = self._obstacle(request, self._backends[engine], self._start_traits(request))
        return None if obstacle is None else Blocked.everywhere(request, (engine,), obstacle)

    def _blocked_anywhere(self, request: Request, engines: Collection[str]) -> Blocked | None:
        """Return the obstacle that keeps the request from each of these engines, whatever room they have, or None."""
        self.asked = request.id
        why, ceiling = Obstacle.TURN, ""
        if self.rivals is None or not self.rivals.is_preceded(request, self._now):
            if self._tree.limited and (ceiling := self._full_for(request, engines)):
                why = Obstacle.CEILING
            elif self._working_set.has_room(request):
                return None
            else:
                why = Obstacle.WORKING_SET
        blocked = Blocked.everywhere(request, engines, why)
        blocked.ceiling = ceiling
        return blocked

    def _full_for(self, request: Request, engines: Collection[str]) -> str:
        """Return the name of the full node that keeps a request from starting; "" if there is none.

        A node is full for batch work while batch work at one of these engines is preempted for interactive work that
        sleeps there: the request would be preempted at once.
        """
        full = self._tree.full_node_for(request)
        if full is not None:
            return full.name
        if request.is_batch and self._backlog is not None:
            sequences = sum([ledger.sequences for ledger in self._backends.values()])
            if self._preemption.may_stop_at_once(request, sequences, self._backlog.batch_share):
                return self._node_that_preempts(request, engines)
        return ""

    def _node_that_preempts(self, request: Request, engines: Collection[str]) -> str:
        """Return the node where interactive work sleeps for which this batch request would be preempted at once, or "".

        The tree counts the request as running meanwhile.
        """
        own, node = (request, request.prompt_tokens), ""
        self._tree.run(request, request.sequences, request.prompt_tokens)
        for blocked in self.asleep():
            if self._tree.makes_room(request, blocked.request) and set(engines) & {*self.preempts_at(blocked, own)}:
                node = blocked.ceiling
                break
        self._tree.run(request, -request.sequences, -request.prompt_tokens)
        return node

    def asleep(self) -> Iterator[Blocked]:
        """Iterate over the interactive requests that sleep at full nodes, each with the engines of its queue.

        In the queue of one engine, a request for which the engine has no room holds up all behind it.
        """
        for engine, order in self._policy.queues().items():
            backlog = order.backlog
            for request, node in backlog.sleeping_heads(has_one_engine=engine != "") if backlog is not None else ():
                blocked = Blocked.everywhere(request, (engine,) if engine else self._backends, Obstacle.CEILING)
                blocked.ceiling = node
                yield blocked
                if engine and not self._may_start_without_batch(request, engine):
                    break

    def _may_start_without_batch(self, request: Request, engine: str) -> bool:
        """Return whether the engine has room for an interactive request, now or once its batch work is preempted."""
        obstacle = self._obstacle(request, self._backends[engine], self._start_traits(request))
        return obstacle is None or self._fits_without(request, engine, self._batch_leases().get(engine, ()))

    def _fits_below(self, request: Request, *others: tuple[Request, int]) -> bool:
        """Return whether the full node has room for a request once batch work below and these others are preempted."""
        held = [(lease.request, lease.footprint_tokens) for each in self._batch_leases().values() for lease in each]
        return self._tree.fits_without(request, [*held, *others])

    def _start_traits(self, request: Request) -> StartTraits:
        """Return the present traits of a queued request."""
        is_alone, is_flooding = self._tree.alone_and_flooding(request)
        # Batch work fills the gaps, and its room can be preempted: interactive starts need not be spread beside it.
        is_paced = is_flooding and (request.is_batch or not self._preemption.running)
        is_spent, backlog = False, self._backlog
        if request.is_batch and backlog is not None and not backlog.owes_batch:
            is_spent = not self._preemption.may_waste(request, backlog.batch_share)
        return is_alone, is_paced, is_spent

    def _obstacle(self, request: Request, ledger: BackendLedger, traits: StartTraits) -> Obstacle | None:
        (is_alone, paced, is_spent), now = traits, self._now
        if is_spent and ledger.leases and self._preemption.is_kept_free(request, ledger.name):
            return Obstacle.TURN
        obstacle = ledger.obstacle(request, now, is_alone=is_alone, paced=paced)
        if obstacle is Obstacle.PREFILL and (cached_tokens := self._cached_tokens(request, ledger.name)):
            obstacle = ledger.obstacle(request, now, is_alone=is_alone, paced=paced, cached_tokens=cached_tokens)
        if obstacle is not None:
            ledger.held_back(request, obstacle)
            self._opens.note(ledger.name, ledger.opens_s(request, obstacle, now))
        elif self.prefill_parts.window_tokens < inf:
            until_s = self.prefill_parts.held_until_s(request, ledger, now)
            if until_s is not None:
                obstacle = Obstacle.PREFILL_PART
                self._opens.note(ledger.name, until_s)
        return obstacle

    def _cached_tokens(self, request: Request, engine: str) -> int:
        if self.prefixes is None:
            return 0
        return tokens_of_blocks(self.prefixes.depth(request.prefix, engine), request.prefix, request.prompt_tokens)

    def may_begin(self, request: Request) -> bool:
        return self._working_set.has_room(request)

    def waits_inside(self, engine: str) -> bool:
        """Return whether the engine has more sequences than its known number of slots."""
        ledger = self._backends[engine]
        known = ledger.slots.known()
        return known is not None and ledger.sequences_in_all() > known

    def may_wake(self, request: Request, engine: str | None) -> bool:
        if self._full_for(request, self._backends if engine is None else (engine,)):
            return False
        found = self.find_room(request) if engine is None else self.blocked_at(request, engine)
        return not isinstance(found, Blocked) or found.nearest() is not Obstacle.PREFILL_PART

    def loads(self) -> dict[str, int]:
        return {name: len(ledger.leases) for name, ledger in self._backends.items() if ledger.healthy}


def _is_full(ledger: BackendLedger, *, is_alone: bool) -> bool:
    """Return whether the engine has no slot for any request that is, or is not, alone (`StartTraits`)."""
    return ledger.allowance is None and ledger.slots_taken >= ledger.slots.most(is_alone=is_alone)


def _has_slot(ledger: BackendLedger, request: Request) -> bool:
    """Return whether a slot is free for this request, or the slots are unknown. An idle engine has room for any."""
    sequences = ledger.sequences_in_all()
    return not sequences or ledger.slots.known() is None or sequences + request.sequences <= ledger.slots.count
