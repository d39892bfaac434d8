"""A small world in virtual time around one admission engine. No token is simulated, so minutes take a second."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

from policies.admission.decisions import Decision, Dispatch, Failure, Preempt
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.capacity.gauges import Gauges
from policies.queue.bounds import QueueLimits
from policies.queue.expected_wait import interval_s
from policies.request import NO_CLAIM, Claim, Flow, Request, ServiceTokens, of_batch
from policies.tree.terms import GroupSettings, Tree, TreePlace

LONG = QueueLimits(queue_wait_s_max=1e5, queue_wait_s_max_inside=1e6, queue_requests_max=10**6)

Size = int | Callable[[random.Random], int]


class Asked:
    """One request, and what became of it."""

    def __init__(self, request: Request, output: int, then: Callable[[Asked], None] | None) -> None:
        self.request = request
        self.output = output
        self.then = then
        self.came_s = request.arrived_s
        self.went_s: float | None = None
        self.first_s: float | None = None
        self.outcome = ""
        self.engine = ""
        self.retry_s = 0.0
        self.tries = 0
        self.preempted = 0

    @property
    def tenant(self) -> str:
        return self.request.flow.tenant

    def waited_s(self, now: float) -> float:
        return (self.went_s if self.went_s is not None else now) - self.came_s


class World:
    """Engines by name, each with its slots and KV tokens."""

    def __init__(
        self,
        policy: str = "fairserve",
        engines: Mapping[str, tuple[int | None, int]] | None = None,
        *,
        tree: Tree | None = None,
        limits: QueueLimits = LONG,
        placement: str | None = None,
        prefill_per_s: float = 0.0,
        seed: int = 1,
        **settings: Any,
    ) -> None:
        """`prefill_per_s`: the rate that the working set is to take for measured; 0: none."""
        self.rng = random.Random(seed)
        self.engine = AdmissionEngine(named_policy(policy, placement=placement, **settings), limits=limits, tree=tree)
        self.engines = dict(engines or {"e": (16, 120_000)})
        self.weights = {name: place.settings.weight for name, place in tree.tenants.items()} if tree else {}
        self.prefill_per_s = prefill_per_s
        self.now = 0.0
        self.asked: dict[str, Asked] = {}
        self.served: defaultdict[str, float] = defaultdict(float)
        self.busy_s: defaultdict[str, float] = defaultdict(float)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = self._sent = 0
        for name, (slots, _) in self.engines.items():
            self.engine.add_backend(name, max_num_seqs=slots)
        self.at(0.0, self._scrape)

    def at(self, when_s: float, what: Callable[..., None], *about: Any) -> None:
        self._serial += 1
        heappush(self._heap, (when_s, self._serial, what, about))

    def send(
        self,
        tenant: str,
        prompt: int,
        output: int,
        at: float | None = None,
        *,
        batch: bool = False,
        streamed: bool = True,
        claim: Claim = NO_CLAIM,
        app: str = "",
        user: str = "",
        then: Callable[[Asked], None] | None = None,
        wait_s_max: float = float("inf"),
    ) -> None:
        id = f"{tenant}{'/b' if batch else ''}-{self._sent}"
        self._sent += 1
        request = Request(
            id, Flow(of_batch(tenant) if batch else tenant, app, user), self.weights.get(tenant, 1.0), prompt, output,
            self.now if at is None else at, streamed=streamed and not batch, claim=claim, wait_s_max=wait_s_max,
        )  # fmt: skip
        self.at(request.arrived_s, self._arrive, Asked(request, output, then))

    def closed(
        self, tenant: str, clients: int, prompt: Size, output: Size, *, think_s: float = 0.0, start_s: float = 0.0,
        **how: Any,
    ) -> None:  # fmt: skip
        """Clients that ask again when they are answered, and after a refusal when they may."""

        def again(asked: Asked) -> None:
            pause_s = think_s if asked.outcome == "completed" else max(1.0, asked.retry_s)
            self.send(tenant, self._size(prompt), self._size(output), self.now + pause_s + 1e-4, then=again, **how)

        for _ in range(clients):
            at = start_s + self.rng.random() * 0.1
            self.send(tenant, self._size(prompt), self._size(output), at, then=again, **how)

    def agents(
        self, tenant: str, count: int, *, context: int, grow: int = 0, calls: int = 20, pause_s: float = 2.0,
        output: int = 100, until_s: float = 1e9, start_s: float = 0.0, batch: bool = False, app: str = "",
    ) -> None:  # fmt: skip
        """Agents in closed loops: each interaction has so many calls, with a context that grows."""

        def begin(number: int, round_: int) -> None:
            name = f"{tenant}-{batch}-{number}-{round_}"

            def call(stage: int, at: float) -> None:
                claim = Claim(name, explicit=True, ends=stage == calls - 1)
                then: Callable[[Asked], None] = lambda asked: after(asked, stage)  # noqa: E731
                self.send(tenant, context + grow * stage, output, at, batch=batch, app=app, claim=claim, then=then)

            def after(asked: Asked, stage: int) -> None:
                if self.now > until_s:
                    return
                if asked.outcome != "completed":
                    self.at(self.now + max(1.0, asked.retry_s), begin, number, round_ + 1)
                elif stage == calls - 1:
                    self.at(self.now + 0.5, begin, number, round_ + 1)
                else:
                    call(stage + 1, self.now + self.rng.expovariate(1 / pause_s))

            call(0, self.now)

        for number in range(count):
            self.at(start_s + 0.05 * number, begin, number, 0)

    def run(self, until_s: float) -> World:
        while True:
            wakeup_s, next_s = self.engine.next_wakeup(), self._heap[0][0] if self._heap else float("inf")
            if min(next_s, next_s if wakeup_s is None else wakeup_s) > until_s:
                break
            if wakeup_s is not None and wakeup_s < next_s:
                self.now = max(self.now, wakeup_s) + 1e-7
                self.carry(self.engine.woke(self.now))
                continue
            when_s, _, what, about = heappop(self._heap)
            self.now = max(self.now, when_s)
            what(*about)
        self.now = until_s
        return self

    def carry(self, decisions: Sequence[Decision]) -> None:
        todo = [*decisions]
        while todo:
            decision = todo.pop(0)
            asked = self.asked[decision.id]
            if isinstance(decision, Dispatch):
                asked.went_s, asked.tries, asked.engine = self.now, asked.tries + 1, decision.backend
                prefill_s = self.engine.backends[decision.backend].prefill_tokens / 10_000
                self.at(self.now + 0.02 + prefill_s, self._first, asked, asked.tries)
            elif isinstance(decision, Preempt):
                if asked.first_s is None or not asked.request.streamed:
                    asked.preempted += 1
                    asked.tries += 1
                    asked.first_s = asked.went_s = None
                    todo += self.engine.failed(decision.id, Failure.PREEMPTED, self.now)
            else:
                asked.outcome, asked.retry_s = decision.reason.value, decision.retry_after_s
                if asked.then is not None:
                    asked.then(asked)

    def of(self, tenant: str, since_s: float = 0.0, *, batch: bool = False) -> list[Asked]:
        return [
            one
            for one in self.asked.values()
            if one.tenant == (of_batch(tenant) if batch else tenant) and one.came_s >= since_s
        ]

    def waits(self, tenant: str, since_s: float = 0.0, *, batch: bool = False) -> list[float]:
        """How long each request waited for its dispatch, or waits so far."""
        return [one.waited_s(self.now) for one in self.of(tenant, since_s, batch=batch)]

    def outcomes(self, tenant: str) -> Counter[str]:
        return Counter(one.outcome for one in self.of(tenant))

    def part(self, tenant: str, *, batch: bool = False) -> float:
        """What it has of all service."""
        return self.served[of_batch(tenant) if batch else tenant] / sum(self.served.values())

    def _size(self, size: Size) -> int:
        return size(self.rng) if callable(size) else size

    def _arrive(self, asked: Asked) -> None:
        self.asked[asked.request.id] = asked
        self.carry(self.engine.arrived(asked.request, self.now))

    def _first(self, asked: Asked, tries: int) -> None:
        if asked.tries != tries:
            return
        asked.first_s = self.now
        if asked.request.streamed:
            self.carry(self.engine.progressed(asked.request.id, 1, self.now))
            for part in (1, 2, 3):
                self.at(self.now + 0.02 * asked.output * part / 4, self._more, asked, tries)
        self.at(self.now + 0.02 * asked.output, self._end, asked, tries)

    def _more(self, asked: Asked, tries: int) -> None:
        if asked.tries == tries:
            self.carry(self.engine.progressed(asked.request.id, asked.output // 4, self.now))

    def _end(self, asked: Asked, tries: int) -> None:
        if asked.tries != tries or asked.outcome:
            return
        request = asked.request
        asked.outcome = "completed"
        self.served[request.flow.tenant] += request.prompt_tokens + 2 * asked.output
        self.busy_s[asked.engine] += self.now - (asked.went_s or 0.0)
        service = ServiceTokens(request.prompt_tokens, asked.output)
        self.carry(self.engine.finished(request.id, service, self.now, None))
        if asked.then is not None:
            asked.then(asked)

    def _scrape(self) -> None:
        for name, (_, kv) in self.engines.items():
            ledger = self.engine.backends[name]
            held = sum(lease.request.prompt_tokens + lease.output_tokens for lease in ledger.leases.values())
            if self.prefill_per_s:
                ledger.prefill_rate.tokens_per_s = self.prefill_per_s
            gauges = Gauges(self.now, ledger.sequences, 0, min(1.0, held / kv), kv, 16, 0, 0)
            self.carry(self.engine.backend_changed(name, gauges, self.now))
        self.at(self.now + 0.1, self._scrape)


def tree(
    groups: Mapping[str, tuple[str, Mapping[str, Any]]], tenants: Mapping[str, tuple[str, Mapping[str, Any]]]
) -> Tree:
    """Groups and tenants by name, each with the group that it is in and its terms."""

    def placed(of: Mapping[str, tuple[str, Mapping[str, Any]]]) -> dict[str, TreePlace]:
        return {name: TreePlace(group, GroupSettings(**terms)) for name, (group, terms) in of.items()}

    return Tree(placed(groups), placed(tenants))


def quantile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def told_and_true(world: World, tenant: str, since_s: float) -> list[tuple[float, float]]:
    """Return the waits of over a second of a tenant: what was told, and the true one."""
    found = []
    for asked in world.of(tenant, since_s):
        wait = asked.request.progress.wait
        if asked.went_s is not None and wait is not None and wait.expected is not None and asked.waited_s(0.0) > 1.0:
            found.append((wait.expected.wait_s, asked.waited_s(0.0)))
    return found


def part_right(waits: Sequence[tuple[float, float]]) -> float:
    """Return the part of these waits, told and true, that lie in the interval that was told."""
    assert len(waits) > 10
    return sum(least <= true <= most for told, true in waits for least, most in [interval_s(told)]) / len(waits)
