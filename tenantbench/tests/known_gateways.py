"""An event loop in virtual time, and gateways of which the answers are known."""

from __future__ import annotations

import asyncio
import selectors
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

from tenantbench.engine_model import Profile
from tenantbench.engine_server import EngineRunner
from tenantbench.events import CHARACTERS_PER_TOKEN, tokens_of
from tenantbench.load import Driver, Rejected, Transport
from tenantbench.metrics import Run, measure
from tenantbench.workloads import Workload

PROFILE = Profile()


class VirtualTime(selectors.SelectSelector):
    """A selector that passes the time of its loop instead of waiting."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everything waits for ever"
        self.now_s += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = VirtualTime()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s

    def pass_time(self, seconds: float) -> None:
        """Be busy, so that all timers that are due meanwhile are late."""
        self._virtual.now_s += seconds


def measured(workload: Workload, gateway: Callable[[EngineRunner], Transport], profile: Profile = PROFILE) -> Run:
    """Run a workload through a gateway in virtual time."""

    async def run() -> Run:
        runner = EngineRunner(profile)
        driver = Driver(workload, gateway(runner), CHARACTERS_PER_TOKEN)
        await driver.run()
        await runner.close()
        return Run(workload, driver.records, runner.engine.events, profile)

    with asyncio.Runner(loop_factory=VirtualLoop) as loop:
        return loop.run(run())


class Direct:
    """The engine alone."""

    def __init__(self, runner: EngineRunner) -> None:
        self.runner = runner

    async def ask(self, tenant: str, user: str, prompt: str, output: int, route: int) -> AsyncGenerator[str, None]:
        if reason := self.runner.engine.is_refused(tokens_of(prompt), output):
            raise Rejected(400 if reason == "context" else 503)
        await self.before(tenant, prompt)
        answer = self.runner.generate(prompt, output)
        try:
            async for number in answer:
                yield f"{number} "
        finally:
            await answer.aclose()

    async def before(self, tenant: str, prompt: str) -> None:
        """Hold a request back, or raise Rejected."""


class Slots(Direct):
    """Holds requests back until a slot is free, and takes the next from the tenant with the least `served / weight`.

    `leaks`: a slot is lost with each request that its client aborts. `deaf_s`: seconds in which a tenant that comes
    late is not served.
    """

    def __init__(
        self, runner: EngineRunner, weights: dict[str, float], slots: int = PROFILE.slots,
        *, leaks: int = 0, deaf_s: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(runner)
        self.weights, self.free, self.leaks, self.deaf_s = weights, slots, leaks, deaf_s
        self.queues: dict[str, deque[asyncio.Future[None]]] = defaultdict(deque)
        self.served: dict[str, float] = defaultdict(float)
        self.heard_s: dict[str, float] = {}

    async def ask(self, tenant: str, user: str, prompt: str, output: int, route: int) -> AsyncGenerator[str, None]:
        if self.runner.engine.is_refused(tokens_of(prompt), output):
            raise Rejected(400)
        await self._acquire(tenant)
        is_whole = False
        try:
            async for piece in super().ask(tenant, user, prompt, output, route):
                yield piece
            is_whole = True
        finally:
            if is_whole or not self.leaks:
                self.free += 1
            else:
                self.leaks -= 1
            self._dispatch()

    async def _acquire(self, tenant: str) -> None:
        loop = asyncio.get_running_loop()
        if tenant not in self.heard_s:
            self.heard_s[tenant] = loop.time() + (self.deaf_s if loop.time() > 1 else 0.0)
            loop.call_at(self.heard_s[tenant], self._hear, tenant)
        turn = loop.create_future()
        self.queues[tenant].append(turn)
        loop.call_later(0.001, self._dispatch)  # all that come at once are queued before the first one is sent
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.free += 1
            raise

    def _hear(self, tenant: str) -> None:
        others = [self.served[t] for t in self.heard_s if t != tenant]
        self.served[tenant] = min(others, default=0.0)

    def _dispatch(self) -> None:
        now = asyncio.get_running_loop().time()
        while self.free:
            for queue in self.queues.values():
                while queue and queue[0].done():
                    queue.popleft()
            heard = [
                tenant for tenant, queue in self.queues.items() if queue and now >= self.heard_s[tenant]
            ]  # fmt: skip
            if not heard:
                return
            tenant = min(heard, key=lambda tenant: self.served[tenant])
            self.served[tenant] += 1 / self.weights[tenant]
            self.free -= 1
            self.queues[tenant].popleft().set_result(None)


class Limiter(Direct):
    """Admits one request of each tenant per `every_s`, and tells the others when the next one is due."""

    def __init__(self, runner: EngineRunner, every_s: dict[str, float]) -> None:
        super().__init__(runner)
        self.every_s = every_s
        self.due_s: dict[str, float] = defaultdict(float)

    async def before(self, tenant: str, prompt: str) -> None:
        now = asyncio.get_running_loop().time()
        if now < self.due_s[tenant] - 1e-6:
            raise Rejected(429, self.due_s[tenant] - now)
        self.due_s[tenant] = now + self.every_s[tenant]


class Booking(Direct):
    """Refuses the first try of each request and tells a wait; keeps its word for all but every `liar`-th."""

    def __init__(self, runner: EngineRunner, liar: int) -> None:
        super().__init__(runner)
        self.liar, self.tries = liar, defaultdict[str, int](int)

    async def before(self, tenant: str, prompt: str) -> None:
        self.tries[prompt] += 1
        is_lie = len(self.tries) % self.liar == 0 and self.tries[prompt] == 2
        if self.tries[prompt] == 1 or is_lie:
            raise Rejected(429, 0.5)


class Slow(Direct):
    """Holds each request back for a time, whether the engine is idle or not."""

    async def before(self, tenant: str, prompt: str) -> None:
        await asyncio.sleep(0.15)


class Spoiler(Direct):
    """Runs each request twice, drops the tokens `lost` and repeats the tokens `doubled` of each answer."""

    def __init__(self, runner: EngineRunner, lost: set[int], doubled: set[int], runs: int = 1) -> None:
        super().__init__(runner)
        self.lost, self.doubled, self.runs = lost, doubled, runs

    async def ask(self, tenant: str, user: str, prompt: str, output: int, route: int) -> AsyncGenerator[str, None]:
        for _ in range(self.runs - 1):
            async for _ in super().ask(tenant, user, prompt, output, route):
                pass
        number = 0
        async for piece in super().ask(tenant, user, prompt, output, route):
            if number not in self.lost:
                yield piece * (2 if number in self.doubled else 1)
            number += 1


def measures(workload: Workload, gateway: Callable[[EngineRunner], Transport], profile: Profile = PROFILE) -> Any:
    """Return the metrics of a workload through a gateway, in virtual time."""
    return measure(measured(workload, gateway, profile))
