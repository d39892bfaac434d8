"""What was used before this gateway was started, so that limits of a day and a month go on from it?"""

from __future__ import annotations

from gateway.usage.thread import DatabaseThread
from gateway.usage.written import used_on
from policies.limits.quotas import DAY_S, Quotas

Used = list[tuple[int, str, int, int]]
"""Since when (seconds since the epoch), the tenant, its requests, and its prompt and output tokens."""


async def used_before(database: DatabaseThread, quotas: Quotas | None, now_s: float) -> Used:
    """Of the longest window that has a limit, and of the one before it. Read by days, as a month of all may take
    longer than one statement should."""
    window_s = max(DAY_S, quotas.longest_s if quotas is not None else 0.0)
    first = (now_s // window_s - 1) * window_s // DAY_S
    found: Used = []
    for day in range(int(first), int(now_s // DAY_S) + 1):
        found += await database.do(used_on, day)
    return found
