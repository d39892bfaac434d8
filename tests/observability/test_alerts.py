"""Every alert's expression finds the trouble that it is for, really caused, and its `for` waits as long as it says."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from gateway.config.load import load_config
from gateway.config.sections.keys import hash_key
from tests.gateway.capture import Upstream, answer, replies
from tests.gateway.live import MODEL, SMALL, Live, Starter, chat, long_chat, simulated, until
from tests.observability.prometheus import DEPLOYED, Prometheus, program, scraping
from tests.ports import free_port
from tests.redis_server import RedisServer

DOCS = Path(__file__).parents[2] / "docs/observability.md"
TENANTS = ("heavy", "light")
TIGHT = replace(SMALL, num_gpu_blocks=270)
"""Eight sequences do not fit in its KV cache."""
FAULTY = answer(b'{"error":{"message":"out of order"}}', status=b"500 Internal Server Error")


def rules() -> dict[str, Any]:
    (group,) = yaml.safe_load((DEPLOYED / "rules.yml").read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def test_the_rules_are_what_promtool_wants() -> None:
    subprocess.run([program("promtool"), "check", "rules", DEPLOYED / "rules.yml"], check=True)


def test_each_alert_waits_as_long_as_it_says(tmp_path: Path) -> None:
    text = Path(__file__).with_name("rules_test.yml").read_text()
    expected = tmp_path / "rules_test.yml"
    expected.write_text(text.replace("RULES", str(DEPLOYED / "rules.yml")))
    ran = subprocess.run([program("promtool"), "test", "rules", expected], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    fires = [
        one["alertname"]
        for case in yaml.safe_load(text)["tests"]
        for one in case["alert_rule_test"]
        if one["exp_alerts"]
    ]
    assert set(fires) == set(rules())


def test_the_docs_say_of_each_alert_what_to_do() -> None:
    headings = {line.removeprefix("### ") for line in DOCS.read_text().splitlines() if line.startswith("### ")}
    for name, rule in rules().items():
        assert name in headings
        assert rule["annotations"]["runbook"] == f"docs/observability.md#{name.lower()}"
    assert {name for name in headings if name.startswith("Fairgate")} == set(rules())


class Alerts:
    """Whether the expressions of the alerts find something, with windows that are as short as a test."""

    def __init__(self, prometheus: Prometheus) -> None:
        self._prometheus = prometheus
        self.found: set[str] = set()

    def expression(self, alert: str) -> str:
        return re.sub(r"\[\d+m\]", "[5s]", rules()[alert]["expr"])

    async def finds(self, alert: str, **labels: str) -> None:
        """The trouble, with these labels on it."""
        self.found.add(alert)
        await self._prometheus.finds(
            self.expression(alert), lambda found: any(labels.items() <= each.items() for each, _ in found)
        )


async def test_every_alert_finds_its_trouble(start: Starter, tmp_path: Path) -> None:
    tenants: list[dict[str, Any]] = [{"name": name, "keys": [hash_key(name)]} for name in TENANTS]
    tenants.append({"name": "thrifty", "keys": [hash_key("thrifty")], "quota": {"requests_per_day": 1}})
    async with (
        RedisServer() as redis,
        simulated(TIGHT, time_scale=0.1, models=("tight",)) as tight,
        simulated(replace(SMALL, max_num_seqs=2)) as slow,
        Upstream(replies(FAULTY)) as wrong,
    ):
        fields: dict[str, Any] = {
            "tenants": tenants,
            "state": redis.url,
            "usage": str(tmp_path / "usage.db"),
            "access_log": "/dev/full",
            "policy": "fcfs",
            "limits": {"queue_requests_max": 12},
            "overload": {"enter": 0.5, "leave": 0.4, "dwell_s": 0},
            "pools": [
                {"name": "dead", "models": ["dead"], "backends": [{"url": f"http://127.0.0.1:{free_port()}"}]},
                {"name": "wrong", "models": ["wrong"], "backends": [{"url": wrong.url, "name": "wrong"}]},
                {"name": "tight", "models": ["tight"], "backends": [{"url": tight.url, "name": "tight"}]},
                {
                    "name": "lost",
                    "models": ["lost"],
                    "backends": [{"url": "http://engines.test", "each_address": True}],
                },
                {"name": "slow", "models": [MODEL], "backends": [{"url": slow.url, "name": "slow"}]},
            ],
        }
        wrong_config = tmp_path / "wrong.yaml"
        wrong_config.write_text("no_such_field: 1")
        async with AsyncExitStack() as stack:
            async with start(load=partial(load_config, wrong_config), resolver=nowhere, **fields) as live:
                prometheus = await stack.enter_async_context(scraping(live))
                alerts = Alerts(prometheus)
                await prometheus.finds("up == 1")
                await alerts.finds("FairgateNoEngine", pool="dead")
                await alerts.finds("FairgateEngineDown", pool="dead")
                await alerts.finds("FairgateNameNotFound", name="engines.test")
                await gateway_troubles(alerts, live, redis, tmp_path)
                await engine_troubles(alerts, live, tight.url)
            await alerts.finds("FairgateDown", job="fairgate")
    assert alerts.found == set(rules())


async def nowhere(host: str) -> list[str]:
    raise OSError(f"no address for {host}")


async def gateway_troubles(alerts: Alerts, live: Live, redis: RedisServer, folder: Path) -> None:
    """Its config is wrong, its disk is full, its Redis and its database are gone."""
    assert (await live.gateway.reloading.run()).outcome == "refused"
    await alerts.finds("FairgateReloadFailed")
    assert (await live.ask("/v1/chat/completions", chat(max_tokens=1), key="thrifty")).status == 200
    await alerts.finds("FairgateBudgetNearlyUsed")
    await redis.kill()
    await alerts.finds("FairgateRedisLost")
    holder = sqlite3.connect(folder / "usage.db")
    try:
        holder.execute("BEGIN EXCLUSIVE")
        await live.ask("/v1/chat/completions", chat(max_tokens=1), key="light")
        await alerts.finds("FairgateUsageNotWritten")
    finally:
        holder.close()
    await alerts.finds("FairgateLogLinesLost")


async def engine_troubles(alerts: Alerts, live: Live, tight_url: str) -> None:
    """One answers with errors, one is filled by somebody who does not come through the gateway, one serves only those
    who came first."""
    async with asking() as ask:
        tight, wrong = ({**long_chat(), "model": model} for model in ("tight", "wrong"))
        for _ in range(8):
            ask(again_and_again(lambda: beside(live, tight_url, tight)))
        await alerts.finds("FairgatePreemptions", pool="tight", backend="tight")
        for _ in range(4):
            ask(again_and_again(lambda: live.ask("/v1/chat/completions", tight, key="light")))
        await alerts.finds("FairgateKvOverloaded", pool="tight")
    async with asking() as ask:
        ask(again_and_again(lambda: live.ask("/v1/chat/completions", wrong, key="heavy")))
        await alerts.finds("FairgateFailures", pool="wrong")
    async with asking() as ask:
        slow = live.gateway.pools[-1].dispatcher
        for _ in range(8):
            ask(live.ask("/v1/chat/completions", long_chat(), key="heavy"))
        await until(lambda: len(slow) == 8)
        for _ in range(8):
            ask(live.ask("/v1/chat/completions", long_chat(), key="light"))
        await alerts.finds("FairgateTenantStarved", pool="slow", tenant="light")
        for _ in range(8):
            ask(again_and_again(lambda: live.ask("/v1/chat/completions", long_chat(), key="heavy")))
        await alerts.finds("FairgateRefusals", pool="slow", reason="queue_full")


@asynccontextmanager
async def asking() -> AsyncIterator[Callable[[Coroutine[Any, Any, Any]], None]]:
    """What is asked goes on until the block ends."""
    tasks: list[asyncio.Task[Any]] = []

    def ask(what: Coroutine[Any, Any, Any]) -> None:
        tasks.append(asyncio.create_task(what))

    try:
        yield ask
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def again_and_again(ask: Callable[[], Awaitable[Any]]) -> None:
    """Until cancelled."""
    while True:
        await ask()
        await asyncio.sleep(0.05)  # what is refused at once is asked again without haste


async def beside(live: Live, engine_url: str, body: dict[str, Any]) -> None:
    """Ask an engine itself."""
    async with live.http.post(f"{engine_url}/v1/chat/completions", json=body) as response:
        await response.read()
