"""Days and months of a time zone as windows of limits. Each is one bucket, and only the present bucket counts."""

from __future__ import annotations

from datetime import date, datetime, time
from zoneinfo import ZoneInfo

from policies.limits.quotas import DAY_S
from policies.limits.sliding_counts import Window

_BACK_S = 3600.0
"""Seconds that the longest day and month gain when a clock is put back."""


def calendar_of(name: str) -> tuple[Window, Window]:
    """Return the windows of a day and of a month in a time zone."""
    zone = ZoneInfo(name)

    def day_bucket(at_s: float) -> int:
        return datetime.fromtimestamp(at_s, zone).toordinal()

    def day_begins_s(bucket: int) -> float:
        return datetime.combine(date.fromordinal(bucket), time(), zone).timestamp()

    def month_bucket(at_s: float) -> int:
        moment = datetime.fromtimestamp(at_s, zone)
        return moment.year * 12 + moment.month - 1

    def month_begins_s(bucket: int) -> float:
        return datetime(bucket // 12, bucket % 12 + 1, 1, tzinfo=zone).timestamp()

    days = Window(1, DAY_S + _BACK_S, day_bucket, day_begins_s)
    return days, Window(1, 31 * DAY_S + _BACK_S, month_bucket, month_begins_s)
