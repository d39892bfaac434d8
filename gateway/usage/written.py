"""The tables of usage: batches are added to them, each once, and earlier usage is read from them.

A fault can hide whether a batch was committed, so its writer sends it again. Each writer numbers its batches upwards,
and `fairgate_writers` has the last number of each. One transaction stores the number and adds the sums, and only if
the number is larger than the stored one. So a batch counts once, however often it is sent.
"""

from __future__ import annotations

from dataclasses import astuple, fields
from math import isfinite
from typing import Any, Final, NamedTuple

from gateway.telemetry.access_log import hidden
from gateway.usage.counts import HOUR_S, OTHER_USERS, OTHERS, Key, Sums, UsageTotals
from gateway.usage.database import Database, Transaction
from gateway.usage.thread import DatabaseThread
from policies.limits.quotas import Quotas, UsageBucket
from policies.request import ServiceTokens

DAY_S: Final = 86_400
WRITERS_KEPT_S: Final = 30 * DAY_S
SUMMED = tuple(field.name for field in fields(UsageTotals))
_KEY = ("hour_s", "tenant", "app", "end_user", "model", "key_label")
_ADD = (
    f"INSERT INTO fairgate_usage ({', '.join((*_KEY, *SUMMED))}) "
    f"VALUES ({', '.join(['%s'] * len((*_KEY, *SUMMED)))}) ON CONFLICT ({', '.join(_KEY)}) DO UPDATE SET "
    + ", ".join(f"{name} = fairgate_usage.{name} + excluded.{name}" for name in SUMMED)
)
_IS_NEW = (
    "INSERT INTO fairgate_writers (writer, batch, written_s) VALUES (%s, %s, %s) ON CONFLICT (writer) DO UPDATE "
    "SET batch = excluded.batch, written_s = excluded.written_s WHERE fairgate_writers.batch < excluded.batch"
)
_USED = (
    "SELECT hour_s / {part_s} * {part_s} AS part, tenant, model, SUM(requests - refused), SUM(input_tokens), "
    "SUM(cached_tokens), SUM(output_tokens), SUM(engine_ms) "
    "FROM fairgate_usage WHERE hour_s >= %s AND hour_s < %s GROUP BY part, tenant, model"
)


class UsageBatch(NamedTuple):
    """Usage that one gateway writes at once. `number` identifies it: the gateway's requests up to its end."""

    writer: str
    number: int
    sums: Sums


def _row(key: Key, totals: UsageTotals) -> tuple[Any, ...]:
    """Return the row that adds a sum."""
    hour, tenant, app, user, model, label = key
    end_user = OTHERS if user == OTHER_USERS else hidden(user)
    names = (storable(tenant), storable(app), end_user, storable(model), storable(label))
    return (hour * HOUR_S, *names, *astuple(totals))


def storable(text: str) -> str:
    """Replace characters that PostgreSQL cannot store."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def add_batch(database: Database, batch: UsageBatch, now_s: int) -> int:
    """Add a batch unless it was added before, which is not known after a fault.

    Return the number of the writer's previous batch, 0 without one. The number is too small if an older copy has
    replaced the database.
    """
    with database.transaction() as step:
        before = step.ask("SELECT batch FROM fairgate_writers WHERE writer = %s", (batch.writer,))
        if step.do(_IS_NEW, (batch.writer, batch.number, now_s)):
            add_sums(step, batch.sums)
    return int(before[0][0]) if before else 0


def add_sums(step: Transaction, sums: Sums) -> None:
    """Add sums in one order for all gateways, so that two that write equal rows do not deadlock."""
    step.do_each(_ADD, sorted(_row(key, totals) for key, totals in sums.items()))


def forget(database: Database, now_s: int, keep_days: int) -> None:
    """Delete hours older than `keep_days`, and writers that have been idle for WRITERS_KEPT_S."""
    with database.transaction() as step:
        step.do("DELETE FROM fairgate_usage WHERE hour_s < %s", (now_s - keep_days * DAY_S,))
        step.do("DELETE FROM fairgate_writers WHERE written_s < %s", (now_s - WRITERS_KEPT_S,))


def used_between(database: Database, since_s: int, until_s: int, part_s: int) -> list[UsageBucket]:
    """Return the usage of each tenant and model between two times, in buckets of `part_s` seconds."""
    with database.transaction(writes=False) as step:
        found = step.ask(_USED.format(part_s=part_s), (since_s, until_s))
    return [
        UsageBucket(
            part + part_s, tenant, model, int(requests), ServiceTokens(int(prompt), int(output), int(cached)), int(ms)
        )
        for part, tenant, model, requests, prompt, cached, output, ms in found
        if isinstance(tenant, str) and isinstance(model, str) and isfinite(requests + prompt + cached + output + ms)
    ]


async def used_before(database: DatabaseThread, quotas: Quotas | None, now_s: float) -> list[UsageBucket]:
    """Return the usage within the longest limit's window: by hours in its first day and in the last two days, by days
    between. Each day is a statement of its own, since a month may take longer than a statement should.
    """
    today = int(now_s // DAY_S)
    first = today if quotas is None else int(quotas.longest.window.since_s(now_s) // DAY_S)
    found = list[UsageBucket]()
    for day in range(first, today + 1):
        part_s = HOUR_S if day in (first, today - 1, today) else DAY_S
        found += await database.do(used_between, day * DAY_S, (day + 1) * DAY_S, part_s)
    return found
