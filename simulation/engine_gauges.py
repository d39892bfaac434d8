"""What does a simulated engine say of itself, on a page of metrics and after a step?"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from backends.simulated.engine_model import EngineModel, Step
from policies.capacity.gauges import Gauges


def read_gauges(name: str, model: EngineModel, now: float) -> Gauges:
    """What a scrape of this backend says at this time."""
    gauges, profile = model.gauges(now), model.profile
    capacity_tokens = profile.usable_blocks * profile.block_size
    return Gauges(
        now,
        running=gauges.running,
        waiting=gauges.waiting,
        kv_usage=gauges.kv_usage,
        kv_capacity_tokens=capacity_tokens,
        block_size=profile.block_size,
        preemptions_total=gauges.preemptions_total,
        prompt_tokens_total=gauges.prompt_tokens_total,
    )


def read_step(name: str, model: EngineModel, step: Step, now: float) -> Gauges:
    """What this backend says right after a step."""
    profile = model.profile
    return replace(
        read_gauges(name, model, inf),  # after the step
        taken_s=now,
        is_step=True,
        free_blocks=profile.usable_blocks - model.gauges().kv_blocks,
        total_blocks=profile.usable_blocks,
        scheduled_tokens=step.scheduled_tokens,
        scheduled_tokens_max=profile.max_num_batched_tokens,
        max_num_seqs=profile.max_num_seqs,
    )
