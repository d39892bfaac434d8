"""A flood of requests that engines refuse at once does not keep anybody else from being served."""

from __future__ import annotations

from functools import cache
from itertools import count

import pytest

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import profile
from lab.lab_driver import WRONG, simulate
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.request import Flow
from simulation.run import Arrival, Record

STREAMS = 32
RUN_S = 3.0
FAIR = ("fairserve", "wsc", "vtc", "lcf", "rr", "dlpm", "d2lpm")


@cache
def honest_tokens(policy: str, engines: int, flood: int, prompt_tokens: int) -> int:
    """What the honest tenant receives beside so many connections of requests that the engine finds wrong."""
    serial = count()
    names = [f"engine-{number}" for number in range(engines)]
    admission = AdmissionEngine(named_policy(policy))
    for name in names:
        admission.add_backend(name)

    def honest(now: float) -> Arrival:
        return Arrival(f"honest-{next(serial)}", Flow("honest"), now, 200, 60)

    def refused(now: float) -> Arrival:
        return Arrival(f"refused-{next(serial)}", Flow("flood"), now, prompt_tokens, 0, is_wrong=True)

    received = refusals = 0

    def ended(record: Record) -> None:
        nonlocal received, refusals
        if record.outcome == WRONG:
            refusals += 1
        else:
            received += len(record.token_s)

    def following(record: Record, now: float) -> Arrival | None:
        if now >= RUN_S:
            return None
        return refused(now) if record.outcome == WRONG else honest(now)

    simulate(
        [honest(0.0) for _ in range(STREAMS * engines)] + [refused(0.5) for _ in range(flood)],
        engine=admission,
        backends={name: EngineModel(profile("demo")) for name in names},
        next_arrival=following,
        ended=ended,
    )
    assert flood == 0 or refusals > 0
    return received


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize(("flood", "prompt_tokens"), [(12, 3000), (100, 30)])
@pytest.mark.parametrize("policy", FAIR)
def test_what_engines_refuse_is_not_free(policy: str, flood: int, prompt_tokens: int, engines: int) -> None:
    alone = honest_tokens(policy, engines, 0, 0)
    beside = honest_tokens(policy, engines, flood, prompt_tokens)
    assert beside >= 0.45 * alone
