"""Usage that gateways write down, and the same as their access logs have it."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime
from typing import Any

from pydantic import SecretStr

from gateway.config.sections.keys import hash_key
from gateway.config.sections.services import UsageConfig
from gateway.storage.store_errors import StoreRefused, StoreUnavailable
from gateway.usage.database import Database
from gateway.usage.usage_report import UsageQuery, read
from tests.gateway.capture import answer
from tests.gateway.live import Live
from tests.waiting import eventually

OK = answer(b'{"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}')
TENANTS: list[dict[str, Any]] = [
    {"name": "alice", "keys": [{"hash": hash_key("k"), "apps": ["chat", "batch"]}]},
    {"name": "bob", "keys": [hash_key("b")]},
]
MEASURES = ("requests", "refused", "input_tokens", "cached_tokens", "output_tokens", "wasted_tokens")
EVERYTHING = ("day", "tenant", "app", "user", "model")


def database_at(url: str, *, makes: bool = True) -> Database:
    return Database(UsageConfig(url=SecretStr(url)), makes=makes)


def counted(url: str, *by: str) -> dict[tuple[str, ...], tuple[float, ...]]:
    """What is written down, by these; nothing if nobody has written anything."""
    with closing(database_at(url, makes=False)) as database:
        try:
            report = read(database, UsageQuery("2d", None, by or EVERYTHING, datetime.now(UTC)), {})
        except (StoreRefused, StoreUnavailable):
            return {}
    return {row.by: (*(row.sums[name] for name in MEASURES), row.sums["queue_us"] / 1e6) for row in report.rows}


def requests_in(url: str) -> int:
    return int(sum(sums[0] for sums in counted(url).values()))


async def written(live: Live) -> None:
    """Until nothing waits."""
    usage = live.gateway.usage
    assert usage is not None

    async def nothing_waits() -> bool:
        return usage.fault is None and not (await live.metrics())["fairgate_usage_waiting_sums",]

    await eventually(nothing_waits)


FAILURES = "fairgate_background_failures_total"
