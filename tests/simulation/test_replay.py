"""What a replay says is what the production engine did, before the engine that its log tells of."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import PROFILES, EngineProfile, profile
from lab.lab_driver import simulate
from lab.simulation_result import SimulationResult
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.orders.cost import LinearCost
from policies.orders.policy_entries import POLICIES
from policies.request import Flow, ServiceTokens
from simulation.measured import EngineEstimate, measured
from simulation.replay import OTHERS, ReplayResult, UnknownPolicyError, policy_names, replay_under
from simulation.run import IMPOSSIBLE, Arrival, Record
from simulation.statistics import percentile
from simulation.timeline import TICKS_MAX, Timeline
from simulation.traces.reader import Trace
from tests.kit.access_logs import logged, write
from tests.simulation.example_log import EXAMPLE, lines

TINY = profile("tiny-cpu")
EVEN = {"a": 1.0, "b": 1.0, OTHERS: 1.0}


@pytest.fixture(scope="module")
def flood(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Of two tenants one asks for far more than the engine has, the other for little."""
    random = Random(7)
    rows = [(random.uniform(0, 0.5), "heavy", random.randint(50, 400), random.randint(50, 150)) for _ in range(160)]
    rows += [(0.1 * number, "light", 60, 40) for number in range(20)]
    text = [f"{time_s:.4f},{tenant},{prompt},{output}" for time_s, tenant, prompt, output in sorted(rows)]
    return Trace(write(tmp_path_factory.mktemp("flood"), "t_s,client,input_tokens,output_tokens", *text))


def of_tenant(result: ReplayResult, name: str) -> float:
    [found] = [each.ttft_s for each in result.tenants if each.name == name]
    assert found is not None
    return found["p50"]


def test_a_fair_policy_is_told_from_an_unfair_one(flood: Trace) -> None:
    unfair, fair = (replay_under(policy, flood, TINY) for policy in ("fcfs", "vtc"))
    assert of_tenant(unfair, "light") > 0.5, "there is a flood"
    assert of_tenant(fair, "light") < of_tenant(unfair, "light") / 5
    assert fair.gap_max < unfair.gap_max / 5
    assert unfair.jain is not None
    assert unfair.jain < 0.8
    assert fair.jain is None or fair.jain > unfair.jain


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_request_is_accounted_for_under_every_policy(flood: Trace, policy: str) -> None:
    heard = []
    result = replay_under(policy, flood, TINY, ended=lambda: heard.append(1))
    assert len(heard) == result.requests == flood.requests == result.completed + sum(result.refused.values())
    assert sum(each.requests for each in result.tenants) == result.requests
    assert sum(each.completed for each in result.tenants) == result.completed
    tick_s = result.gap[0][0]
    for each in result.tenants:
        over_time = sum(rate for _, rate in result.service[each.name]) * tick_s
        assert over_time == pytest.approx(each.service, rel=0.1), "averaging around the ends blurs a little"
    assert replay_under(policy, flood, TINY) == result, "the same input gives the same answer"


def test_numbers_are_those_of_the_run_itself_which_keeps_nothing_of_what_has_ended(flood: Trace) -> None:
    def run(**more: Any) -> tuple[AdmissionEngine, SimulationResult]:
        engine = AdmissionEngine(named_policy("vtc"))
        engine.add_backend("engine-1", max_num_seqs=TINY.max_num_seqs)
        models = {"engine-1": EngineModel(TINY)}
        return engine, simulate(flood.arrivals(TINY.block_size), engine=engine, backends=models, **more)

    _, whole = run()
    result = replay_under("vtc", flood, TINY)
    times = [record.ttft_s for record in whole.records.values() if record.ttft_s is not None]
    assert result.ttft_s is not None
    assert (result.ttft_s["p50"], result.ttft_s["p99"]) == (percentile(times, 0.5), percentile(times, 0.99))
    tokens = [len(record.token_s) for record in whole.records.values()]
    assert result.output_tokens_per_s == pytest.approx(sum(tokens) / whole.ended_s)
    assert result.preemptions == sum(record.preemptions for record in whole.records.values())
    price = LinearCost()
    for tenant in result.tenants:
        assert tenant.service == sum(
            price(ServiceTokens(record.arrival.prompt_tokens, len(record.token_s)))
            for record in whole.records.values()
            if record.arrival.flow.tenant == tenant.name
        )
    ended: list[Record] = []
    _, brief = run(ended=ended.append)
    assert len(ended) == len(whole.records)
    assert (brief.records, brief.events, brief.decisions) == ({}, [], [])


