"""What does an event of a full pool cost, as the pool grows? Lines of Python are counted, since they have no noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from statistics import median

import pytest

from policies.admission.decisions import Decision
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.capacity.gauges import Gauges
from policies.queue.bounds import QueueLimits
from policies.request import ServiceTokens
from tests.policies.making import lines_counted, make_request

TENANTS = 5
EVENTS = ("arrival", "page", "end", "start", "wake")
GROWN = 1.05
"""A heap is deeper by a level or two."""


class FullPool:
    """Engines that run as many requests as they have slots, and requests that wait."""

    def __init__(self, policy: str, engines: int, running: int, waiting: int) -> None:
        self.engine = AdmissionEngine(named_policy(policy), limits=QueueLimits(queue_wait_s_max=1e6))
        self.now, self.step_s, self.running, self.serial = 0.0, 0.001, running, count()
        self.names = [f"e{number}" for number in range(engines)]
        self.at: dict[str, list[str]] = {name: [] for name in self.names}
        self.starting: list[str] = []
        for name in self.names:
            self.engine.add_backend(name, max_num_seqs=running)
            self.page(name)
        for _ in range(engines * running + waiting):
            self.arrive()
            self.start()
        assert self.engine.queued == waiting
        for _ in range(3):
            for name in self.names:
                for id in self.at[name]:
                    self.engine.progressed(id, 1, self.now)
                self.page(name)
        for _ in range(running + 2):  # until requests have ended that had waited
            self.end()
            self.start()
            self.arrive()

    def note(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            self.at[decision.backend].append(decision.id)
            self.starting.append(decision.id)

    def arrive(self) -> None:
        number = next(self.serial)
        request = make_request(
            f"t{number % TENANTS}", id=f"r{number}", user=f"u{number % 4}", prompt=20 + number % 7, arrived_s=self.now
        )
        self.note(self.engine.arrived(request, self.now))

    def start(self) -> None:
        """The first token of each request that was dispatched."""
        while self.starting:
            self.note(self.engine.progressed(self.starting.pop(), 1, self.now))

    def page(self, name: str = "e0") -> None:
        for id in self.at[name][:3]:
            self.engine.progressed(id, 1, self.now)
        self.now += self.step_s
        gauges = Gauges(self.now, self.running, 0, 0.5, 4000 * self.running, 16, 0, 0)
        self.note(self.engine.backend_changed(name, gauges, self.now))

    def end(self) -> None:
        self.now += self.step_s
        id = self.at["e0"].pop(0)
        self.note(self.engine.finished(id, ServiceTokens(20, 60), self.now))

    def wake(self) -> None:
        self.now += self.step_s
        self.note(self.engine.woke(self.now))

    def lines_by_event(self) -> dict[str, float]:
        """Count the lines of each event, so soon one after the other that no token is charged."""
        self.step_s = 1e-6
        found: dict[str, list[int]] = {event: [] for event in EVENTS}
        steps: dict[str, Callable[[], None]] = {
            "arrival": self.arrive, "page": self.page, "end": self.end, "start": self.start, "wake": self.wake,
        }  # fmt: skip
        for _ in range(9):
            for event in EVENTS:
                with lines_counted() as lines:
                    steps[event]()
                found[event].append(lines[0])
        return {event: median(counted) for event, counted in found.items()}


@pytest.mark.interpreted_only("compiled code has no lines to count")
@pytest.mark.parametrize("policy", ["vtc", "fairserve", "fcfs"])
@pytest.mark.parametrize(
    ("small", "large"),
    [
        pytest.param((1, 50, 100), (1, 250, 100), id="running"),
        pytest.param((1, 20, 200), (1, 20, 1000), id="waiting"),
        pytest.param((8, 6, 100), (32, 6, 100), id="engines"),
    ],
)
def test_no_event_costs_more_in_a_larger_pool(
    policy: str, small: tuple[int, int, int], large: tuple[int, int, int]
) -> None:
    before, after = FullPool(policy, *small).lines_by_event(), FullPool(policy, *large).lines_by_event()
    assert {event: (before[event], after[event]) for event in EVENTS if after[event] > GROWN * before[event]} == {}
