"""Which starts wait, because the interactions under way fill the KV cache?

Agents spend much of their time in tools. Meanwhile their contexts lie idle in the prefix cache, and are needed again in
seconds. If more interactions are open than the cache can hold, each call that returns finds its context evicted and
computes all of it anew. So an interaction is admitted as a whole: its start waits until the cache has room for it.

K is the number of KV tokens that the pool keeps, R its prefill rate. The working set is the sum of the contexts that
count. An interaction's context counts while a call of the interaction is under way, and for K / R seconds after that,
the time to compute the whole cache anew. Holding an idle context pays if, and only if, its next call comes within that
time (the five-minute rule, Gray and Putzolu 1987). `policies.contexts` says how many tokens a context counts with, and
how much the cache keeps.

A start waits if the set with its context would exceed K, unless its tenant stays within its part of K by weight. While
a start waits, a tenant that is more than the window of the order ahead of the start's tenant begins nothing: otherwise
small starts would always take the room that a large start waits for. But a start that alone exceeds its tenant's part
holds up no other tenant. A start whose tenant holds nothing enters without room after a wait of K / R seconds: one such
start in each K / R seconds, and parking makes the room. A start that no call is likely to follow holds nothing beyond
its run, and needs no room. A start of a kind of interaction with few calls so far needs no room while the contexts of
that kind are within a tenth of K.

Of batch work only its guaranteed part counts for others: the rest can be preempted. Where nothing counts, nothing
waits. The order says who goes next, the set only whether. A call inside an interaction that counts never waits for the
set.

Bound: while a tenant has a start waiting, a tenant that is more than the window ahead of it receives only what its own
interactions under way still take. With I, the most that the interactions in K take until they end, service per weight
differs by at most 2 (U + L + I) + Q over an interval in which both have starts waiting (U and L as in `orders.vtc`;
Q: the service of single questions that went meanwhile, one at a time).

If the set exceeds K by a tenth, because contexts grew, interactions are parked. The newest idle interaction of the
tenant that holds most for its weight no longer counts, and its next call waits like a start, once. No interaction is
parked if calls inside interactions may wait no longer than starts: a call would then be rejected in the middle.

As long as K is not known, nothing waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from math import inf
from statistics import fmean
from typing import Final

from policies.capacity.kv_forecast import TOLERATED
from policies.capacity.ledger import BackendLedger
from policies.capacity.output_lengths import APPS_MAX
from policies.capacity.pace import SEEN_MIN, USUAL_S
from policies.contexts import InteractionKind, InteractionKinds, KeptShare
from policies.request import NO_CLAIM, Interaction, Request, ServiceTokens
from policies.tree.node import BATCH_CONTEXTS, CONTEXTS
from policies.tree.pool_tree import PoolTree
from policies.tree.preemption import over_part

MEASURED_EVERY_S: Final = 0.5
"""Least time between two measurements of K and R, and of whether the set has outgrown K."""
HOLD_S_MAX: Final = 60.0
"""Largest K / R, against wrong rates. While no engine has shown its rate, `USUAL_S` stands for K / R."""
OVER: Final = 1.0 + TOLERATED
"""Multiple of K above which contexts are parked. The estimate of a start is a mean, so the set varies about K as the
forecast varies about a full cache."""


class Context:
    """An entry of the working set: the KV tokens, calls and engine of one interaction, or of a request outside any.

    An interaction refers to its contexts. A context does not refer back, because an idle context may outlive the
    interaction.
    """

    __slots__ = (
        "began_s", "calls", "engine", "held_tokens", "idle_s", "kind", "prompt_tokens", "returns", "set", "tenant",
        "to_find_tokens", "tokens",
    )  # fmt: skip

    def __init__(self, set: WorkingSet, tenant: str, kind: InteractionKind, began_s: float) -> None:
        self.set: WorkingSet | None = set
        """The set that has the context; None once it is forgotten."""
        self.kind = kind
        self.returns = kind.return_rate.value > 0.0
        self.tenant = tenant
        self.tokens = 0
        """Tokens that the context counts with; 0 if it is parked or not worth holding."""
        self.held_tokens = self.prompt_tokens = 0
        """Tokens of the prompt and answer of the last call, and of the prompt alone."""
        self.engine = ""
        """Engine of the last call."""
        self.to_find_tokens = 0
        """Tokens that the call that has returned should find in the cache; 0 if no such call is under way."""
        self.calls = 0
        """Number of calls under way."""
        self.began_s = self.idle_s = began_s
        """Times at which the interaction began, and at which the last call under way ended."""


class WorkingSet:
    """The contexts of the interactions that are under way in one pool. The contexts' tokens are usage of the pool's
    tree."""

    def __init__(self, tree: PoolTree) -> None:
        self.capacity_tokens = 0
        """K: the KV tokens that the pool keeps, or this gateway's part of them; 0 if not known."""
        self.hold_s = 0.0
        """K / R: seconds for which an idle context counts; 0 if K is not known, so nothing waits."""
        self.first_start: Callable[[], Request | None] | None = None
        """Function for the next start that waits for the set: parked interactions first, then the oldest start of the
        tenant that has received least, batch last. None if the order lets no start wait."""
        self._tree: Final = tree
        self.kinds: Final = InteractionKinds(APPS_MAX)
        """Learned sizes of contexts, by kind of interaction."""
        self.kept: Final = KeptShare()
        self.may_pass_starts: Callable[[str], bool] = lambda tenant: True
        """Function that tells whether a tenant is within the window above each tenant with waiting starts."""
        self.batch_share = 0.0
        """Part of K that batch work has beside other work."""
        self._now = self._entered_s = -inf
        """Time of the last `expire`, and of the last start that entered without room."""
        self.passing = ""
        """Id of the single question that runs although its tenant is ahead while starts wait; one at a time."""
        self._count = 0
        """Number of contexts."""
        self._idle: OrderedDict[Context, None] = OrderedDict()
        """Contexts that count though no call is under way, the longest idle first."""
        self._parked: OrderedDict[Context, None] = OrderedDict()
        """Contexts that no longer count, and whose next call waits like a start."""
        self._returning = 0
        """Number of contexts of kinds whose calls return. If there are none, nothing is worth holding."""
        self._measured_s = -inf

    def __len__(self) -> int:
        """Return the number of contexts that are not parked."""
        return self._count - len(self._parked)

    def __repr__(self) -> str:
        return f"<WorkingSet: {self.tokens:.0f} of {self.capacity_tokens} tokens in {len(self)} contexts>"

    # --- questions ---

    def has_room(self, request: Request) -> bool:
        """Return whether this request may start, as far as the set is concerned."""
        if request.progress.context is not None or self.first_start is None or not self._holds:
            return True
        return self._fits(request) or self._turn_s(request) <= self._now

    @property
    def _holds(self) -> bool:
        """Return whether starts may have to wait: K is known, and contexts are worth holding or count elsewhere."""
        elsewhere = self._tree.pool.elsewhere
        return self.hold_s > 0.0 and (self._returning > 0 or elsewhere[CONTEXTS] + elsewhere[BATCH_CONTEXTS] > 0.0)

    def _fits(self, request: Request) -> bool:
        """Return whether the set has room for the request, or its tenant stays within its part."""
        available = self.available(request)
        if available == inf:
            return True
        needs_room = request.is_batch or self.is_followed(request)
        if not self.may_pass_starts(request.flow.tenant) and self._first_is_within_its_part():
            return not needs_room and not self.passing
        return not needs_room or self._expected_tokens(request) <= available

    def available(self, request: Request) -> float:
        """Return the tokens by which the contexts of the request's tenant may still grow; inf if no context counts yet.

        A tenant has what is free of K, or what is left of its part of K if that is more. Batch work has one part in
        all. Only that part counts for others, because the rest can be preempted.
        """
        pool = self._tree.pool.used
        batch, batch_part = pool[BATCH_CONTEXTS], self.batch_share * self.capacity_tokens
        if request.is_batch:
            counted, used, part = pool[CONTEXTS] + batch, batch, batch_part
        else:
            counted, used = pool[CONTEXTS] + min(batch, batch_part), self._tree.context_tokens(request.flow.tenant)
            part = self._part(request)
        return max(self.capacity_tokens - counted, part - used) if counted else inf

    def _first_is_within_its_part(self) -> bool:
        """Return whether the start that goes first is no larger than its tenant's part, or waits at another gateway."""
        first = self.first_start() if self.first_start is not None else None
        return first is None or self._expected_tokens(first) <= self._part(first)

    def _part(self, request: Request) -> float:
        """Return the tokens of K that the request's tenant has by weight."""
        return self.capacity_tokens * self._tree.part(request)

    def is_followed(self, request: Request) -> bool:
        """Return whether another call is likely to follow, so that the context is held beyond the run.

        A kind with few calls so far counts as followed if its contexts exceed the tolerated excess over K (`OVER`).
        """
        if request.claim is NO_CLAIM:
            return False
        kind = self.kinds.get(request)
        if kind.return_rate.seen >= SEEN_MIN:
            return kind.return_rate.value >= 0.5
        return kind.held_tokens + request.prompt_tokens > (OVER - 1.0) * self.capacity_tokens

    def _turn_s(self, request: Request) -> float:
        """Return when a start whose tenant holds nothing may enter without room: after a wait of `hold_s`; else inf.

        Each `hold_s`, one such start enters.
        """
        wait = request.progress.wait
        if wait is None or request.is_batch or self._tree.context_tokens(request.flow.tenant):
            return inf
        return max(wait.since_s, self._entered_s) + self.hold_s

    @property
    def tokens(self) -> float:
        """Sum of the contexts that count here."""
        return self._tree.pool.here(CONTEXTS) + self._tree.pool.here(BATCH_CONTEXTS)

    @property
    def tokens_in_all(self) -> float:
        """Sum of the contexts that count, here and at other gateways."""
        used = self._tree.pool.used
        return used[CONTEXTS] + used[BATCH_CONTEXTS]

    def tenants(self) -> dict[str, int]:
        """Return the tokens that count here, by tenant node."""
        return self._tree.context_tokens_here()

    def number_of(self, leaf: str) -> float:
        """Return the estimated number of contexts of a tenant node that count here: its part of their tokens."""
        return len(self) * self._tree.context_tokens(leaf) / max(1.0, self.tokens_in_all)

    def expires_s(self) -> float:
        """Return the time at which a start may have room without an event; inf if it never does."""
        if not self.hold_s:
            return inf
        first = self.first_start() if self.first_start is not None else None
        turn_s = inf if first is None else self._turn_s(first)
        idle = next(iter(self._idle), None)
        idle_s = inf if idle is None else idle.idle_s + self.hold_s
        return min(idle_s, turn_s if turn_s > self._now else inf)

    # --- events ---

    def queued(self, request: Request, now: float) -> None:
        """Count a queued call inside an interaction. A call of a parked interaction waits like a start instead.

        Of a start, note whether it is a single question: its place among sleeping starts must not change later.
        """
        progress = request.progress
        if self._returning and not progress.inside:
            progress.is_followed = self.is_followed(request)
        if progress.context is None and progress.inside:
            context = self._context_of(progress.interaction)
            if context is not None and not context.calls:
                context.kind.return_rate.learn(1.0)
            progress.parked = context is not None and context in self._parked
            if context is not None and progress.parked:
                self._forget(context)
            else:
                self._add(request, context)

    def dispatched(self, request: Request, now: float) -> None:
        """Count a dispatched start."""
        if request.progress.context is None:
            if self._holds:
                if not self._fits(request):
                    self._entered_s = now
                elif not (request.progress.is_followed or self.may_pass_starts(request.flow.tenant)):
                    self.passing = request.id
            self._add(request, self._context_of(request.progress.interaction))

    def left(self, request: Request, service: ServiceTokens, now: float) -> None:
        """Note that the request ended, or left the queue.

        The interaction counts for `hold_s` more, unless the client said that the interaction is over.
        """
        progress = request.progress
        if self.passing == request.id:
            self.passing = ""
        context, progress.context = progress.context, None
        if context is None:
            return
        context.calls -= 1
        if service.prompt:
            self._learn_cached(request, context, service)
            context.held_tokens, context.prompt_tokens = service.prompt + service.output, service.prompt
            context.engine = progress.engine
        if context.calls:
            return
        interaction = progress.interaction
        if interaction is None or not interaction.tokens or (request.claim.ends and interaction.over):
            self._forget(context)
        else:
            self._resize(context, context.kind.idle_tokens(context.held_tokens))
            context.idle_s = now
            self._idle[context] = None

    def expire(self, now: float) -> None:
        """Forget the contexts that have been idle for `hold_s`. O(1) on average."""
        self._now = now
        for idle in (self._idle, self._parked):
            while (context := next(iter(idle), None)) is not None and now >= context.idle_s + self.hold_s:
                context.kind.return_rate.learn(0.0)
                self._forget(context)

    def measure(self, engines: Iterable[BackendLedger], now: float, *, parks: bool = True) -> None:
        """Read K and R of these engines, at most once per `MEASURED_EVERY_S`.

        `parks`: park interactions if the set has grown beyond K.
        """
        if now < self._measured_s + MEASURED_EVERY_S:
            return
        self._measured_s = now
        self.expire(now)
        sizes = [(one.kv.capacity_tokens or 0, one.prefill_rate.tokens_per_s) for one in engines if one.healthy]
        is_known, share = all([tokens for tokens, _ in sizes]), self.kept.share
        times_s = [tokens / rate for tokens, rate in sizes if rate]
        kept_tokens = round(share * sum([tokens for tokens, _ in sizes])) if is_known else 0
        self.capacity_tokens = kept_tokens // self._tree.sharers
        hold_s = share * fmean(times_s) if times_s else USUAL_S
        self.hold_s = min(HOLD_S_MAX, hold_s) if self.capacity_tokens else 0.0
        if parks and self.hold_s and self.tokens:
            # Each gateway parks its part of the excess.
            self._park(OVER * self.capacity_tokens * self.tokens / self.tokens_in_all)

    # --- the table ---

    def _expected_tokens(self, request: Request) -> int:
        kind = self.kinds.get(request)
        if request.claim is NO_CLAIM:  # no call follows
            return kind.own_tokens(request.prompt_tokens)
        return kind.running_tokens(request.prompt_tokens)

    def _context_of(self, interaction: Interaction | None) -> Context | None:
        """Return the context of an interaction in this set."""
        if interaction is not None:
            contexts: tuple[Context, ...] = interaction.contexts
            for context in contexts:
                if context.set is self:
                    return context
        return None

    def _add(self, request: Request, context: Context | None) -> None:
        """Count a call that is under way in the context of its interaction, or in a new context."""
        progress = request.progress
        interaction = progress.interaction
        if context is None:
            began_s = interaction.began_s if interaction is not None else 0.0
            context = Context(self, request.flow.tenant, self.kinds.get_or_create(request), began_s)
            self._count += 1
            self._returning += context.returns
            if interaction is not None:
                others = interaction.contexts and [one for one in interaction.contexts if one.set is not None]
                interaction.contexts = (context, *others)
        elif not context.calls:
            context.to_find_tokens = context.prompt_tokens if context.tokens else 0
            self._leave(context)
        progress.context, progress.parked = context, False
        context.calls += 1
        expected = self._expected_tokens(request)
        self._resize(context, max(context.tokens, expected) if context.calls > 1 else expected)
        if request.claim is not NO_CLAIM:
            context.kind.prompt_tokens.learn(request.prompt_tokens)

    def _learn_cached(self, request: Request, context: Context, service: ServiceTokens) -> None:
        """Learn from the tokens that the engine of an ended call had cached, if the engine reported them."""
        to_find_tokens, context.to_find_tokens = context.to_find_tokens, 0
        if not request.progress.inside:
            context.kind.shared_tokens.learn(service.cached or request.progress.cached_tokens)
        elif to_find_tokens and service.cached is not None and request.progress.engine == context.engine:
            binds = self.first_start is not None and self.first_start() is not None
            self.kept.returned(to_find_tokens, service.cached, binds=binds)

    def _resize(self, context: Context, tokens: int) -> None:
        more = tokens - context.tokens
        if more:
            self._tree.hold(context.tenant, more)
            context.kind.held_tokens += more
            context.tokens = tokens

    def _leave(self, context: Context) -> None:
        """Take a context out of the idle and the parked ones."""
        self._idle.pop(context, None)
        self._parked.pop(context, None)

    def _forget(self, context: Context) -> None:
        self._leave(context)
        context.set = None
        self._count -= 1
        self._returning -= context.returns
        self._resize(context, 0)

    def _park(self, most_tokens: float) -> None:
        """Park idle interactions until the set is within `most_tokens`: the newest of the tenant that holds most.

        Batch goes first while it counts with more than its part.
        """
        if self.tokens <= most_tokens:
            return
        idle: dict[str, list[Context]] = {}
        per_part = self._tree.context_tokens_per_part
        for context in self._idle:
            if context.tokens:
                idle.setdefault(context.tenant, []).append(context)
        for own in idle.values():
            own.sort(key=lambda context: context.began_s)
        while idle and self.tokens > most_tokens:
            is_batch_over = self._tree.pool.used[BATCH_CONTEXTS] > self.batch_share * self.capacity_tokens
            most = min(idle, key=lambda leaf: over_part(leaf, per_part(leaf), 1.0, is_batch_over=is_batch_over))
            context = idle[most].pop()
            if not idle[most]:
                del idle[most]
            self._resize(context, 0)
            del self._idle[context]
            self._parked[context] = None
