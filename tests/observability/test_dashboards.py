"""Every query of every dashboard finds what it asks for in a real Prometheus that scrapes a gateway under load."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.config.sections.keys import hash_key
from tests.gateway.live import SMALL, Live, Starter, chat, simulated
from tests.observability.prometheus import Prometheus, scraping
from tests.ports import free_port
from tests.redis_server import RedisServer
from tests.waiting import WAIT_S

GRAFANA = Path(__file__).parents[2] / "deploy/grafana"
TENANTS = ("ann", "bob")
ENGINE = replace(SMALL, max_num_seqs=2)


def dashboards() -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((GRAFANA / "dashboards").glob("*.json"))}


def queries() -> list[tuple[str, str]]:
    """Each with its panel, as Grafana asks with all pools chosen."""
    return [
        (f"{name}: {panel['title']}", target["expr"].replace("$__rate_interval", "5m").replace("$pool", ".*"))
        for name, board in dashboards().items()
        for panel in board["panels"]
        for target in panel["targets"]
    ]


def test_the_dashboards_are_what_the_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("make_dashboards", GRAFANA / "make.py")
    assert spec is not None
    assert spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = make
    spec.loader.exec_module(make)
    files = make.files()
    assert {path.name for path in files} == {f"{name}.json" for name in dashboards()}
    for path, text in files.items():
        assert path.read_text() == text, "run: python deploy/grafana/make.py"


def test_dashboards_are_sound() -> None:
    boards = dashboards()
    assert {board["uid"] for board in boards.values()} == set(boards)
    for board in boards.values():
        variables = {one["name"] for one in board["templating"]["list"]}
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}
        assert len(places) == len(ids), "no panel lies on another"
        text = json.dumps(board["panels"])
        assert set(re.findall(r"\$\{?([a-z]+)", text)) <= variables
        for panel in board["panels"]:
            assert panel["datasource"]["uid"] == "${datasource}"


class Load:
    """Both tenants ask for more than the engines can take, one of them also for what is wrong."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._tasks = [asyncio.create_task(self._keep_asking(tenant)) for tenant in TENANTS for _ in range(10)]

    async def _keep_asking(self, tenant: str) -> None:
        talk = "the same beginning of every prompt " * 20
        for number in range(100_000):
            body = chat(talk, stream=number % 2 == 0, max_tokens=20, ignore_eos=True)
            if tenant == "bob" and number % 4 == 3:
                body["max_tokens"] = -1
            await self._live.ask("/v1/chat/completions", body, key=tenant)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def test_every_panel_shows_something(start: Starter, tmp_path: Path) -> None:
    tenants = [{"name": name, "keys": [hash_key(name)], "group": "team"} for name in TENANTS]
    async with RedisServer() as redis, simulated(ENGINE) as one, simulated(ENGINE) as two:
        fields = {
            "state": redis.url,
            "usage": str(tmp_path / "usage.db"),
            "groups": [{"name": "team", "guaranteed_share": 0.5, "max_share": 0.9}],
            "tracing": {"endpoint": f"http://127.0.0.1:{free_port()}", "sample_ratio": 1},
        }
        async with start(one.url, two.url, tenants=tenants, **fields) as live, scraping(live) as prometheus:
            load = Load(live)
            try:
                for panel, query in queries():
                    found = await prometheus.finds(query)
                    assert all(value >= 0 for _, value in found), panel
                await shares_add_up(prometheus)
            finally:
                await load.end()


async def shares_add_up(prometheus: Prometheus) -> None:
    (received, due) = (query for panel, query in queries() if "Share received" in panel)
    for query in (received, due):
        shares: dict[str, float] = {}
        async with asyncio.timeout(WAIT_S):
            while set(shares) != set(TENANTS):
                shares = {labels["tenant"]: value for labels, value in await prometheus.finds(query)}
        assert sum(shares.values()) == pytest.approx(1, abs=0.01)
