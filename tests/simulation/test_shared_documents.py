"""Questions about shared documents, of which one engine's cache holds a half: does the default find them there?"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import profile
from lab.lab_driver import simulate
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.queue.bounds import QueueLimits
from policies.request import Flow
from simulation.run import Arrival, Record

DOCUMENTS, DOCUMENT_BLOCKS, CACHED_DOCUMENTS, BLOCK = 40, 500, 19, 16
UNTIL_S = 40.0


def cached_and_answered(placement: str | None) -> tuple[float, int]:
    """Part of the prompts' tokens that was cached, and answers, in 40 s of 60 clients."""
    engine_like = replace(profile("h100-llama3.1-8b"), num_gpu_blocks=CACHED_DOCUMENTS * DOCUMENT_BLOCKS + 1000)
    engine = AdmissionEngine(named_policy("fairserve", placement=placement), limits=QueueLimits(queue_wait_s_max=1e5))
    engine.add_backend("engine", max_num_seqs=engine_like.max_num_seqs)
    random, asked = Random(1), 0

    def ask(tenant: str, now: float) -> Arrival:
        nonlocal asked
        asked += 1
        first = random.randrange(DOCUMENTS) * DOCUMENT_BLOCKS
        blocks = (*range(first, first + DOCUMENT_BLOCKS), 10**6 + asked)
        return Arrival(f"{asked}", Flow(tenant, "questions"), now, len(blocks) * BLOCK, 40, prefix=blocks)

    run = simulate(
        [ask("abc"[number % 3], number / 1000) for number in range(60)],
        engine=engine,
        backends={"engine": EngineModel(engine_like)},
        next_arrival=lambda record, now: ask(record.arrival.flow.tenant, now),
        until_s=UNTIL_S,
    )
    answered: list[Record] = [one for one in run.records.values() if one.outcome == "completed"]
    tokens = sum(one.arrival.prompt_tokens for one in answered)
    return sum(one.cached_tokens for one in answered) / tokens, len(answered)


def test_with_one_engine_what_is_cached_goes_first_within_the_window() -> None:
    cached, answers = cached_and_answered(None)
    without, fewer = cached_and_answered("least_loaded")
    assert cached > 0.7 > 0.6 > without
    assert answers > 1.5 * fewer
