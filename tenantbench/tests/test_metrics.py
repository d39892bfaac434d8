"""Each metric finds the fault of a gateway that is unfair on purpose, with the right number."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from random import Random
from typing import Any

import pytest

from tenantbench.engine_model import Engine, Profile
from tenantbench.engine_server import EngineRunner
from tenantbench.load import Driver
from tenantbench.metrics import jain, measure, share_error
from tenantbench.run import ENGINES, EngineKind
from tenantbench.tests.known_gateways import (
    PROFILE,
    Booking,
    Direct,
    Limiter,
    Slots,
    Slow,
    Spoiler,
    VirtualLoop,
    measured,
    measures,
)
from tenantbench.workloads import (
    LIGHT_PART,
    MAKERS,
    Ask,
    Session,
    Workload,
    clients,
    open_loop,
    w1,
    w3,
    w5,
    w7,
    w9,
    workload,
)

EQUAL = {"t1": 1.0, "t2": 1.0, "t3": 1.0}
TOKENS_PER_S_MAX = PROFILE.slots / PROFILE.step_s


def two_tenants(name: str, seconds: float = 120.0) -> Workload:
    """Return two tenants that ask alike and always wait."""
    span, number = (0.0, seconds), 2 * PROFILE.slots
    return Workload(
        name, "", seconds, tuple(clients("t1", number, span, Ask(64, 64)) + clients("t2", number, span, Ask(64, 64)))
    )


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_unfair_by_a_factor(factor: int) -> None:
    run = measured(two_tenants("W2"), lambda runner: Slots(runner, {"t1": factor, "t2": 1}))
    found: dict[str, Any] = {**measure(run), **share_error(run)}
    served = run.share_served()
    assert served["t1"] / served["t2"] == pytest.approx(factor, rel=0.05)
    assert found["b_jain"] == pytest.approx(jain([factor, 1]), abs=0.01)
    assert found["f_share_error"] == pytest.approx(2 * factor / (factor + 1) - 1, abs=0.03)
    rate = sum(served.values()) / 120
    assert found["a_growth"] == pytest.approx(rate * (factor - 1) / (factor + 1), rel=0.1, abs=0.01 * rate)
    if factor > 1:
        assert found["a_gap"] == pytest.approx(120 * rate * (factor - 1) / (factor + 1), rel=0.1)
    else:
        assert found["a_gap"] < 2 * PROFILE.slots * 3 * 64


def test_service_is_a_token_of_a_prompt_and_two_of_an_output() -> None:
    one = Session("t1", "s", 0.0, 10.0, (Ask(64, 16),) * 3, (0.0, 1.0, 2.0))
    other = Session("t2", "s", 0.0, 10.0, (Ask(64, 1),) * 2, (0.0, 0.0))
    run = measured(Workload("W2", "", 10.0, (one, other)), Direct)
    served = {tenant: service.until(10.0) for tenant, service in run.service.items()}
    assert served == {"t1": 3 * (64 + 2 * 16), "t2": 2 * (64 + 2)}


def test_a_gateway_that_holds_requests_longer_than_their_way_leaves_the_engine_idle() -> None:
    one = Session("t1", "s", 0.0, 20.0, (Ask(64, 4),) * 999)
    run = measured(Workload("W2", "", 20.0, (one,)), Slow)
    assert measure(run)["d_idle_s"] == pytest.approx(len(run.records) * (0.15 - 0.1), rel=0.05)


def test_weights_that_a_gateway_ignores_are_a_share_error() -> None:
    """t3 has weight 3 and gets 1/2 instead of 3/4; t1 gets twice its quarter."""
    profile = PROFILE
    found = measures(w3(Random(0), 40.0, profile), lambda runner: Slots(runner, EQUAL))
    assert found["f_share_error"] == pytest.approx(1.0, abs=0.05)
    found = measures(w3(Random(0), 40.0, profile), lambda runner: Slots(runner, EQUAL | {"t3": 3.0}))
    assert found["f_share_error"] == pytest.approx(0.0, abs=0.05)


def test_sessions_buy_service_of_an_engine_alone_and_none_of_a_fair_gateway() -> None:
    work = workload("W4", 40.0, 0, PROFILE)
    direct = measures(work, Direct)
    fair = measures(work, lambda runner: Slots(runner, EQUAL))
    assert direct["h_cheat_gain"] == pytest.approx(50 / PROFILE.slots, rel=0.05)
    assert fair["h_cheat_gain"] == pytest.approx(1.0, rel=0.05)


def test_a_flood_before_an_engine_alone_and_before_a_limiter() -> None:
    """FCFS conserves work and does not isolate; a limiter of a fifth of capacity isolates and wastes four fifths."""
    flood = w1(Random(0), 60.0, PROFILE)
    direct = measures(flood, Direct)
    every_s = 5 * 128 * PROFILE.step_s / PROFILE.slots
    limited = measures(flood, lambda runner: Limiter(runner, {"t1": 0.0, "t2": every_s}))
    assert direct["c_ttft_p50"] > 30
    assert direct["d_idle_s"] < 0.5
    assert limited["c_ttft_p50"] < 2
    assert limited["d_idle_s"] == pytest.approx(40.0 * (4 / 5 - LIGHT_PART), rel=0.05)  # since the flood's begin
    assert limited["d_tokens_per_s"] < 0.4 * direct["d_tokens_per_s"]


def test_a_leak_of_slots_is_idle_time_and_lost_throughput() -> None:
    """Steps take equally long however few run, so an engine with half of its slots makes half of the tokens."""
    ask = Ask(64, 64)
    loops = clients("t1", 2 * PROFILE.slots, (0.0, 40.0), ask)
    breaker = Session("t2", "abort", 0.0, 2.0, (Ask(64, 64, abort_after=2),) * 99)
    leaky = Workload("W8", "", 40.0, (*loops, *[breaker] * 16))
    whole = measures(leaky, lambda runner: Slots(runner, EQUAL))
    half = measures(leaky, lambda runner: Slots(runner, EQUAL, leaks=8))
    assert whole["d_idle_s"] < 40.0 / 64 + 0.5  # a freed slot is empty for the next one of the 64 steps of a request
    assert half["d_idle_s"] == pytest.approx(38.0 / 2, abs=1.5)
    assert half["d_tokens_per_s"] / whole["d_tokens_per_s"] == pytest.approx(0.5, abs=0.05)


def test_a_tenant_that_is_not_heard_for_a_time_starves_that_long() -> None:
    found = measures(w5(Random(0), 60.0, PROFILE), lambda runner: Slots(runner, EQUAL, deaf_s=6.0))
    assert 6.0 <= found["e_starvation_s"] <= 8.5  # a request of another tenant must end before
    assert found["e_convergence_s"] == pytest.approx(found["e_starvation_s"], abs=1.0)
    found = measures(w5(Random(0), 60.0, PROFILE), lambda runner: Slots(runner, EQUAL))
    assert found["e_starvation_s"] < 2.5
    assert found["e_convergence_s"] < 3.0


def test_a_tenant_that_never_gets_its_share_does_not_converge() -> None:
    """0.425 of the service is 15 % below a half; the stay of 40 s is all that can be said."""
    run = measured(w5(Random(0), 120.0, PROFILE), lambda runner: Slots(runner, {"t1": 0.425, "t2": 0.575}))
    assert measure(run)["e_convergence_s"] == 40.0


def test_a_tenant_whose_next_request_comes_at_once_has_not_stopped_waiting() -> None:
    one = Session("t1", "s", 0.0, 2.0, (Ask(16, 1),) * 3, (0.0, 0.2, 0.75))
    assert len(measured(Workload("W2", "", 2.0, (one,)), Slow).waits["t1"]) == 2


@pytest.mark.parametrize(("liar", "honesty"), [(10_000, 1.0), (2, 2 / 3), (4, 4 / 5)])
def test_told_waits_that_do_not_come_true(liar: int, honesty: float) -> None:
    """n requests are told n + n/liar waits, of which n come true: each third try is admitted."""
    one = Session("t1", "s", 0.0, 200.0, (Ask(16, 4),) * 999)
    found = measures(Workload("W6", "", 200.0, (one,)), lambda runner: Booking(runner, liar))
    assert found["i_honesty"] == pytest.approx(honesty, abs=0.02)


def test_lost_doubled_and_rerun_tokens() -> None:
    one = Session("t1", "s", 0.0, 10.0, (Ask(16, 10),) * 20, pause_s=0.0)
    workload_10 = Workload("W10", "", 10.0, (one,))

    def found(lost: set[int], doubled: set[int], runs: int) -> Any:
        run = measured(workload_10, lambda runner: Spoiler(runner, lost, doubled, runs))
        values = measure(run)
        return sum(record.outcome == "done" for record in run.records), values["j_lost"], values["j_doubled"]

    done, lost, doubled = found({3, 9}, {4}, 1)
    assert lost == 2 * done
    assert doubled - done in (0, 1)  # the last answer is cut
    done, lost, doubled = found(set(), set(), 2)
    assert lost == 0
    assert doubled == pytest.approx(10 * done, abs=10)
    assert found(set(), set(), 1)[1:] == (0, 0)


def test_agents_waste_no_tokens_where_all_contexts_fit() -> None:
    small, roomy = PROFILE, Profile(kv_tokens=65_536)
    agents = w7(Random(0), 60.0, small)
    tight = measures(agents, Direct, small)
    wide = measures(agents, Direct, roomy)
    assert wide["g_wasted"] == 0
    assert tight["g_wasted"] > 10_000
    assert wide["g_tasks"] > tight["g_tasks"]


def test_two_gateways_that_do_not_know_of_each_other_err_by_a_known_share() -> None:
    """Each gives its half fairly: t1 has all of the first half and half of the second one, 3/4 instead of 1/2."""

    class Pair:
        def __init__(self, runner: EngineRunner) -> None:
            self.gateways = [Slots(runner, EQUAL, PROFILE.slots // 2) for _ in range(2)]

        def ask(self, tenant: str, user: str, prompt: str, output: int, route: int) -> AsyncGenerator[str, None]:
            return self.gateways[route].ask(tenant, user, prompt, output, route)

    found = measures(w9(Random(0), 60.0, PROFILE), Pair)
    assert found["f_share_error"] == pytest.approx(0.5, abs=0.08)


def test_a_workload_is_its_seed() -> None:
    for name in ("W1", "W6", "W7", "W10"):
        assert workload(name, 20.0, 1, PROFILE) == workload(name, 20.0, 1, PROFILE)
    assert workload("W1", 20.0, 1, PROFILE) != workload("W1", 20.0, 2, PROFILE)


def test_overhead_is_nothing_where_there_is_no_gateway() -> None:
    span = (0.0, 30.0)
    alone = Workload("W10", "", 30.0, (open_loop(Random(0), "t1", 1.0, span, (64, 16)),))
    run = measured(alone, Direct)
    found = measure(run, cpu_s=0.25, rss_bytes=2e6)
    assert found["j_errors"] == 0
    assert found["k_cpu_ms"] == pytest.approx(250 / len(run.records))
    assert found["k_rss_mb"] == 2


def test_a_client_that_is_blocked_knows_its_lag() -> None:
    """A callback that takes 0.3 s delays the beats that were due meanwhile."""

    async def lags() -> list[float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.call_later(0.45, loop.pass_time, 0.3)
        driver = Driver(Workload("W10", "", 1.0, ()), Direct(EngineRunner(PROFILE)), 1)
        await driver.run()
        return driver.lags_s

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert sorted(runner.run(lags()))[-3:] == [pytest.approx(late) for late in (0.05, 0.15, 0.25)]


@pytest.mark.parametrize("kind", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("name", MAKERS)
def test_each_engine_can_serve_each_request_that_is_not_bad(kind: EngineKind, name: str) -> None:
    sessions = workload(name, 20.0, 0, kind.profile).sessions
    engine = Engine(kind.profile)
    asks = {ask for session in sessions for ask in session.asks}
    assert asks
    assert all((engine.is_refused(ask.prompt, ask.output) == "context") == ask.is_bad for ask in asks)
