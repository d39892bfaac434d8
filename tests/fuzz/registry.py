"""Every harness, by its name. To add one: write its `read` beside these, add its entry, put seeds in `corpus/NAME/`."""

from __future__ import annotations

from tests.fuzz import answers, bodies
from tests.fuzz.harness import Harness

__all__ = ["HARNESSES"]

HARNESSES: dict[str, Harness] = {harness.name: harness for harness in (*bodies.HARNESSES, *answers.HARNESSES)}
