"""Every harness, by its name. To add one: write its `read` beside these, add its entry, put seeds in `corpus/NAME/`."""

from __future__ import annotations

from tests.fuzz import answers, bodies, files, heads, replicas
from tests.fuzz.harness import Harness

ROOMS = (heads, bodies, answers, replicas, files)
HARNESSES: dict[str, Harness] = {harness.name: harness for room in ROOMS for harness in room.HARNESSES}
