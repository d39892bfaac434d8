"""Which work is preempted, so that the work of another tenant need not wait? That of the node most over its part.

`over_part` ranks the tenant nodes for both kinds of preemption. Each kind frees what the other one cannot: an idle
context holds neither a slot nor KV that an engine would not evict by itself, and of batch work only its part of K
counts for others (`capacity.working_set`). So an excess of contexts parks idle interactions, and a request without room
at an engine or a full node preempts running batch requests, which are the business of `Preemption`.

Batch work takes what is free. When interactive work finds no room, a batch request is stopped at its engine and returns
to the head of its flow. Its client has seen nothing of the answer, so only the engine's computation is lost. Of the
tenant node that is most over its part, the request that has received least is preempted: that wastes little, and lets
the others end.

A request with a reservation at an engine causes preemptions only there. A request that waits for a full node of the
tree causes preemptions only below that node. Nothing is preempted where the request could not start after that, nor
while batch work goes first because it is owed service.

Two bounds, where g is the guaranteed share of batch work. At least g of the running sequences stay. And the wasted
tokens are at most g of the tokens that batch requests had received when they ended, plus the largest sum of tokens that
was expected of batch requests running together.

A batch request that could exceed the second bound does not start at an engine that would then run more batch sequences
than after the last preemption there. That room stays free for interactive work, which would otherwise wait for a
complete batch answer when it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from policies.request import Request, ServiceTokens, is_batch


def over_part(leaf: str, used: float, weight: float, *, is_batch_over: bool) -> tuple[bool, float]:
    """Return the rank of a tenant node by how far it is over its part. The work of the least rank is preempted first.

    Batch work goes first while it has more than its part in all (`is_batch_over`), then the most usage per weight.
    """
    return not (is_batch_over and is_batch(leaf)), -used / weight


class Preemption:
    """The choice of what to preempt: the running batch requests of a pool, and the tokens wasted by preemption."""

    def __init__(self) -> None:
        self.wasted_tokens = 0
        self.preempted = 0
        """Number of preemptions."""
        self.running: dict[str, tuple[Request, str, int]] = {}
        """Running batch requests by id, with the engine and the expected tokens."""
        self._running_tokens = 0
        """Sum of the expected tokens of the running batch requests."""
        self._left: dict[str, int] = {}
        """Batch sequences that still ran at each engine after the last preemption there. Dropped once more run."""
        self._asked: set[str] = set()
        """Ids of the requests that the gateway was told to preempt."""
        self._wasted: dict[str, tuple[int, int]] = {}
        """Preemptions and lost tokens of each request that has not ended."""
        self.received_tokens = 0
        """Tokens that batch requests had received when they ended."""
        self.at_once_tokens = 0
        """Largest `_running_tokens` so far."""
        self._none: set[tuple[tuple[str, ...], str]] = set()
        """Cached negative results of `choose`, by engines and node; cleared by any start or end of a batch request."""

    def dispatched(self, request: Request, engine: str) -> None:
        tokens = _expected_tokens(request)
        self.running[request.id] = request, engine, tokens
        self._running_tokens += tokens
        if engine in self._left and self._sequences_at(engine) > self._left[engine]:
            del self._left[engine]
        self.at_once_tokens = max(self.at_once_tokens, self._running_tokens)
        self._none.clear()

    def ended(self, request: Request, service: ServiceTokens, *, is_preempted: bool) -> None:
        """Record the end of a run. `is_preempted`: the request was preempted, so its tokens are wasted."""
        tokens = service.prompt + service.output
        _, engine, expected_tokens = self.running.pop(request.id)
        self._running_tokens -= expected_tokens
        self._none.clear()
        self._asked.discard(request.id)
        times, before = self._wasted.pop(request.id, (0, 0))
        if is_preempted:
            self.preempted += 1
            self._left[engine] = self._sequences_at(engine)
            self.wasted_tokens += tokens
            self._wasted[request.id] = times + 1, before + tokens
        else:
            self.received_tokens += tokens
            # The cached part of the prompt was not computed again.
            self.wasted_tokens -= min(before, times * (service.cached or 0))

    def forget(self, request: Request) -> None:
        """Forget a request that has left the queue and will not run."""
        self._wasted.pop(request.id, None)

    def may_waste(self, request: Request, share: float) -> bool:
        """Return whether the bound of waste allows a preemption of the request even just before its end.

        `share`: as for `choose`.
        """
        return _expected_tokens(request) <= self._left_tokens(share)

    def _left_tokens(self, share: float, coming_tokens: int = 0) -> float:
        """Return the tokens that may still be wasted, after a start of `coming_tokens` expected ones."""
        at_once_tokens = max(self.at_once_tokens, self._running_tokens + coming_tokens)
        return share * self.received_tokens + at_once_tokens - self.wasted_tokens

    def _stoppable(self) -> dict[str, tuple[Request, str, int]]:
        """Return the running requests that were not yet to be preempted. One of those runs on if its client has seen
        something of the answer, or if it is a background request.
        """
        return {id: one for id, one in self.running.items() if id not in self._asked}

    def may_stop_at_once(self, request: Request, sequences: int, share: float) -> bool:
        """Return whether the bounds would allow to preempt the request right after its start.

        `sequences`, `share`: as for `choose`, before the start.
        """
        of_it = sum([one.sequences for one, _, _ in self._stoppable().values()])
        is_spared = of_it < share * (sequences + request.sequences)
        return not is_spared and request.prompt_tokens <= self._left_tokens(share, _expected_tokens(request))

    def is_kept_free(self, request: Request, engine: str) -> bool:
        """Return whether the request would take room at this engine that a preemption has freed."""
        left = self._left.get(engine)
        return left is not None and self._sequences_at(engine) + request.sequences > left

    def _sequences_at(self, engine: str) -> int:
        return sum([request.sequences for request, at, _ in self.running.values() if at == engine])

    def choose(
        self,
        engines: Collection[str],
        sequences: int,
        share: float,
        received: Callable[[str], ServiceTokens],
        has_started: Callable[[str], bool],
        *,
        node: str = "",
        is_below: Callable[[Request], bool] | None = None,
    ) -> str | None:
        """Return the id of the request to preempt at one of these engines, or None.

        Args:
            sequences: running sequences of the pool, of both classes.
            share: guaranteed share of batch work.
            received: returns the tokens that a request has received.
            has_started: returns whether the first token of a request was seen.
            node: full node of the tree that needs room; "" if the engines need room.
            is_below: returns whether the end of a request makes room at that node.
        """
        place = tuple(engines), node
        if place in self._none:
            return None
        running = self._stoppable()
        used: dict[str, int] = {}
        for request, _, _ in running.values():
            used[request.flow.tenant] = used.get(request.flow.tenant, 0) + request.sequences
        of_it = sum(used.values())
        tokens = {id: service.prompt + service.output for id, service in ((id, received(id)) for id in running)}
        left = self._left_tokens(share)
        found = [
            request
            for id, (request, engine, _) in running.items()
            if engine in engines
            and (is_below is None or is_below(request))
            and tokens[id] <= left
            and of_it - request.sequences >= share * sequences
            and not (request.streamed and has_started(id))
        ]
        if not found:
            self._none.add(place)
            return None

        def rank(request: Request) -> tuple[tuple[bool, float], int, int, str]:
            tenant, id = request.flow.tenant, request.id
            over = over_part(tenant, used[tenant], request.weight, is_batch_over=True)
            return over, tokens[id], self._wasted.get(id, (0, 0))[0], id

        id = min(found, key=rank).id
        self._asked.add(id)
        return id


def _expected_tokens(request: Request) -> int:
    return request.prompt_tokens + request.progress.output_tokens_reserved
