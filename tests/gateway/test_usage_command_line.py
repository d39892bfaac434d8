"""What an operator asks of what was counted, with and without a gateway, and what is answered to a bad question."""

from __future__ import annotations

import json
import re
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gateway.config.contradictions import contradictions
from gateway.config.sections.services import PriceConfig
from gateway.telemetry.access_log import hidden
from gateway.usage.counts import UsageTotals
from gateway.usage.usage_report import InvalidUsageQuery, UsageQuery, read
from gateway.usage.written import UsageBatch, add_batch
from tests.commands import run
from tests.gateway.capture import Upstream, replies
from tests.gateway.live import CHAT, MODEL, Starter, chat
from tests.kit.served import config_file
from tests.kit.usage import OK, database_at, written

NOW = datetime(2027, 2, 3, 14, 30, tzinfo=UTC)
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
def filled(tmp_path: Path) -> str:
    """Three hours of two days."""
    url = str(tmp_path / "usage.db")
    hour = int(NOW.timestamp()) // 3600
    many = UsageTotals(
        requests=1500, input_tokens=2_000_000, cached_tokens=1_000_000, output_tokens=500_000, queue_us=2_500_000
    )
    sums = {
        (hour, "alice", "chat", "ann", "large", "nightly"): many,
        (hour, "bob", "chat", "", "small", ""): UsageTotals(requests=2, input_tokens=30, output_tokens=10),
        (hour - 1, "bob", "chat", "", "small", ""): UsageTotals(
            requests=1, input_tokens=3, output_tokens=1, wasted_tokens=4, refused=1
        ),
        (hour - 24, "alice", "batch", "ann", "small", ""): UsageTotals(requests=1, input_tokens=5, output_tokens=1),
        (hour, "", "", "", "", ""): UsageTotals(requests=7, refused=7),
    }
    with closing(database_at(url)) as database:
        add_batch(database, UsageBatch("w", 1, sums), int(NOW.timestamp()))
    return url


def asked(url: str, since: str, *by: str, until: str | None = None, **prices: PriceConfig) -> Any:
    with closing(database_at(url, makes=False)) as database:
        return read(database, UsageQuery(since, until, by, NOW), prices)


def rows(url: str, since: str, *by: str, **fields: Any) -> list[tuple[Any, ...]]:
    return [(*row.by, row.sums["requests"], row.tokens) for row in asked(url, since, *by, **fields).rows]


def test_rows_are_by_what_is_asked_in_the_order_of_time_and_the_largest_first(filled: str) -> None:
    assert rows(filled, "today", "tenant") == [("alice", 1500, 2_500_000), ("bob", 3, 44), ("", 7, 0)]
    assert rows(filled, "2d", "app", "tenant") == [
        ("chat", "alice", 1500, 2_500_000), ("chat", "bob", 3, 44), ("batch", "alice", 1, 6), ("", "", 7, 0),
    ]  # fmt: skip
    assert rows(filled, "2d", "tenant", "key") == [
        ("alice", "nightly", 1500, 2_500_000), ("bob", "", 3, 44), ("alice", "", 1, 6), ("", "", 7, 0),
    ]  # fmt: skip
    assert rows(filled, "2027-02-02", "user", until="2027-02-03") == [(hidden("ann"), 1, 6)]
    assert rows(filled, "7d") == rows(filled, "99999d") == [(1511, 2_500_050)], "also from before time began"
    assert rows(filled, "today", "key", "month")[0] == ("nightly", "2027-02", 1500, 2_500_000)
    assert rows(filled, "today", "key", "app", "tenant")[0] == ("nightly", "chat", "alice", 1500, 2_500_000)
    assert rows(filled, "2d", "hour", "tenant")[:2] == [
        ("2027-02-02T14:00Z", "alice", 1, 6), ("2027-02-03T13:00Z", "bob", 1, 4),
    ]  # fmt: skip
    assert rows(filled, "2d", "day") == [("2027-02-02", 1, 6), ("2027-02-03", 1510, 2_500_044)]


