"""The kept corpus is read again, and each harness runs for a moment: without atheris, the same inputs every time.

No clock is asked here. What is not linear runs into the timeout of the test.
"""

from __future__ import annotations

from itertools import islice

import pytest

from tests.fuzz.harness import Harness, Measure, check
from tests.fuzz.plain import inputs
from tests.fuzz.registry import HARNESSES
from tests.fuzz.replicas import said_here

EXECUTIONS = 500
SLOW = {"config": 200, "learned": 50, "heard": 100, "frames": 100}
"""Each of these takes milliseconds."""
MEASURED_EVERY = 64

each_harness = pytest.mark.parametrize("harness", HARNESSES.values(), ids=HARNESSES)


@each_harness
def test_the_corpus_breaks_nothing(harness: Harness) -> None:
    seeds = harness.seeds()
    assert seeds, f"tests/fuzz/corpus/{harness.name} is empty: fuzzing starts from seeds"
    for data in seeds:
        check(harness, data)
        check(harness, data, Measure.MEMORY)


@each_harness
def test_mutations_of_it_break_nothing(harness: Harness) -> None:
    for number, data in enumerate(islice(inputs(harness), SLOW.get(harness.name, EXECUTIONS))):
        check(harness, data, Measure.NOTHING if number % MEASURED_EVERY else Measure.MEMORY)


def test_what_gateways_say_to_one_another_is_in_the_corpus_as_this_version_says_it() -> None:
    for name, said in said_here().items():
        kept = HARNESSES[name].seeds()
        assert all(data in kept for data in said), f"write into tests/fuzz/corpus/{name} what said_here() has"
