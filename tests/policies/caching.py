"""Small engines with prefix caches, and tenants that always have questions about their documents."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import Any

from policies.admission.named import named_policy
from policies.admission.policy import Policy
from policies.capacity.ledger import BackendLedger
from policies.capacity.obstacle import Blocked, Obstacle
from policies.orders.order import Selection
from policies.request import Request, ServiceTokens
from tests.policies.making import ledger_of, make_request

BLOCK = 10
"""Tokens."""
KEEPS_ALL = 1_000_000
"""Blocks of a cache that drops nothing."""
_serial = count()


def local(name: str, window: float, **settings: Any) -> Policy:
    """A policy whose service is what engines compute, so that caches and the window are seen in it."""
    if name == "dlpm":
        return named_policy(name, quantum=window)
    if name != "vtc":
        settings = {"window_calls": 1e6} | settings
    return named_policy(name, placement="prefix", window_tokens=window, cached_weight=0.0, **settings)


def document(name: int, blocks: int) -> tuple[int, ...]:
    """Block hashes of a text that begins like no other."""
    return tuple(hash((name, block)) for block in range(blocks))


def ask(
    policy: Policy, text: tuple[int, ...], tenant: str = "a", *, prompt: int | None = None, **fields: Any
) -> Request:
    """Queue a question of one block about a text."""
    prefix = (*text, hash(("question", next(_serial))))
    request = make_request(tenant, prefix=prefix, prompt=BLOCK * len(prefix) if prompt is None else prompt, **fields)
    policy.push(request, 0.0)
    return request


@dataclass(frozen=True)
class Questions:
    """Traffic: tenants with weights, each asking about its own documents, at `slots` per engine."""

    weights: dict[str, float]
    documents: int
    blocks_max: int
    output_max: int
    slots: int
    engines: int
    cache_blocks: int
    seed: int
    sometimes_idle: str = ""

    @property
    def prompt_max(self) -> int:
        return BLOCK * (self.blocks_max + 1)

    @classmethod
    def of(cls, seed: int) -> Questions:
        """Traffic of three tenants that the seed decides."""
        return cls(
            {tenant: (0.5, 1.0, 3.0)[(seed // 3**place) % 3] for place, tenant in enumerate("abc")},
            documents=1 + seed % 4,
            blocks_max=1 + seed * 7 % 20,
            output_max=1 + seed * 11 % 20,
            slots=1 + seed % 6,
            engines=1 + seed % 3,
            cache_blocks=(5, 20, 80, KEEPS_ALL)[seed % 4],
            seed=seed,
        )

    def bound(self, window: float) -> float:
        """2 (U + L), per weight.

        U is a prompt, and of all that is dispatched the output and the input that was wrongly taken to be cached.
        """
        slots = self.slots * self.engines
        believed = 0 if self.cache_blocks == KEEPS_ALL else slots * self.prompt_max
        most = self.prompt_max + believed + 2.0 * slots * self.output_max
        return 2 * (most / min(self.weights.values()) + window)


class CachingServers:
    """Engines that compute one token of every request per step. Their caches drop what was used longest ago.

    `received` is extend service: prompt tokens that were not cached, and twice the output.
    """

    def __init__(self, policy: Policy, questions: Questions) -> None:
        self.policy = policy
        self.questions = questions
        self.random = Random(questions.seed)
        self.caches: dict[str, OrderedDict[int, None]] = {f"e{n}": OrderedDict() for n in range(questions.engines)}
        self.running: dict[str, dict[str, tuple[Request, ServiceTokens, int]]] = {name: {} for name in self.caches}
        self.queued = dict.fromkeys(questions.weights, 0)
        self.received = dict.fromkeys(questions.weights, 0.0)
        self.prompts = self.cached = 0
        self.went: list[tuple[str, int]] = []
        """Whose requests were started, and when."""
        self.idle_until = 0
        self.texts = {
            tenant: [
                document(hash((index, number)), self.random.randint(1, questions.blocks_max))
                for number in range(questions.documents)
            ]
            for index, tenant in enumerate(questions.weights)
        }

    # --- Engines ---

    def find_room(self, request: Request, but: str | None = None) -> Sequence[BackendLedger] | Blocked:
        found = [ledger_of(name, len(running)) for name, running in self.running.items() if self._has_slot(name)]
        return found or Blocked(request, dict.fromkeys(self.running, Obstacle.SLOTS))

    def blocked_at(self, request: Request, engine: str) -> Blocked | None:
        return None if self._has_slot(engine) else Blocked(request, {engine: Obstacle.SLOTS})

    def reserve(self, blocked: Blocked) -> str | None:
        return None

    def loads(self) -> dict[str, int]:
        return {name: len(running) for name, running in self.running.items()}

    def _has_slot(self, engine: str) -> bool:
        return len(self.running[engine]) < self.questions.slots

    # --- time ---

    def step(self, now: int) -> None:
        self._ask(now)
        while isinstance(selection := self.policy.pop(float(now), self), Selection):
            self._start(selection.request, selection.backend, now)
        for backend, running in self.running.items():
            for request, service, output_tokens in list(running.values()):
                service = replace(service, output=service.output + 1)
                self.received[request.flow.tenant] += 2.0
                is_last = service.output == output_tokens
                self.policy.charge(request, service, float(now), final=is_last)
                if is_last:
                    del running[request.id]
                else:
                    self.running[backend][request.id] = (request, service, output_tokens)

    def run(self, steps: int) -> CachingServers:
        for now in range(steps):
            self.step(now)
        return self

    def spread(self, steps: int, one: str, other: str, *, both_wait: Callable[[], bool] = lambda: True) -> float:
        """The largest difference of service per weight between two tenants over any interval in which both wait."""
        weights = self.questions.weights
        spread, gaps = 0.0, [0.0]
        for now in range(steps):
            self.step(now)
            gap = self.received[one] / weights[one] - self.received[other] / weights[other]
            gaps = [*gaps, gap] if both_wait() else [gap]
            spread = max(spread, max(gaps) - min(gaps))
        return spread

    def _ask(self, now: int) -> None:
        questions = self.questions
        for tenant, weight in questions.weights.items():
            if tenant == questions.sometimes_idle and now < self.idle_until:
                continue
            # A step cannot empty it, wherever its requests are placed: backlogged throughout.
            for _ in range(4 * questions.engines * questions.slots - self.queued[tenant]):
                text = self.random.choice(self.texts[tenant])
                prefix = (*text, hash((self.random.random(), "question")))
                request = make_request(tenant, weight=weight, prompt=BLOCK * len(prefix), prefix=prefix)
                self.policy.push(request, float(now))
                self.queued[tenant] += 1
        if questions.sometimes_idle and self.random.random() < 0.02:
            self.idle_until = now + self.random.randrange(100)

    def _start(self, request: Request, backend: str, now: int) -> None:
        self.queued[request.flow.tenant] -= 1
        self.went.append((request.flow.tenant, now))
        cache = self.caches[backend]
        found = 0
        while found < len(request.prefix) and request.prefix[found] in cache:
            found += 1
        for block in reversed(request.prefix):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > self.questions.cache_blocks:
            cache.popitem(last=False)
        cached = min(BLOCK * found, request.prompt_tokens - 1)
        self.prompts += request.prompt_tokens
        self.cached += cached
        self.received[request.flow.tenant] += request.prompt_tokens - cached
        self.policy.charge(request, ServiceTokens(request.prompt_tokens, 0), float(now), final=False)
        output_tokens = self.random.randint(1, self.questions.output_max)
        self.running[backend][request.id] = (request, ServiceTokens(request.prompt_tokens, 0, cached), output_tokens)
