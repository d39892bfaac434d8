"""Is the working set of several gateways one set? Real gateways and their store, an event at a time."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from policies.admission.decisions import Decision
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.capacity.gauges import Gauges
from policies.queue.bounds import QueueLimits
from policies.replicas.messages import REPORTED_MAX
from policies.replicas.pool_replica import PoolReplica
from policies.request import Claim, Request, ServiceTokens
from policies.tree.node import CONTEXTS, NodeUsage
from policies.tree.terms import ROOT
from tests.kit.typed_script_store import TypedScriptStore
from tests.policies.agents import HOLD_S, K, teach
from tests.policies.making import dispatched, make_request

WINDOW = 1000.0


class Gateways:
    """Several gateways in front of one engine of `K` tokens of KV, of which the rate of prefill is known."""

    def __init__(self, count: int) -> None:
        self.now = 0.0
        self.store = TypedScriptStore()
        self.engines = [
            AdmissionEngine(
                named_policy("fairserve", window_tokens=WINDOW),
                limits=QueueLimits(queue_wait_s_max=1e6, queue_wait_s_max_inside=2e6),
            )
            for _ in range(count)
        ]
        self.requests: dict[str, tuple[int, Request]] = {}
        """With the gateway of each."""
        self.running: dict[str, None] = {}
        self.begun: list[int] = []
        """Tokens that count, as of each start."""
        for engine in self.engines:
            engine.add_backend("one", max_num_seqs=64)
            teach(engine)
        self.replicas = [PoolReplica(engine) for engine in self.engines]
        self.rounds = [0] * count
        self.scraped()
        self.syncs()

    def scraped(self) -> list[str]:
        gauges = Gauges(self.now, running=len(self.running), waiting=0, kv_capacity_tokens=K)
        return self._started(
            [(at, one.backend_changed("one", gauges, self.now)) for at, one in enumerate(self.engines)]
        )

    def syncs(self, *which: int) -> list[str]:
        """Sync rounds of these gateways, or of all, until each knows of what the others did."""
        started: list[str] = []
        quiet = 0
        while quiet < 2:
            quiet += 1
            for at in which or range(len(self.engines)):
                while begun := self._exchange(at):
                    quiet = 0
                    started += begun
        return started

    def _exchange(self, at: int) -> list[str]:
        self.rounds[at] += 1
        report = self.replicas[at].report(self.now)
        view = self.store.exchange(str(at), self.rounds[at], report, round(self.now * 1000))
        return self._started([(at, self.replicas[at].receive(view, self.now, self.now))])

    def cut_off(self) -> list[str]:
        return self._started([(at, one.cut_off(self.now)) for at, one in enumerate(self.replicas)])

    def asks(self, at: int, tenant: str, interaction: str, prompt: int, *, ends: bool = False) -> list[str]:
        """A call of this interaction. `ends`: its last one."""
        claim = Claim(interaction, ends=ends, explicit=True)
        name = f"{interaction}.{len(self.requests)}"
        request = make_request(tenant, id=name, prompt=prompt, claim=claim, arrived_s=self.now)
        self.requests[name] = at, request
        return self._started([(at, self.engines[at].arrived(request, self.now))])

    def opens(self, at: int, tenant: str, interaction: str, prompt: int) -> None:
        """A call of this interaction is answered, and all know of it."""
        [name] = [*self.asks(at, tenant, interaction, prompt), *self.syncs()]
        self.answers(name)
        self.syncs()

    def answers(self, name: str) -> list[str]:
        del self.running[name]
        at, request = self.requests[name]
        service = ServiceTokens(request.prompt_tokens, 1)
        return self._started([(at, self.engines[at].finished(name, service, self.now))])

    def tokens(self) -> int:
        return sum([engine.working_set.tokens for engine in self.engines])

    def _started(self, decided: list[tuple[int, Sequence[Decision]]]) -> list[str]:
        started: list[str] = []
        for at, decisions in decided:
            for name in dispatched(decisions):
                self.running[name] = None
                if not self.requests[name][1].progress.inside:
                    self.begun.append(self.tokens())
                started += [name, *self._started([(at, self.engines[at].progressed(name, 1, self.now))])]
        return started


def test_a_start_waits_for_what_counts_at_another_gateway_and_goes_when_that_is_over() -> None:
    pool = Gateways(2)
    for name, prompt in (("one", 4000), ("two", 4000)):
        pool.opens(0, "a", name, prompt)
    assert pool.asks(1, "a", "three", 3000) == []
    pool.now += 0.5 * HOLD_S
    [last] = [*pool.asks(0, "a", "two", 4000, ends=True), *pool.syncs()]
    pool.answers(last)
    assert pool.syncs() == ["three.2"]


def test_a_start_that_needs_no_room_of_the_engines_asks_for_none() -> None:
    pool = Gateways(2)
    for name, prompt in (("one", 4000), ("two", 4000)):
        pool.opens(0, "a", name, prompt)
    pool.asks(1, "a", "three", 3000)
    [holding] = pool.replicas[1].report(pool.now).holdings
    assert (holding.waiting, holding.next_sequences, holding.next_kv_tokens) == (0, 0, 0)


def test_a_tenant_has_what_it_has_at_all_gateways() -> None:
    pool = Gateways(2)
    for name in ("one", "two"):
        pool.opens(0, "b", name, 4000)
    pool.opens(0, "a", "three", 2500)
    pool.syncs()
    assert pool.asks(1, "a", "four", 3000) == [], "5,500 are more than the half that it has, though it is at both"
    assert pool.asks(1, "c", "five", 2000) == ["five.4"], "of a third"


@pytest.mark.parametrize("lead", [0.9 * WINDOW, 1.1 * WINDOW])
def test_a_tenant_that_is_ahead_of_a_start_at_another_gateway_begins_nothing(lead: float) -> None:
    pool = Gateways(2)
    for tenant, name in (("a", "one"), ("b", "two")):
        pool.opens(0, tenant, name, 3000)
    assert pool.asks(1, "b", "three", 4500) == []
    backlog = pool.engines[0].policy.order.backlog
    ahead, behind = backlog.tenant("a"), backlog.tenant("b")
    backlog.tenants.charged(ahead, behind.counter + lead - ahead.counter)
    pool.syncs()
    assert pool.asks(0, "a", "four", 500) == (["four.3"] if lead < WINDOW else []), "there is room for it"


def test_each_gateway_parks_its_part_of_what_is_too_much() -> None:
    pool = Gateways(2)
    for number, at in enumerate((0, 0, 0, 1, 1)):
        pool.opens(at, "a", f"i{number}", 1900)
    for number, at in enumerate((0, 0, 0, 1, 1)):
        pool.opens(at, "a", f"i{number}", 3000)
    assert pool.tokens() == 15_005
    pool.now += 1.0
    pool.scraped()
    assert [engine.working_set.tokens for engine in pool.engines] == [6002, 3001], "6,600 and 4,400 are their parts"


def test_without_the_others_each_has_an_equal_part_and_the_whole_again_with_them() -> None:
    pool = Gateways(4)
    pool.opens(0, "a", "one", 2000)
    pool.cut_off()
    pool.now += 1.0
    pool.scraped()
    assert {engine.working_set.capacity_tokens for engine in pool.engines} == {K // 4}
    assert [engine.working_set.tokens_in_all for engine in pool.engines] == [2001, 0, 0, 0]
    pool.syncs()
    pool.now += 1.0
    pool.scraped()
    assert {engine.working_set.capacity_tokens for engine in pool.engines} == {K}
    assert {engine.working_set.tokens_in_all for engine in pool.engines} == {2001}


def test_a_report_names_so_many_tenants_and_sums_the_others() -> None:
    pool = Gateways(2)
    teach(pool.engines[0], [f"t{number}" for number in range(REPORTED_MAX + 10)])
    for number in range(REPORTED_MAX + 10):
        [name] = pool.asks(0, f"t{number}", f"i{number}", 10 if number < 20 else 30)
        pool.answers(name)
        pool.syncs(0)
    usage = pool.replicas[0].report(pool.now).usage
    assert len(usage) == REPORTED_MAX + 1
    assert NodeUsage(ROOT, CONTEXTS, 10 * 11) in usage
    pool.syncs(0, 1)
    assert pool.engines[1].working_set.tokens_in_all == pool.tokens()


@pytest.mark.parametrize("seed", range(10))
def test_of_one_tenant_nothing_begins_beyond_the_cache_and_everything_begins_at_last(seed: int) -> None:
    """Any gateway serves any call. Before each decision the gateways know of each other."""
    random, pool, opened = Random(seed), Gateways(3), 0
    for _ in range(200):
        match random.randrange(6):
            case 0 | 1:
                opened += 1
                pool.asks(random.randrange(3), "a", f"i{opened}", random.randrange(200, 3000))
            case 2 if opened:
                pool.asks(random.randrange(3), "a", f"i{random.randint(1, opened)}", 200, ends=True)
            case 3 | 4 if pool.running:
                pool.answers(random.choice(list(pool.running)))
            case _:
                pool.now += random.choice((0.1, 1.0))
        pool.syncs()
        assert {engine.working_set.tokens_in_all for engine in pool.engines} == {pool.tokens()}
    assert len(pool.begun) > 20
    # Where time makes room, two gateways may each begin a start before one hears of the other.
    assert max(pool.begun) <= K + 3000
    for _ in range(opened):
        for name in list(pool.running):
            pool.answers(name)
        pool.now += HOLD_S
        pool.syncs()
        if not any(engine.queued or engine.dispatched for engine in pool.engines):
            break
    assert not any(engine.queued or engine.dispatched for engine in pool.engines)
    pool.now += HOLD_S
    pool.syncs()
    assert [engine.working_set.tokens_in_all for engine in pool.engines] == [0, 0, 0]