def test_what_no_context_can_hold_is_refused_and_counted(tmp_path: Path) -> None:
    rows = ["0,a,100,10", "1,a,4000,97", "2,a,4096,0", "3,b,4000,96", "4,b,90000,1"]
    trace = Trace(write(tmp_path, "t_s,client,input_tokens,output_tokens", *rows))
    result = replay_under("vtc", trace, TINY)
    assert (result.requests, result.completed, result.refused) == (5, 2, {IMPOSSIBLE: 3})
    assert [(each.name, each.completed, each.service) for each in result.tenants] == [("b", 1, 4192.0), ("a", 1, 120.0)]


def test_tokens_of_interactions_that_were_cut_are_wasted(tmp_path: Path) -> None:
    """The second call comes when somebody else has the only slot for longer than anybody waits."""
    agent = {"tenant": "agents", "interaction": "i", "tokens_cached": 0, "total_ms": 0}
    entries = [
        logged(ts=1000, stage=1, tokens_in=100, tokens_out=2, **agent),
        *(logged(ts=1100, tenant="other", interaction="", total_ms=0, tokens_in=10, tokens_out=20) for _ in range(9)),
        # Of tenants with one request, two may wait inside the engine.
        *(logged(ts=1150, tenant=name, interaction="", total_ms=0, tokens_in=10, tokens_out=20) for name in ("x", "y")),
        logged(ts=1200, stage=2, tokens_in=150, tokens_out=2, **agent),
    ]
    slow = EngineProfile(
        name="slow", block_size=16, num_gpu_blocks=300, max_model_len=4096, max_num_seqs=1, max_num_batched_tokens=512,
        base_s=60.0, per_prefill_token_s=0.0, per_seq_s=0.0, per_context_token_s=0.0,
    )  # fmt: skip
    result = replay_under("fcfs", Trace(write(tmp_path, *entries)), slow)
    assert result.wasted_tokens == 102
    [agents] = [each for each in result.tenants if each.name == "agents"]
    assert (agents.requests, agents.completed) == (2, 1)


def test_a_tenant_among_many_is_summed_with_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulation.replay.TENANTS_KNOWN", 8)
    rows = [f"{number},t{number % 60},100,{10 if number % 60 < 8 else 5}" for number in range(120)]
    result = replay_under("vtc", Trace(write(tmp_path, "t_s,client,input_tokens,output_tokens", *rows)), TINY)
    assert [each.name for each in result.tenants] == [*(f"t{number}" for number in range(8)), OTHERS]
    assert result.tenants[-1].requests == 104
    assert sum(each.service for each in result.tenants) == 60 * 2 * 100 + 2 * (16 * 10 + 104 * 5)


def test_more_tenants_that_wait_than_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulation.replay.TENANTS_COMPARED", 2)
    monkeypatch.setattr("simulation.replay.TENANTS_LISTED", 2)
    rows = [f"{number / 100},t{number % 6},400,40" for number in range(300)]
    slow = replace(TINY, max_num_seqs=2)
    result = replay_under("vtc", Trace(write(tmp_path, "t_s,client,input_tokens,output_tokens", *rows)), slow)
    assert result.queued > 100
    assert result.gap_max > 0.0
    assert result.jain is not None


def test_an_unknown_policy_is_answered_with_those_that_there_are() -> None:
    assert policy_names(" vtc,fcfs , vtc") == ["vtc", "fcfs"]
    with pytest.raises(UnknownPolicyError, match=r"no policy is named 'best'; there are: .*fcfs.*vtc"):
        policy_names("vtc,best")


