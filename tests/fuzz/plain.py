"""Fuzzing without coverage: seeded mutations of the corpus, so that the same run can be had again anywhere."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.fuzz.harness import Harness, grown

INPUT_BYTES_MAX = 4096
GROWN_EVERY = 16


def inputs(harness: Harness, seed: int = 0) -> Iterator[bytes]:
    """Mutated seeds without end; every sixteenth is a long one."""
    chance = random.Random(seed)
    pool = harness.seeds() or [b""]
    number = 0
    while True:
        number += 1
        data = chance.choice(pool)[:INPUT_BYTES_MAX]
        for _ in range(chance.randint(1, 4)):
            data = _mutated(data, harness.tokens, chance)
        if number % GROWN_EVERY == 0:
            yield grown(data, chance.randrange(INPUT_BYTES_MAX), chance.randint(1, 40), harness.grown_bytes)
        else:
            yield data


def _mutated(data: bytes, tokens: tuple[bytes, ...], chance: random.Random) -> bytes:
    at = chance.randint(0, len(data))
    until = min(len(data), at + chance.randint(1, 16))
    kind = chance.randrange(5)
    if kind == 0 and tokens:
        return data[:at] + chance.choice(tokens) + data[at:]
    if kind == 1:
        return data[:at] + data[until:]
    if kind == 2:
        return data[:at] + data[at:until] * chance.randint(2, 8) + data[until:]
    if kind == 3:
        return data[:at] + chance.randbytes(chance.randint(1, 4)) + data[until:]
    return data[:at] + (chance.choice(tokens) if tokens else b"") + data[until:]