@pytest.mark.parametrize(
    ("since", "until_text", "requests"),
    [
        ("1h", None, 1510),  # 13:30 is in the hour that began at 13:00
        ("0h", None, 1509),
        ("24h", None, 1511),
        ("23h", None, 1510),
        ("2027-02-03T14:00Z", None, 1509),
        ("2027-02-03T15:00+01:00", None, 1509),
        ("2d", "1h", 2),
        ("31m", None, 1510),
        ("8:00", None, 1510),
        ("08:00", "14:00", 1),
        ("2d", "2027-02-03T13:00Z", 1),
    ],
)
def test_times_are_whole_hours_that_touch_what_is_asked(
    filled: str, since: str, until_text: str | None, requests: int
) -> None:
    assert asked(filled, since, until=until_text).total.sums["requests"] == requests


@pytest.mark.parametrize(
    ("since", "until_text", "by", "said"),
    [
        ("yesterday", None, (), "'yesterday' is no time: write 24h, 7d, today"),
        ("99999999d", None, (), "is no time"),
        ("9999999-01-01", None, (), "is no time"),
        ("1h", "2h", (), "is after"),
        ("1h", None, ("tenant", "colour"), "'colour' is none of: hour, day, month, group, tenant, key, app, user"),
        ("1h", None, ("tenant", "tenant"), "names the same thing twice"),
    ],
)
def test_what_cannot_be_asked(since: str, until_text: str | None, by: tuple[str, ...], said: str) -> None:
    with pytest.raises(InvalidUsageQuery, match=re.escape(said)):
        UsageQuery(since, until_text, by, NOW)


def test_what_costs_is_said_where_prices_are_known(filled: str) -> None:
    large = PriceConfig(input=2.0, cached=0.5, output=10.0)

    def costs(*by: str, **prices: PriceConfig) -> list[Any]:
        report = asked(filled, "today", *by, **prices)
        return [row.measures()["cost"] for row in (*report.rows, report.total)]

    assert costs("tenant", large=large) == [7.5, None, 0.0, 7.5]
    total = asked(filled, "today", large=large).total.measures()
    assert total["unpriced_tokens"] == 44, "what has no price is counted, and said"
    assert costs(large=large, small=PriceConfig(input=1e6, output=0.0))[-1] == 7.5 + 33
    assert costs("tenant", large=PriceConfig(input=2.0, output=0.0))[0] == 4.0
    assert "cost" not in asked(filled, "today", "tenant").as_json()


TABLE = """\
tenant  model  requests  refused  input_tokens  cached_tokens  output_tokens  wasted_tokens  queue_s  engine_s  cost  unpriced_tokens
------  -----  --------  -------  ------------  -------------  -------------  -------------  -------  --------  ----  ---------------
alice   large     1,500        0     2,000,000      1,000,000        500,000              0      2.5       0.0   7.5                0
bob     small         3        1            33              0             11              4      0.0       0.0     -               44
-       -             7        7             0              0              0              0      0.0       0.0   0.0                0
total             1,510        8     2,000,033      1,000,000        500,011              4      2.5       0.0   7.5               44
"""  # noqa: E501


def test_the_formats_say_the_same(filled: str) -> None:
    report = asked(filled, "today", "tenant", "model", large=PriceConfig(input=2.0, cached=0.5, output=10.0))
    assert report.as_table() == TABLE
    answered = json.loads(report.as_json())
    found = [(row["tenant"], row["input_tokens"], row["cost"]) for row in answered["rows"]]
    assert found == [("alice", 2_000_000, 7.5), ("bob", 33, None), ("", 0, 0.0)]
    assert (answered["since"], answered["until"]) == ("2027-02-03T00:00Z", "2027-02-03T15:00Z")
    assert answered["rows"][1]["wasted_tokens"] == answered["total"]["wasted_tokens"] == 4


