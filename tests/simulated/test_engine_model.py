"""The engine model in virtual time: what it holds, whom it admits, whom it throws out, what its gauges say when."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from backends.simulated.engine_model import EngineModel, EngineRequest, RequestRefusedError, Step
from backends.simulated.engine_profiles import PROFILES, EngineProfile, UnknownProfileError, profile

BLOCK = 16


def small(**changes: object) -> EngineProfile:
    """20 usable blocks of 16 tokens; a step of 10 ms whatever is in it, unless changed."""
    base = EngineProfile(
        name="small",
        block_size=BLOCK,
        num_gpu_blocks=21,
        max_model_len=320,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        base_s=0.01,
        per_prefill_token_s=0.0,
        per_seq_s=0.0,
        per_context_token_s=0.0,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


class Clock:
    """Runs a model and keeps the time and every step."""

    def __init__(self, engine: EngineModel) -> None:
        self.engine = engine
        self.now = 0.0
        self.steps: list[Step] = []

    def submit(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.engine.submit(request)

    def step(self) -> Step:
        assert self.engine.has_work, "what the test waits for never came"
        step = self.engine.step(self.now)
        self.now += step.duration_s
        self.steps.append(step)
        return step

    def run(self) -> list[str]:
        """To the end; the order in which requests finish."""
        while self.engine.has_work:
            self.step()
        return [name for step in self.steps for name in step.finished]

    def tokens(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for step in self.steps:
            for name, count in step.tokens:
                total[name] = total.get(name, 0) + count
        return total


def blocks_for(tokens: int) -> int:
    return math.ceil(tokens / BLOCK)


def hashes(text: str, blocks: int) -> tuple[int, ...]:
    """The hashes of the first blocks of a text that is named, not written."""
    return tuple(hash((text, i)) for i in range(blocks))


def test_plain_decoders_hold_the_blocks_of_prompt_and_output() -> None:
    """While a step computes, a request holds ceil((prompt + tokens it had before the step) / block)."""
    clock = Clock(EngineModel(small()))
    lengths = {"a": 15, "b": 16, "c": 17, "d": 40}
    clock.submit(*(EngineRequest(name, prompt, 40) for name, prompt in lengths.items()))
    for emitted in range(39):
        clock.step()
        held = sum(blocks_for(prompt + emitted) for prompt in lengths.values())
        assert clock.engine.gauges().kv_blocks == held
    clock.step()
    assert not clock.engine.has_work
    assert clock.engine.gauges().kv_blocks == 0
    assert clock.tokens() == dict.fromkeys(lengths, 40)


def test_a_shared_prefix_is_held_once() -> None:
    """Eight prompts of 60 tokens that share 48: three blocks together, and one each."""
    clock = Clock(EngineModel(small()))
    clock.submit(*(EngineRequest(str(i), 60, 3, hashes("shared", 3)) for i in range(8)))
    step = clock.step()
    assert clock.engine.gauges().kv_blocks == 3 + 8
    assert step.cached_tokens == {str(i): 48 for i in range(1, 8)}
    gauges = clock.engine.gauges()
    assert gauges.prompt_tokens_total == 480


@pytest.mark.parametrize(("text", "blocks_left"), [("old", 2), ("new", 5)])
def test_the_longest_unused_prefix_is_evicted_first_from_its_end(text: str, blocks_left: int) -> None:
    clock = Clock(EngineModel(small()))
    for name in ("old", "new"):
        clock.submit(EngineRequest(name, 81, 1, hashes(name, 5)))
        clock.run()
    clock.submit(
        EngineRequest("big", 16 * 13, 1)
    )  # of 20 blocks, 5 and 5 are kept; 13 take the 10 others and 3 of "old"
    clock.run()
    clock.submit(EngineRequest("again", 81, 1, hashes(text, 5)))
    assert clock.step().cached_tokens == {"again": blocks_left * BLOCK}


def test_the_head_of_the_queue_blocks_all_behind_it() -> None:
    clock = Clock(EngineModel(small()))
    clock.submit(EngineRequest("running", 160, 40))
    clock.step()
    clock.submit(EngineRequest("large", 176, 1), EngineRequest("tiny", 1, 1))
    clock.step()
    gauges = clock.engine.gauges()
    assert (gauges.running, gauges.waiting) == (1, 2), "the tiny one would fit, and waits"
    assert clock.run() == ["running", "large", "tiny"]


def test_the_last_admitted_is_the_victim_and_returns_first() -> None:
    clock = Clock(EngineModel(small()))
    clock.submit(EngineRequest("a", 90, 60), EngineRequest("b", 90, 60), EngineRequest("c", 90, 60))
    while not clock.step().preempted:
        pass
    assert clock.steps[-1].preempted == ["c"]
    clock.submit(EngineRequest("late", 100, 1))
    thrown_out = len(clock.steps)
    clock.run()
    emitted = [name for step in clock.steps[thrown_out:] for name, _ in step.tokens]
    assert emitted.index("c") < emitted.index("late")
    assert clock.tokens() == {"a": 60, "b": 60, "c": 60, "late": 1}, "nothing is emitted twice"


def test_a_step_that_preempts_admits_nobody_and_the_preemption_counter_is_late() -> None:
    """It moves when the victim next gets a token, not when it is thrown out: the running gauge tells first."""
    clock = Clock(EngineModel(small()))
    clock.submit(EngineRequest("a", 160, 30), EngineRequest("b", 159, 30))
    clock.step()
    assert clock.engine.gauges().running == 2
    clock.submit(EngineRequest("c", 1, 1))
    step = clock.step()
    assert step.preempted == ["b"]
    assert [name for name, _ in step.tokens] == ["a"], "b's blocks would do for c, but not in this step"
    assert (clock.engine.gauges().running, clock.engine.gauges().waiting) == (1, 2)
    while "a" not in clock.steps[-1].finished:
        clock.step()
        assert clock.engine.gauges().preemptions_total == 0
    clock.step()
    assert [name for name, _ in clock.steps[-1].tokens][:1] == ["b"]
    assert clock.engine.gauges().preemptions_total == 1
    assert clock.engine.gauges().prompt_tokens_total == 160 + 159 + 1, "a recomputed prompt counts once"


def test_gauges_do_not_see_an_arrival_before_a_step_nor_a_step_before_its_end() -> None:
    engine = EngineModel(small())
    engine.submit(EngineRequest("a", 10, 5))
    assert engine.gauges(0.0).waiting == 0
    step = engine.step(0.0)
    assert engine.gauges(step.duration_s / 2).running == 0
    assert engine.gauges(step.duration_s).running == 1


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    clock = Clock(EngineModel(small(max_num_batched_tokens=64, per_prefill_token_s=0.001)))
    clock.submit(EngineRequest("short", 10, 20))
    clock.step()
    clock.submit(EngineRequest("long", 200, 1))
    durations = []
    while "long" not in clock.steps[-1].finished:
        step = clock.step()
        assert ("short", 1) in step.tokens, "decoding goes on"
        durations.append(step.duration_s)
    assert durations == pytest.approx([0.01 + 0.063, 0.01 + 0.063, 0.01 + 0.063, 0.01 + 0.011])


def test_a_step_costs_what_the_profile_says() -> None:
    model = profile("a10g-llama2-7b")
    clock = Clock(EngineModel(model))
    clock.submit(*(EngineRequest(str(i), 100, 3) for i in range(4)))
    assert clock.step().duration_s == pytest.approx(model.base_s + 400 * model.per_prefill_token_s)
    expected = model.base_s + 4 * model.per_seq_s + 4 * 101 * model.per_context_token_s
    assert clock.step().duration_s == pytest.approx(expected)


def test_a_pooling_request_ends_with_its_prefill() -> None:
    clock = Clock(EngineModel(small()))
    clock.submit(EngineRequest("embed", 100, 0))
    step = clock.step()
    assert (step.tokens, step.finished) == ([], ["embed"])


@pytest.mark.parametrize(
    ("prompt", "output", "id", "said"),
    [
        (0, 1, "b", "model length of 320"),
        (10, -1, "b", "model length of 320"),
        (300, 21, "b", "model length of 320"),
        (1, 1, "a", "already in the engine"),
    ],
)
def test_impossible_lengths_and_an_id_in_use_are_refused(prompt: int, output: int, id: str, said: str) -> None:
    engine = EngineModel(small())
    engine.submit(EngineRequest("a", 1, 1))
    with pytest.raises(RequestRefusedError, match=said):
        engine.submit(EngineRequest(id, prompt, output))


def test_profiles_are_found_by_name_and_an_unknown_one_lists_them() -> None:
    assert {"demo", "tiny-cpu", "a10g-llama2-7b", "h100-llama3-8b"} <= set(PROFILES)
    with pytest.raises(UnknownProfileError, match="demo, tiny-cpu"):
        profile("b200")


@pytest.mark.parametrize("model", PROFILES.values(), ids=lambda model: model.name)
def test_no_profile_lets_the_engine_stand_still(model: EngineProfile) -> None:
    assert model.usable_blocks * model.block_size >= model.max_model_len, "the longest request fits the KV cache"
    assert model.max_num_batched_tokens >= model.max_num_seqs >= 1
    assert 0 < model.step_s(0, 0, 0) <= model.step_s(1, 1, 1) < math.inf


class EngineMachine(RuleBasedStateMachine):
    """Whatever happens, blocks are neither lost nor made, the gauges add up, and all work ends."""

    @initialize(budget=st.sampled_from([8, 40, 512]))
    def begin(self, budget: int) -> None:
        self.engine = EngineModel(small(max_num_batched_tokens=budget))
        self.clock = Clock(self.engine)
        self.live: dict[str, EngineRequest] = {}
        self.serial = 0

    @rule(prompt=st.integers(1, 200), output=st.integers(0, 100), text=st.sampled_from(["", "x", "y"]))
    def submit(self, prompt: int, output: int, text: str) -> None:
        self.serial += 1
        chain = hashes(text, prompt // BLOCK) if text else ()
        request = EngineRequest(str(self.serial), prompt, output, chain)
        self.clock.submit(request)
        self.live[request.id] = request

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.live:
            name = data.draw(st.sampled_from(sorted(self.live)))
            self.engine.abort(name)
            del self.live[name]

    @rule(count=st.integers(1, 30))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.engine.has_work:
                self.check(self.clock.step())

    def check(self, step: Step) -> None:
        for name in step.finished:
            request = self.live.pop(name)
            assert self.clock.tokens().get(name, 0) == request.output_tokens
        emitted = [name for name, _ in step.tokens]
        assert len(set(emitted)) == len(emitted)
        assert not set(emitted) & set(step.preempted)
        gauges = self.engine.gauges()
        assert gauges.running + gauges.waiting == len(self.live)
        assert gauges.running <= self.engine.profile.max_num_seqs
        assert gauges.kv_blocks <= self.upper_bound(self.live.values())
        if not self.live:
            assert gauges.kv_blocks == 0

    def upper_bound(self, requests: Iterable[EngineRequest]) -> int:
        """What the live requests would hold, each alone and all of them running."""
        tokens = self.clock.tokens()
        alone = sum(blocks_for(request.prompt_tokens + tokens.get(request.id, 0)) for request in requests)
        return min(alone, self.engine.profile.usable_blocks)

    @invariant()
    def blocks_are_conserved(self) -> None:
        engine = getattr(self, "engine", None)
        if engine is None:
            return
        pool = engine._pool
        holders = [key for sequence in engine._running for key in sequence.keys]
        private = sum(sequence.blocks - len(sequence.keys) for sequence in engine._running)
        assert {key: holders.count(key) for key in holders} == pool._held
        assert not pool._held.keys() & pool._cached.keys()
        assert pool._blank >= 0
        assert pool._blank + len(pool._cached) + len(pool._held) + private == pool.capacity

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            for _ in range(20_000):
                if not self.engine.has_work:
                    break
                self.check(self.clock.step())
            assert not self.live, "some request never ended"


EngineMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=20)
TestEngineKeepsItsBooks = EngineMachine.TestCase
