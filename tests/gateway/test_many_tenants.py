"""A reload with many tenants keeps no stream waiting: whatever takes time is done beside the loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from gateway.config.sections.keys import hash_key
from tests.gateway.live import simulated
from tests.kit.reloading import reloadable

TENANTS = 1000


def many(weight: float) -> list[dict[str, Any]]:
    """One of them has this weight."""
    return [
        {
            "name": f"tenant-{number}",
            "weight": weight if number == 77 else 2,
            "keys": [hash_key(str(number))],
            "quota": {"concurrent": 100},
        }
        for number in range(TENANTS)
    ]


@contextmanager
def calls_of_turns() -> Iterator[Callable[[], int]]:
    """How many functions has this thread called in the longest turn of its loop?"""
    loop = asyncio.get_running_loop()
    most = calls = 0

    def turn() -> None:
        nonlocal most, calls, next_turn
        most, calls = max(most, calls), 0
        next_turn = loop.call_later(0.001, turn)

    def called(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    next_turn: asyncio.Handle = loop.call_soon(turn)
    sys.setprofile(called)
    try:
        yield lambda: max(most, calls)
    finally:
        sys.setprofile(None)
        next_turn.cancel()


async def test_no_turn_of_the_loop_looks_at_every_tenant(tmp_path: Path) -> None:
    async with simulated() as engine, reloadable(tmp_path, engine, tenants=many(3)) as gate:
        gate.write(tenants=many(4))
        with calls_of_turns() as calls:
            answer = await gate.post("/reload")
        assert answer.json["changes"] == ["tenants[tenant-77].weight: 3 -> 4"]
        assert calls() < 2 * TENANTS, "where each was looked at, with its settings, these were 400 for each"
