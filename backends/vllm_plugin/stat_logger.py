"""vLLM's statistics after each step, handed to the feed. Only vLLM imports this module.

These statistics are no stable interface. An unknown form is logged once and ends the feed; the engine goes on.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from vllm.v1.metrics.loggers import StatLoggerBase

from backends.vllm_plugin.steps import RankState, StepPublisher

STEPS: Final = StepPublisher()
"""The feed of this process."""
logger = logging.getLogger("vllm.fairgate")


class StepLogger(StatLoggerBase):  # type: ignore[misc]  # vLLM is not there when types are checked
    """The logger of one rank whose steps this process sees."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._config = vllm_config
        self._index = engine_index
        self._rank: RankState | None = None

    def log_engine_initialized(self) -> None:
        try:
            self._rank = STEPS.ranks[self._index] = _rank_of(self._index, self._config)
            for rank in STEPS.ranks.values():
                _divide(self._config, rank, len(STEPS.ranks))
            servers = int(getattr(self._config.parallel_config, "_api_process_count", 1))
            if servers > 1:
                STEPS.end(f"{servers} API servers share the engine, and each sees a part of its steps only")
        except Exception as error:
            self._give_up(error)

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *more: Any, **named: Any) -> None:
        rank = self._rank
        if rank is None:
            return
        try:
            if iteration_stats is not None:
                rank.preemptions_total += iteration_stats.num_preempted_reqs
                rank.prompt_tokens_total += iteration_stats.num_prompt_tokens
            if scheduler_stats is not None:
                rank.running = scheduler_stats.num_running_reqs
                rank.deferred = getattr(scheduler_stats, "num_skipped_waiting_reqs", 0)
                rank.waiting = scheduler_stats.num_waiting_reqs + rank.deferred
                rank.set_usage(scheduler_stats.kv_cache_usage)
                details = getattr(scheduler_stats, "iteration_details", None)
                rank.scheduled_tokens = details and details.num_ctx_tokens + details.num_generation_tokens
                STEPS.stepped()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._rank = None
        why = f"fairgate does not know how this vLLM reports its steps ({type(error).__name__}: {error})"
        logger.warning("%s; gateways read its metrics instead", why)
        STEPS.end(why)


def _rank_of(index: int, config: Any) -> RankState:
    scheduler = config.scheduler_config
    return RankState(
        index,
        block_size=int(config.cache_config.block_size),
        scheduled_tokens_max=int(scheduler.max_num_batched_tokens),
        max_num_seqs=int(getattr(scheduler, "max_num_active_seqs", None) or scheduler.max_num_seqs),
    )


def _divide(config: Any, rank: RankState, ranks: int) -> None:
    """Set a rank's blocks: vLLM counts the sum of all ranks, and one block of each is never allocated."""
    cache = config.cache_config
    rank.total_blocks = rank.free_blocks = max(int(cache.num_gpu_blocks or 0) // ranks - 1, 0)
    tokens = getattr(cache, "kv_cache_size_tokens", None)  # of one rank
    rank.kv_tokens = max(int(tokens) - rank.block_size, 0) if tokens else rank.total_blocks * rank.block_size
