"""Which running request is given back, so that other work need not wait?

Work that can wait (class batch) takes what is free. When other work finds no room, a request of it is stopped at its
engine and returns to the head of its flow. Its client has seen nothing of the answer, so nothing is lost but what the
engine has computed. The request that has received least is chosen. So little is wasted, and the others end.

What is given back is kept for the request that it is given back for: where that has a reservation, only at that engine;
where a node of the tree is full, only below that node.

Two bounds. At least the guaranteed part of the running sequences stays. And all that is wasted is at most that part of
what such work has received, and once the most of it that was expected to be computed at the same time.

While the second bound leaves nothing, no more of such work begins at an engine than ran there after the last give-back.
That room stays free for other work, whose next visit would else wait for a whole answer of class batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from policies.request import Request, ServiceTokens


class GivingBack:
    """The running requests of a pool that can wait, and what was wasted of them."""

    def __init__(self) -> None:
        self.wasted_tokens = 0
        self.given_back = 0
        """Requests, so far."""
        self._running: dict[str, tuple[Request, str, int]] = {}
        """By id, with the engine, and the tokens that are expected to be computed for it."""
        self._running_tokens = 0
        self._left: dict[str, int] = {}
        """Sequences that ran at each engine when the last one had been given back there, until more run."""
        self._asked: set[str] = set()
        """Requests to be stopped."""
        self._wasted: dict[str, tuple[int, int]] = {}
        """How often each request was given back that has not ended, and its tokens then."""
        self.received_tokens = 0
        """By work that can wait and has ended."""
        self.at_once_tokens = 0
        """The most that was expected to be computed for requests that ran at the same time."""
        self._none: set[tuple[tuple[str, ...], str]] = set()
        """Engines and nodes where none could be given back, and nothing has started or ended since."""

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[str]:
        """The ids of the requests that run, and can wait."""
        return iter(self._running)

    def dispatched(self, request: Request, engine: str) -> None:
        tokens = _expected_tokens(request)
        self._running[request.id] = request, engine, tokens
        self._running_tokens += tokens
        if engine in self._left and self._sequences_at(engine) > self._left[engine]:
            del self._left[engine]
        self.at_once_tokens = max(self.at_once_tokens, self._running_tokens)
        self._none.clear()

    def ended(self, request: Request, service: ServiceTokens, *, is_given_back: bool) -> None:
        """It runs no more. `is_given_back`: what it received is wasted."""
        tokens = service.prompt + service.output
        _, engine, expected_tokens = self._running.pop(request.id)
        self._running_tokens -= expected_tokens
        self._none.clear()
        self._asked.discard(request.id)
        times, before = self._wasted.pop(request.id, (0, 0))
        if is_given_back:
            self.given_back += 1
            self._left[engine] = self._sequences_at(engine)
            self.wasted_tokens += tokens
            self._wasted[request.id] = times + 1, before + tokens
        else:
            self.received_tokens += tokens
            # What the engine still had of its prompt was not computed again.
            self.wasted_tokens -= min(before, times * (service.cached or 0))

    def forget(self, request: Request) -> None:
        """It has left the queue, and will not run."""
        self._wasted.pop(request.id, None)

    def may_waste(self, request: Request, share: float) -> bool:
        """Could this request, which waits, be given back as late as at its end? `share`: as for `choose`."""
        tokens = _expected_tokens(request)
        at_once_tokens = max(self.at_once_tokens, self._running_tokens + tokens)
        return tokens <= share * self.received_tokens + at_once_tokens - self.wasted_tokens

    def is_kept_free(self, request: Request, engine: str) -> bool:
        """Was the room given back there that this request would take?"""
        left = self._left.get(engine)
        return left is not None and self._sequences_at(engine) + request.sequences > left

    def _sequences_at(self, engine: str) -> int:
        return sum([request.sequences for request, at, _ in self._running.values() if at == engine])

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
        """Which request is to be stopped at one of these engines? None: none.

        Args:
            sequences: that run in the pool, of all work.
            share: the part of the service that is guaranteed to work that can wait.
            received: what a request has received so far.
            has_started: has its first token been seen?
            node: of the tree, whose room is wanted; "": that of the engines.
            is_below: does a request run in that node?
        """
        place = tuple(engines), node
        if place in self._none:
            return None
        # One that was to be stopped and goes on has shown something to its client.
        running = {id: one for id, one in self._running.items() if id not in self._asked}
        of_it = sum([request.sequences for request, _, _ in running.values()])
        tokens = {id: service.prompt + service.output for id, service in ((id, received(id)) for id in running)}
        left = share * self.received_tokens + self.at_once_tokens - self.wasted_tokens
        found = [
            (tokens[id], self._wasted.get(id, (0, 0))[0], id)
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
        id = min(found)[2]
        self._asked.add(id)
        return id


def _expected_tokens(request: Request) -> int:
    return request.prompt_tokens + request.progress.output_tokens_reserved
