"""Usage before this gateway was started, from which limits of a day and a month resume."""

from __future__ import annotations

from typing import Final

from gateway.usage.counts import HOUR_S
from gateway.usage.thread import DatabaseThread
from gateway.usage.written import used_between
from policies.limits.quotas import Quotas, Used

DAY_S: Final = 86_400


async def used_before(database: DatabaseThread, quotas: Quotas | None, now_s: float) -> list[Used]:
    """Return the usage within the longest limit's window: by hours in its first day and in the last two days, by days
    between. Each day is a statement of its own, since a month may take longer than a statement should.
    """
    today = int(now_s // DAY_S)
    first = today if quotas is None else int(quotas.longest.window.since_s(now_s) // DAY_S)
    found = list[Used]()
    for day in range(first, today + 1):
        part_s = HOUR_S if day in (first, today - 1, today) else DAY_S
        found += await database.do(used_between, day * DAY_S, (day + 1) * DAY_S, part_s)
    return found
