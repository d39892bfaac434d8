"""How many numbers of policies/ decide? Each number that a module names stands in one list here. What is computed from
other constants is not counted again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "policies"

DECIDE = """
    averages.QUICK
    app_paces.AGENTS_REPLY_S app_paces.PACE_S_MAX
    interactions.IDLE_S
    queue.tenants_and_flows.CALLS_PASSED queue.backlog.TRIED
    queue.places.KEPT_LONGER
    capacity.kv_cache.EVENLY
    capacity.kv_forecast.TOLERATED capacity.kv_forecast.CATCHING_UP
    capacity.lease.OUTGROWN
    capacity.ledger.KV_IS_SHORT capacity.ledger.SUSTAINED_S
    capacity.output_lengths.ENOUGH
    capacity.pace.USUAL_S capacity.pace.PREFILL_TOKENS_MIN
    capacity.slots.FIRST_SLOTS
    orders.cost.LONG_PROMPT
    orders.profiles.NEUTRAL orders.profiles.OUTLIER
    placements.prefix.SEQUENCE_TOKENS placements.prefix.MOVED placements.prefix.ADAPTER_TOKENS
    placements.prefix.IMBALANCE placements.prefix.CHANCE placements.prefix.SPARE placements.prefix.SLOWER
    replicas.shared_counters.AHEAD
    replicas.schedule.INTERVAL_S
    replicas.tallies.RESERVED
"""
"""A test fails if one of them is doubled or halved: in `test_constants.py`, or beside what it decides."""

BOUNDS = """
    admission.decisions.RECENT_MAX admission.room.ANSWERS_MAX admission.takeover.MOVED_MAX
    admission.explanation.AHEAD_SHOWN
    capacity.kv_cache.ENDED_MAX capacity.output_lengths.APPS_MAX capacity.output_lengths.WINDOW
    capacity.pace.PREFILL_TOKENS_MAX capacity.working_set.HOLD_S_MAX
    contexts.SHARE_MIN contexts.SHARE_MAX
    interactions.EXTENDED_MAX interactions.LOOKED_AT interactions.KEYS_EACH
    limits.leaky_counts.MEMBERS_MAX recent.PART
    orders.profiles.STAGES_MAX
    placements.prefix_index.BLOCKS_MAX placements.prefix_index.BLOCKS_MIN placements.siblings.LOOKED_UP
    plain_data.ROWS_MAX plain_data.NUMBER_MAX settings.COUNT_MAX
    queue.bounds.KEPT_FREE queue.bounds.PLACES_MAX queue.bounds.LOOKED_AT
    queue.expected_wait.SAMPLED queue.expected_wait.SHORT_S queue.expected_wait.PASSED_MAX
    queue.expected_wait.GATES_MAX
    request.WAIT_S_MAX
    replicas.shared_interactions.ASKED_MAX replicas.messages.NUMBER_MAX replicas.messages.REPORTED_MAX
    replicas.messages.BUCKETS_MAX
    replicas.prefixes.BLOCKS_MAX
    correlation_table.KEYS_MAX correlation_table.HOLDERS_MAX
    tree.pool_tree.IDLE_MAX
"""
"""How much is remembered, sent or looked at: more of it costs more."""

FINENESS = """
    admission.explanation.SHOWN_S_MIN
    queue.expected_wait.COUNTED_S_MIN queue.expected_wait.BAND
    queue.expected_wait.STEP queue.expected_wait.ERROR_MAX queue.expected_wait.PASSED
    queue.expected_wait.WINDOW_S
    capacity.kv_cache.OFF_BY_TOKENS capacity.kv_cache.OFF_BY_TOKENS_PER_LEASE capacity.kv_cache.OFF_BY_PART
    capacity.kv_cache.CLOCK_MAX
    capacity.kv_forecast.LOOKS capacity.kv_forecast.FINE capacity.kv_forecast.PARTS capacity.kv_forecast.FINE_OPEN
    tree.node.LEAST_PART tree.pool_tree.ROUNDING
    capacity.ledger.LOOK_AGAIN_S capacity.pace.TOKEN_S_MIN capacity.working_set.MEASURED_EVERY_S
    limits.sliding_counts.PARTS limits.throttle.PARTS placements.prefill_parts.PAID_EVERY_S
"""
"""How finely is computed, and how often: finer is truer, and costs more."""

NAMES = """
    admission.takeover.VERSION replicas.prefixes.VERSION
    capacity.kv_forecast.NEVER
    limits.quotas.MINUTE_S limits.quotas.DAY_S limits.sliding_counts.NO_BUCKET
    orders.dlpm._CAME_BITS orders.dlpm._FRONT placements.prefix._BITS
    orders.profiles.ANY_STAGE tree.node.PRESENT tree.node.WEIGHT
"""
"""Units, versions, and numbers that stand for something else."""


NUMBER = re.compile(r"^(\w+(?:, \w+)*)(?:: [\w\[\]]+)? = (?=[^#\n]*\d)([-+\d.e_*/<(), ]+?)(?:  #.*)?$", re.MULTILINE)
"""A line in which a module gives names to numbers; a tuple of numbers under one name is none."""


def numbers() -> Iterator[str]:
    for path in sorted(ROOT.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for names, values in NUMBER.findall(path.read_text()):
            if names.count(",") == values.count(","):
                yield from (f"{module}.{name}" for name in names.split(", "))


def test_each_number_stands_in_one_list_and_at_most_thirty_decide() -> None:
    assert sorted(numbers()) == sorted((DECIDE + BOUNDS + FINENESS + NAMES).split())
    assert len(DECIDE.split()) <= 30
