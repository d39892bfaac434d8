"""What was used before this gateway was started, so that limits of a day and a month go on from it?"""

from __future__ import annotations

from gateway.usage.thread import DatabaseThread
from gateway.usage.written import used_on
from policies.limits.quotas import DAY_S, MONTH_S, Quotas

Used = list[tuple[int, str, str, int, int, int]]
"""Since when (seconds since the epoch), tenant and model, its requests, its prompt and output tokens, and its
milliseconds at engines."""


async def used_before(database: DatabaseThread, quotas: Quotas | None, now_s: float) -> Used:
    """Of the longest window that has a limit, and of the one before it: the last two days, and what was before them by
    months. Read by days, as a month may take longer than one statement should."""
    window_s = max(DAY_S, quotas.longest_s if quotas is not None else 0.0)
    first, today = int((now_s // window_s - 1) * window_s // DAY_S), int(now_s // DAY_S)
    sums: dict[tuple[int, str, str], tuple[int, int, int]] = {}
    for day in range(first, today + 1):
        since_s = int(day * DAY_S if day >= today - 1 else day * DAY_S // MONTH_S * MONTH_S)
        for tenant, model, requests, tokens, engine_ms in await database.do(used_on, day):
            before = sums.get((since_s, tenant, model), (0, 0, 0))
            sums[since_s, tenant, model] = before[0] + requests, before[1] + tokens, before[2] + engine_ms
    return [(*name, *used) for name, used in sums.items()]
