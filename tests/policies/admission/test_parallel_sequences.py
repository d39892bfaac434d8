"""Requests with more sequences than an engine has slots, beside a tenant whose requests have one each, step by step."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import pytest

from policies.admission.decisions import Decision
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.capacity.gauges import Gauges
from policies.queue.bounds import QueueLimits
from policies.request import ServiceTokens
from tests.policies.making import dispatched, make_request

SLOTS, SEQUENCES, STEP_S, STEPS = 8, 16, 0.02, 4000
STEPS_OF_A_PAGE = 5


class Running:
    """An engine, first come, first served, that makes a token of each sequence in a step; and clients of tenants."""

    def __init__(self, policy: str, clients: dict[str, int]) -> None:
        self.rng, self.step = random.Random(1), 0
        self.engine = AdmissionEngine(named_policy(policy), limits=QueueLimits(queue_wait_s_max=1000.0))
        self.engine.add_backend("one", max_num_seqs=SLOTS)
        self.waiting: deque[list[str | int]] = deque()
        self.running: list[list[str | int]] = []
        self.left: dict[str, int] = {}
        self.tokens = dict.fromkeys(clients, 0)
        self.serial = 0
        for tenant, number in clients.items():
            for _ in range(number):
                self.comes(tenant)

    @property
    def now(self) -> float:
        return self.step * STEP_S

    def comes(self, tenant: str) -> None:
        self.serial += 1
        each = SEQUENCES if tenant == "many" else 1
        request = make_request(
            tenant, id=f"{tenant}-{self.serial}", prompt=100 * each, output_max=400 * each, sequences=each
        )
        self.hears(self.engine.arrived(request, self.now))

    def hears(self, decisions: Sequence[Decision]) -> None:
        for id in dispatched(decisions):
            self.left[id] = SEQUENCES if id.startswith("many") else 1
            self.waiting += [[id, self.rng.randrange(20, 180)] for _ in range(self.left[id])]

    def steps(self) -> None:
        self.step += 1
        while self.waiting and len(self.running) < SLOTS:
            self.running.append(self.waiting.popleft())
        produced: dict[str, int] = {}
        for sequence in self.running:
            sequence[1] = int(sequence[1]) - 1
            produced[str(sequence[0])] = produced.get(str(sequence[0]), 0) + 1
        ended = [str(id) for id, left in self.running if not left]
        self.running = [sequence for sequence in self.running if sequence[1]]
        for id, tokens in produced.items():
            self.tokens[id.partition("-")[0]] += tokens
            self.hears(self.engine.progressed(id, tokens, self.now))
        for id in ended:
            self.left[id] -= 1
            if not self.left[id]:
                lease = self.engine.requests.leases[id]
                service = ServiceTokens(lease.request.prompt_tokens, lease.output_tokens)
                self.hears(self.engine.finished(id, service, self.now))
                self.comes(id.partition("-")[0])
        if not self.step % STEPS_OF_A_PAGE:
            page = Gauges(self.now, running=len(self.running), waiting=len(self.waiting))
            self.hears(self.engine.backend_changed("one", page, self.now))
        wakeup_s = self.engine.next_wakeup()
        if wakeup_s is not None and wakeup_s <= self.now:
            self.hears(self.engine.woke(self.now))


@pytest.mark.parametrize("policy", ["fairserve", "vtc"])
def test_an_engine_is_not_emptied_for_a_request_with_more_sequences_than_slots(policy: str) -> None:
    pool = Running(policy, {"honest": 40, "many": 4})
    for _ in range(STEPS):
        pool.steps()
    of_all = {tenant: tokens / (SLOTS * STEPS) for tenant, tokens in pool.tokens.items()}
    assert of_all["honest"] >= 0.45
    assert sum(of_all.values()) >= 0.97