def test_the_example_is_what_its_generator_writes() -> None:
    assert gzip.decompress(EXAMPLE.read_bytes()) == lines()
    assert {json.loads(line)["tenant"] for line in lines().splitlines()} == {"batch", "people", "agents"}


# --- the timeline ---


def served(tenant: str, arrived_s: float, dispatched_s: float, tokens: list[float], prompt_tokens: int = 10) -> Record:
    arrival = Arrival(tenant, Flow(tenant), arrived_s, prompt_tokens, len(tokens))
    return Record(arrival, dispatched_s, tokens, max([dispatched_s, *tokens]), "completed")


def timeline(*records: Record, tick_s: float = 1.0) -> Timeline:
    found = Timeline(["a", "b", OTHERS], tick_s)
    for record in records:
        found.add(record.arrival.flow.tenant, record)
    return found


def test_service_counts_prompts_at_dispatch_and_tokens_as_they_pass() -> None:
    found = timeline(served("a", 0.0, 0.5, [1.5, 1.6, 2.5, 3.5]), served("b", 0.0, 4.5, []))
    assert found.rates("a", 1.0) == [(0.5, 10.0), (1.5, 4.0), (2.5, 2.0), (3.5, 2.0), (4.5, 0.0)]
    assert found.rates("a", 3.0) == [(0.5, 7.0), (1.5, 16 / 3), (2.5, 8 / 3), (3.5, 4 / 3), (4.5, 1.0)]


def test_a_gap_grows_only_while_both_wait_and_counts_both_ways() -> None:
    """`a` receives 100 in every second; `b` waits from 0 to 3 and from 5 to 8, `a` all the time."""
    services = [served("a", 0.0, second + 0.5, [], 100) for second in range(10)]
    waits = [served("a", 0.0, 10.0, [], 0), served("b", 0.0, 3.1, [], 0), served("b", 5.0, 8.1, [], 0)]
    course = timeline(*services, *waits).gaps(EVEN)
    assert [time_s for time_s, _ in course] == list(range(1, 12))
    assert [gap for _, gap in course] == [100, 200, 300, 0, 0, 100, 200, 300, 0, 0, 0]
    assert max(gap for _, gap in timeline(*services, *waits).gaps({"a": 2.0, "b": 1.0, OTHERS: 1.0})) == 150
    # First `a` receives 300, then `b` 500: they are 500 apart between the second and the last second.
    services = [served("a", 0.0, 0.5, [], 300), served("b", 0.0, 2.5, [], 500), *BOTH_WAIT]
    assert max(gap for _, gap in timeline(*services).gaps(EVEN)) == 500


BOTH_WAIT = [served(tenant, 0.0, 4.1, [], 0) for tenant in ("a", "b")]


def test_jain_is_of_those_who_wait() -> None:
    services = [served("a", 0.0, second + 0.5, [], 100) for second in range(4)]
    assert timeline(*services, *BOTH_WAIT).jain(EVEN, 2.0) == pytest.approx(0.5), "one of two has everything"
    assert timeline(*services, BOTH_WAIT[0]).jain(EVEN, 2.0) is None, "nobody else waited"
    both = [served("b", 0.0, second + 0.5, [], 300) for second in range(4)]
    assert timeline(*services, *BOTH_WAIT, *both).jain({"a": 1.0, "b": 3.0}, 2.0) == pytest.approx(1.0)


def test_a_run_that_lasts_longer_has_longer_ticks_and_loses_nothing() -> None:
    random = Random(3)
    records = []
    for number in range(120):
        arrived_s = random.uniform(0, 2000)
        start_s = arrived_s + random.uniform(0, 40)
        tokens = sorted(start_s + random.uniform(0, 30) for _ in range(random.randint(0, 20)))
        records.append(served("ab"[number % 2], arrived_s, start_s, tokens))
    fine, coarse = timeline(*records, tick_s=1.0), timeline(*records, tick_s=4.0)
    assert fine.tick_s == 4.0
    assert 2000 / fine.tick_s <= TICKS_MAX
    for tenant in "ab":
        assert fine.rates(tenant, 1.0) == coarse.rates(tenant, 1.0)
    assert fine.gaps(EVEN) == coarse.gaps(EVEN)
    assert max(gap for _, gap in fine.gaps(EVEN)) > 0
    assert fine.jain(EVEN, 60.0) == pytest.approx(coarse.jain(EVEN, 60.0))


