"""Who used how much, and when? Sums of stored usage, grouped by the dimensions of a query."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

from gateway.config.sections.services import PriceConfig
from gateway.telemetry.access_log import hidden
from gateway.usage.database import Database
from gateway.usage.written import SUMMED, storable

ROWS_MAX = 100_000
Data = dict[str, Any]
_COLUMNS = {
    "hour": "hour_s", "day": "hour_s / 86400 * 86400", "month": "month", "group": "tenant", "tenant": "tenant",
    "key": "key_label", "app": "app", "user": "end_user", "model": "model",
}  # fmt: skip
"""SQL expression of each dimension; that of the month depends on the kind of database."""
DIMENSIONS = tuple(_COLUMNS)


class InvalidUsageQuery(ValueError):
    """A query that cannot be answered. The message says why not, and what can be asked."""


class UsageQuery:
    """A time span and the dimensions to group by."""

    def __init__(self, since: str, until: str | None, by: Sequence[str], now: datetime) -> None:
        """Parse a query. Raise InvalidUsageQuery.

        `since` and `until`: 30m, 24h or 7d before `now`, today, a time of today such as 8:00, a day or a time.
        """
        for name in by:
            if name not in DIMENSIONS:
                raise InvalidUsageQuery(f"by: {name[:50]!r} is none of: {', '.join(DIMENSIONS)}")
        if len(set(by)) < len(by):
            raise InvalidUsageQuery("by: names the same thing twice")
        self.by = tuple(by)
        self.since = _moment(since, now)
        self.until = now if until is None else _moment(until, now)
        if self.since > self.until:
            raise InvalidUsageQuery(f"since: {_text(self.since)} is after {_text(self.until)}")

    def describe(self) -> str:
        return f"from {_text(self.since)} to {_text(self.until)}"

    @property
    def hours_s(self) -> tuple[int, int]:
        """Begin of the first hour and end of the last hour that touch the span, in seconds since the epoch."""
        return int(self.since.timestamp()) // 3600 * 3600, -int(-self.until.timestamp() // 3600) * 3600


def _moment(text: str, now: datetime) -> datetime:
    if found := re.fullmatch(r"([0-9]{1,5})([mhd])", text):
        return (
            now - int(found[1]) * {"m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1)}[found[2]]
        )
    if text == "today":
        return now.replace(hour=0, minute=0, second=0, microsecond=0)
    if re.fullmatch(r"[0-9]:[0-9]{2}|[0-9]{2}:[0-9]{2}", text):
        text = f"{now:%Y-%m-%d}T{text:0>5}"
    try:
        moment = datetime.fromisoformat(text)
        moment = (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).astimezone(UTC)
        _ = moment + timedelta(hours=1)  # the end of its hour must be a date, too
        return moment
    except (ValueError, OverflowError):
        raise InvalidUsageQuery(
            f"{text[:50]!r} is no time: write 24h, 7d, today, 8:00, a day such as 2027-01-31 (by UTC) or "
            "2027-01-31T12:00Z"
        ) from None


def _text(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%MZ}"


class UsageRow:
    """Usage of one group of the query, such as a tenant, user or model."""

    def __init__(self, by: tuple[str, ...], prices: Mapping[str, PriceConfig]) -> None:
        self.by = by
        self.sums = dict.fromkeys(SUMMED, 0)
        self._prices = prices
        self._cost = 0.0
        self._unpriced_tokens = 0
        """Tokens of models without a price, which are not in the cost."""

    @property
    def tokens(self) -> int:
        return self.sums["input_tokens"] + self.sums["output_tokens"]

    def add(self, model: str, amounts: Sequence[int]) -> None:
        """Add one row of the table, in the order of `SUMMED`."""
        added = dict(zip(SUMMED, map(int, amounts), strict=True))
        for name, amount in added.items():
            self.sums[name] += amount
        prompt, cached, output = (added[f"{kind}_tokens"] for kind in ("input", "cached", "output"))
        if (price := self._prices.get(model)) is None:
            self._unpriced_tokens += prompt + output
        else:
            self._cost += ((prompt - cached) * price.input + cached * price.of_cached + output * price.output) / 1e6

    def measures(self) -> Data:
        """Return the sums, and the cost where there are prices; the cost is None if no token has a price."""
        found: Data = {**self.sums}
        found["queue_s"] = round(found.pop("queue_us") / 1e6, 3)
        found["engine_s"] = round(found.pop("engine_ms") / 1e3, 3)
        if self._prices:
            cost = None if self._unpriced_tokens == self.tokens > 0 else round(self._cost, 6)
            found |= {"cost": cost, "unpriced_tokens": self._unpriced_tokens}
        return found


class UsageReport:
    """The answer: its rows, the largest use first (within each hour or day), and their total."""

    def __init__(self, query: UsageQuery, rows: list[UsageRow], total: UsageRow) -> None:
        self.query = query
        self.rows = rows
        self.total = total

    def as_dicts(self) -> list[Data]:
        return [{**dict(zip(self.query.by, row.by, strict=True)), **row.measures()} for row in self.rows]

    def as_json(self) -> str:
        since, until = (_text(datetime.fromtimestamp(at_s, UTC)) for at_s in self.query.hours_s)
        total = self.total.measures()
        answer = {"since": since, "until": until, "by": self.query.by, "rows": self.as_dicts(), "total": total}
        return json.dumps(answer, indent=2) + "\n"

    def as_table(self) -> str:
        """Return a table for people: numbers in groups of three, and the total last."""
        from simulation.report import columns  # loaded for people only

        labels = len(self.query.by)
        lines = [
            [*self.query.by, *self.total.measures()],
            *([each or "-" for each in row.by] + _words(row) for row in self.rows),
        ]
        if labels:
            lines.append(["total", *[""] * (labels - 1), *_words(self.total)])
        return columns(lines, left=range(labels)) + "\n"


def _words(row: UsageRow) -> list[str]:
    return ["-" if value is None else f"{value:,}" for value in row.measures().values()]


def read(
    database: Database,
    query: UsageQuery,
    prices: Mapping[str, PriceConfig],
    tenant: str | None = None,
    around: Mapping[str, Sequence[str]] | None = None,
    user: str | None = None,
) -> UsageReport:
    """Answer a query for one tenant or user or for all. `around`: groups of each tenant, which its usage counts in.

    Raise InvalidUsageQuery if the answer is too long, and what `Database.transaction` raises.
    """
    groups = [f"by_{name}" for name in query.by]
    with database.transaction(writes=False) as step:
        labels = [f"{step.kind.month if name == 'month' else _COLUMNS[name]} AS by_{name}" for name in query.by]
        statement = (
            f"SELECT {', '.join([*labels, 'model', *(f'SUM({name})' for name in SUMMED)])} FROM fairgate_usage "
            f"WHERE {'hour_s >= %s AND hour_s < %s' if tenant is None else _of_tenant(query)} "
            f"{'' if user is None else 'AND end_user = %s '}"
            f"GROUP BY {', '.join([*groups, 'model'])} LIMIT {ROWS_MAX + 1}"
        )
        asked = (*(query.hours_s if tenant is None else (tenant,)), *(() if user is None else (hidden(user),)))
        found = step.ask(statement, asked)
    if len(found) > ROWS_MAX:
        raise InvalidUsageQuery(f"the answer has more than {ROWS_MAX} rows: ask for a shorter time, or by less")
    count = len(query.by)
    rows: dict[tuple[str, ...], UsageRow] = {}
    total = UsageRow((), prices)
    for one in found:
        each = [_labels(name, value, around or {}) for name, value in zip(query.by, one[:count], strict=True)]
        for row in [total, *(rows.setdefault(by, UsageRow(by, prices)) for by in product(*each) if by)]:
            row.add(one[count], one[count + 1 :])
    if not count:
        return UsageReport(query, [total], total)
    times = [at for at, name in enumerate(query.by) if name in ("hour", "day", "month")]

    def place(row: UsageRow) -> tuple[object, ...]:
        return [row.by[at] for at in times], -row.tokens, -row.sums["requests"], row.by

    return UsageReport(query, sorted(rows.values(), key=place), total)


def read_tenant_usage(
    database: Database, tenant: str, prices: Mapping[str, PriceConfig], now: datetime
) -> tuple[dict[str, Data], list[Data]]:
    """Return one tenant's usage of the last 24 hours and 30 days, and by hour."""

    def since(text: str, *by: str) -> UsageReport:
        return read(database, UsageQuery(text, None, by, now), prices, storable(tenant))

    hours = since("24h", "hour")
    return {"day": hours.total.measures(), "month": since("30d").total.measures()}, hours.as_dicts()


def _of_tenant(query: UsageQuery) -> str:
    """Return the SQL condition for one tenant's rows. Each hour is named, so that no other tenant's row is scanned."""
    return f"hour_s IN ({', '.join(map(str, range(*query.hours_s, 3600)))}) AND tenant = %s"


def _labels(name: str, value: object, around: Mapping[str, Sequence[str]]) -> Sequence[str]:
    if name == "group":
        return around.get(str(value)) or ("",)
    if name == "hour":
        return (_text(datetime.fromtimestamp(int(str(value)), UTC)),)
    if name == "day":
        return (f"{datetime.fromtimestamp(int(str(value)), UTC):%Y-%m-%d}",)
    return (str(value),)
