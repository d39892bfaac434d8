"""An engine is kept as full as without a gateway, nobody waits inside it, and next to nothing is preempted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.pressure import CASES, Direct, gateway, press

pytestmark = pytest.mark.interpreted_only("the experiment extends what is compiled")


def test_on_steps_a_flood_fills_the_engine_without_preemptions() -> None:
    case = replace(CASES["flood of 64, answers of 200"], window_s=5.0)
    direct, ours = press(case, Direct()), press(case, gateway(case), steps=True)
    assert ours.fill >= 0.96 * direct.fill
    assert ours.tokens_per_s >= direct.tokens_per_s
    assert ours.preemptions <= 0.02 * direct.preemptions
    assert ours.waiting_max <= 2
    assert ours.light_p50_s < 0.01 * direct.light_p50_s


def test_of_few_slots_a_light_tenant_waits_for_the_next_that_is_free() -> None:
    case = replace(CASES["6 slots, not configured"], window_s=8.0)
    direct, ours = press(case, Direct()), press(case, gateway(case), steps=True)
    assert ours.light_p50_s <= 0.02 * direct.light_p50_s
    assert ours.tokens_per_s >= 0.97 * direct.tokens_per_s
