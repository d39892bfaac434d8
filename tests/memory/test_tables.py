"""What the bounds that follow from `memory_max` are made from is so: the bytes of an entry, and the sum."""

from __future__ import annotations

import pytest

from gateway.config.memory_bounds import (
    ALLOCATED,
    BASE_BYTES,
    BLOCK_BYTES,
    CONNECTION_BYTES,
    MEMORY_MAX,
    MEMORY_MAX_LEAST,
    READ_TIMES,
    TABLES,
    MemoryBounds,
)
from policies.orders.policy_entries import POLICIES
from tests.memory.tables import ONE_FILL, blocks, entry_bytes, flows

ENTRIES = 750
"""A table of hashes has grown just before, so that it is larger than it need be."""
TRUE = 0.75, 1.03
"""The least and the most that is measured of what is stated: versions of Python differ a little."""


@pytest.mark.parametrize("table", ONE_FILL)
def test_an_entry_takes_what_is_stated(table: str) -> None:
    assert ONE_FILL.keys() == TABLES.keys() - {"flows"}
    # The lesser of two: a thread that another test has left may allocate meanwhile.
    measured = min(entry_bytes(ONE_FILL[table], ENTRIES // TABLES[table].part) for _ in range(2))
    assert TRUE[0] <= measured / TABLES[table].entry_bytes <= TRUE[1], f"{measured:.0f} bytes"


@pytest.mark.parametrize("tenants", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_remembers_more_of_a_user_than_is_stated(policy: str, tenants: bool) -> None:
    measured = entry_bytes(flows(policy, tenants=tenants), ENTRIES) / TABLES["flows"].entry_bytes
    assert measured <= TRUE[1]
    if policy == "fairserve" and tenants:
        assert measured >= TRUE[0]


def test_a_block_takes_what_is_stated() -> None:
    assert TRUE[0] <= entry_bytes(blocks, ENTRIES) / BLOCK_BYTES <= TRUE[1]


@pytest.mark.parametrize("pools", [1, 2, 7, 100])
@pytest.mark.parametrize("memory_max", [MEMORY_MAX_LEAST, MEMORY_MAX, 1 << 30, 1 << 40])
def test_the_sum_of_all_bounds_is_memory_max(memory_max: int, pools: int) -> None:
    bounds = MemoryBounds(memory_max, pools)
    names = sum(one.entry_bytes * bounds.size(name) * (pools if one.of_pool else 1) for name, one in TABLES.items())
    total = (
        BASE_BYTES
        + ALLOCATED * (names + pools * bounds.blocks * BLOCK_BYTES)
        + bounds.bodies_bytes
        + bounds.reading_bytes
        + bounds.lines_bytes
        + bounds.results_bytes
        + bounds.connections * CONNECTION_BYTES
        + 2 * bounds.answers_bytes
    )
    assert total <= memory_max
    assert total >= 0.97 * memory_max, "what an operator gives is used"
    assert bounds.queue_bytes <= bounds.client_bodies_bytes <= bounds.bodies_bytes
    assert bounds.body_bytes <= bounds.body_bytes_most <= min(bounds.queue_bytes, bounds.reading_bytes)
    assert bounds.json_bytes <= bounds.json_bytes_most <= bounds.reading_bytes // READ_TIMES