# --- the engine that a log tells of: its speed, its slots, its cache, and how many there were ---


def engine_of(path: Path) -> EngineEstimate | None:
    return measured(Trace(path).entries())


def found(path: Path) -> EngineEstimate:
    engine = engine_of(path)
    assert engine is not None
    return engine


def logged_by(directory: Path, profile: EngineProfile) -> Path:
    path = directory / "access.log"
    path.write_bytes(lines(profile=profile))
    return path


@pytest.mark.parametrize("name", ["demo", "a10g-llama2-7b", "h100-llama3.1-8b"])
def test_an_engine_is_known_by_the_log_of_what_it_served(tmp_path: Path, name: str) -> None:
    engine = found(logged_by(tmp_path, PROFILES[name]))
    assert (engine.profile.name, engine.backends) == (name, 1)
    assert engine.profile.base_s == PROFILES[name].base_s
    took = re.search(rf"took (\S+) times as long as at {name}; at most", engine.why)
    assert took is not None
    assert float(took[1]) == pytest.approx(1, abs=0.08)


def test_an_engine_between_two_that_are_known_is_as_slow_as_it_was(tmp_path: Path) -> None:
    fast = PROFILES["h100-llama3.1-8b"]
    names = ("base_s", "per_prefill_token_s", "per_seq_s", "per_context_token_s")
    slow = replace(fast, name="slow", **{name: 1.6 * getattr(fast, name) for name in names})
    engine = found(logged_by(tmp_path, slow))
    assert engine.profile.base_s == pytest.approx(slow.base_s, rel=0.15)
    assert "of its speed" in engine.profile.name
    assert "so each step does" in engine.why


def at_once(count: int, *, tokens_in: int = 100, **fields: object) -> list[str]:
    """So many answers of 100 tokens beside each other, each a second long."""
    shared = {"tokens_in": tokens_in, "tokens_out": 100, "tokens_cached": 0, "total_ms": 1000.0, "queue_ms": 0.0}
    return [logged(ts=1000 + number / 1000, **shared | fields) for number in range(count)]


def test_slots_and_cache_are_what_requests_waited_for(tmp_path: Path) -> None:
    assert found(write(tmp_path, *at_once(20))).profile.max_num_seqs > 20, "nobody waited for a slot"
    assert found(write(tmp_path, *at_once(20, waited_ms={"slots": 5.0}))).profile.max_num_seqs == 20
    few = found(write(tmp_path, *at_once(20, tokens_in=20_000, total_ms=10_000.0))).profile
    assert few.usable_blocks * few.block_size >= 400_000, "it held them"
    less = found(write(tmp_path, *at_once(20, tokens_in=50, waited_ms={"kv": 5.0}))).profile
    assert less.usable_blocks * less.block_size == pytest.approx(20 * 100, abs=less.block_size)


def test_as_many_engines_as_were_busy_at_once(tmp_path: Path) -> None:
    three = [*at_once(10, backend="a"), *at_once(10, backend="b"), *at_once(10, backend="c")]
    later = [logged(ts=5000 + number, backend="d", total_ms=500.0) for number in range(5)]
    assert found(write(tmp_path, *three, *later)).backends == 3


def test_a_log_that_tells_too_little_chooses_nothing(tmp_path: Path) -> None:
    assert engine_of(write(tmp_path, *at_once(9))) is None
    assert engine_of(write(tmp_path, *at_once(20, backend=""))) is None
    assert engine_of(write(tmp_path, "t_s,input_tokens,output_tokens", *(f"{n},10,20" for n in range(20)))) is None