async def test_the_command_and_the_listener_answer_alike(start: Starter) -> None:
    usage = {"url": str(start.directory / "usage.db"), "prices": {MODEL: {"input": 1.0, "output": 2.0}}}
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as without:
        got = await without.get("/usage", admin=True)
        assert (got.status, "has no `usage:`" in got.json["error"]) == (404, True)
    async with Upstream(replies(OK)) as upstream, start(upstream.url, usage=usage) as live:
        assert (await live.ask(CHAT, chat())).status == 200
        await written(live)
        got = await live.get("/usage?since=1h&by=tenant,model", admin=True)
        assert (got.status, got.json["rows"][0]["cost"]) == (200, 11e-6)
        bad = await live.get("/usage?by=colour", admin=True)
        assert (bad.status, "is none of" in bad.json["error"]) == (400, True)
    config = config_file(start.directory, NOWHERE, usage=usage)
    code, out, said = await run("usage", "-c", config, "--since", "1h", "--by", "tenant,model", "--json")
    assert (code, said) == (0, "")
    assert json.loads(out) == got.json
    code, out, _ = await run("usage", "-c", config, "--by", "model")
    assert (code, out.splitlines()[2].split()[:7]) == (0, [MODEL, "1", "0", "7", "4", "2", "0"])


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "Missing option '-c'"),
        (("-c", "{config}"), 2, "has no `usage:`, so nothing was counted"),
        (("-c", "{none}"), 2, "there is no such file: no gateway has written it yet"),
        (("-c", "{text}"), 2, "is not a database; move it away"),
        (("-c", "{gone}"), 1, "postgresql://127.0.0.1:1/x: connection failed"),
        (("-c", "{none}", "--since", "x"), 2, "'x' is no time"),
    ],
)
async def test_what_the_command_cannot_do(tmp_path: Path, arguments: tuple[str, ...], code: int, said: str) -> None:
    (tmp_path / "text").write_text("no database, but a text that is longer than the head of one" * 20)
    usage = {
        "config": None,
        "none": str(tmp_path / "none.db"),
        "text": str(tmp_path / "text"),
        "gone": "postgresql://u:hunter2@127.0.0.1:1/x",
    }
    files = {}
    for name, url in usage.items():
        (tmp_path / f"with-{name}").mkdir()
        files[name] = config_file(tmp_path / f"with-{name}", NOWHERE, usage=url)
    ended, out, errors = await run("usage", *(each.format(**files) for each in arguments))
    assert (ended, out) == (code, "")
    assert said in errors
    assert "hunter2" not in errors
    assert not (tmp_path / "none.db").exists()


def test_nobody_needs_to_be_in_the_file_where_keys_can_be_made(start: Starter) -> None:
    assert start.config(NOWHERE, tenants=[], usage="usage.db").tenants == ()
    assert [*contradictions(start.config(NOWHERE, tenants=[], usage="usage.db"))] == []


def test_groups_have_what_is_inside_them_and_months_are_those_of_the_calendar(filled: str) -> None:
    around = {"alice": ("physics", "science"), "bob": ("science",)}
    for since, until_text in (("2027-01-31", None), ("2026-11-30", "2027-03-01")):
        with closing(database_at(filled, makes=False)) as database:
            question = UsageQuery(since, until_text, ("month", "group"), NOW)
            report = read(database, question, {}, around=around)
        alice, bob = (1501, 2_500_006), (3, 44)
        assert {row.by: (row.sums["requests"], row.tokens) for row in report.rows} == {
            ("2027-02", "science"): (alice[0] + bob[0], alice[1] + bob[1]),
            ("2027-02", "physics"): alice,
            ("2027-02", ""): (7, 0),
        }
        assert report.total.sums["requests"] == 1501 + 3 + 7, "each counts once"


def test_a_month_ends_with_its_last_hour(tmp_path: Path) -> None:
    begin = int(datetime(2027, 1, 1, tzinfo=UTC).timestamp()) // 3600
    sums = {(begin + hour, "a", "", "", "", ""): UsageTotals(requests=1) for hour in (0, 743, 744, 745, 746)}
    with closing(database_at(str(tmp_path / "usage.db"))) as database:
        add_batch(database, UsageBatch("w", 1, sums), 0)
    assert rows(str(tmp_path / "usage.db"), "2027-01-01", "month", until="2027-03-01") == [
        ("2027-01", 2, 0), ("2027-02", 3, 0),
    ]  # fmt: skip
