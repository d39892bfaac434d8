"""What an operator sees of groups and budgets: `check --shares`, metrics, the log."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

from gateway.config.model import Config
from gateway.config.sections.keys import hash_key
from gateway.pool.parts import parts_of
from tests.commands import run
from tests.gateway.capture import Upstream, replies
from tests.gateway.live import CHAT, Starter, chat, until
from tests.kit.batching import holding
from tests.kit.served import config_file
from tests.kit.usage import OK

GROUPS = [
    {"name": "science", "weight": 2, "guaranteed_share": 0.5}, {"name": "physics", "group": "science"},
    {"name": "law", "max_share": 0.6, "quota": {"tokens_per_day": 100}},
]  # fmt: skip
TENANTS: list[dict[str, Any]] = [
    {"name": "quarks", "group": "physics", "keys": [{"hash": hash_key("q"), "label": "nightly"}]},
    {"name": "leptons", "group": "physics", "weight": 2, "keys": [hash_key("l")]},
    {"name": "civil", "group": "law", "keys": [hash_key("c")]},
    {"name": "alone", "keys": [hash_key("a")], "quota": {"cost_per_month": 1}},
]


def parts(**fields: Any) -> dict[str, tuple[float, float, float]]:
    pools = [{"name": "p", "backends": [{"url": "http://127.0.0.1:1"}]}]
    found = parts_of(Config.model_validate({"pools": pools, "tenants": TENANTS, **fields}))
    return {name: (round(part.part, 4), part.floor, part.ceiling) for name, part in found.items()}


def test_the_parts_of_siblings_add_up_to_that_of_their_group() -> None:
    assert parts(groups=GROUPS) == {
        " science": (0.5, 0.5, 1.0), " physics": (0.5, 0.0, 1.0), " law": (0.25, 0.0, 0.6),
        "quarks": (0.1667, 0.0, 1.0), "leptons": (0.3333, 0.0, 1.0), "civil": (0.25, 0.0, 1.0),
        "alone": (0.25, 0.0, 1.0),
    }  # fmt: skip
    flat = [{name: value for name, value in tenant.items() if name != "group"} for tenant in TENANTS]
    weights = {name: part for name, (part, _, _) in parts(tenants=flat).items()}
    assert weights == {"quarks": 0.2, "leptons": 0.4, "civil": 0.2, "alone": 0.2}


async def test_check_prints_the_tree(tmp_path: Path) -> None:
    path = config_file(tmp_path, "http://127.0.0.1:1", groups=GROUPS, tenants=TENANTS)
    code, out, _ = await run("check", "--shares", str(path))
    assert code == 0
    lines = [re.sub(r" +", " ", line.rstrip()) for line in out.splitlines()]
    assert " physics/ 50.0% weight 1" in lines
    assert " leptons 33.3% weight 2" in lines
    assert "law/ 25.0% weight 1 at most 60%" in lines
    assert "alone 25.0% weight 1" in lines


async def test_metrics_and_log_have_group_key_and_budget(start: Starter) -> None:
    usage = {"url": str(start.directory / "u.db"), "prices": {"simulated": {"input": 1e5, "output": 5e4}}}
    fields: dict[str, Any] = {"tenants": TENANTS, "groups": GROUPS, "usage": usage}
    async with Upstream(replies(OK)) as upstream, start(upstream.url, **fields) as live:
        for key in "qlca":
            assert (await live.ask(CHAT, chat(), key=key)).status == 200
        await until(live.holds_nothing)
        page = (await live.get("/metrics", key=None, admin=True)).body.decode()
        got = await live.ask(CHAT, chat(), key="a")
        assert (got.status, got.error["message"].partition(";")[0]) == (
            429, "you are at your limit of a cost of 1 in 30 days",
        )  # fmt: skip
    found = dict(re.findall(r"^(fairgate_(?:group|quota)_.+) (\S+)$", page, re.M))
    assert float(found['fairgate_quota_used_ratio{holder="group law",limit="tokens_per_day"}']) == 0.09
    assert float(found['fairgate_quota_used_ratio{holder="alone",limit="cost_per_month"}']) == 0.8
    assert float(found['fairgate_group_share{group="science"}']) == 0.5
    assert float(found['fairgate_group_floor{group="science"}']) == 0.5
    assert float(found['fairgate_group_ceiling{group="law"}']) == 0.6
    received = {
        name: float(found[f'fairgate_group_service{{group="{name}",pool="pool"}}'])
        for name in ("physics", "science", "law")
    }
    assert received["physics"] == received["science"] == 2 * received["law"] > 0
    assert 'fairgate_group_service_due{group="law",pool="pool"}' in found
    lines = [json.loads(line) for line in live.log.read_text().splitlines()]
    found_names = [(line["group"], line["key"]) for line in lines[:4]]
    assert found_names == [("physics", "nightly"), ("physics", ""), ("law", ""), ("", "")]


async def test_a_group_at_its_ceiling_is_named_with_its_limit_wherever_somebody_asks(start: Starter) -> None:
    held, is_full = asyncio.Event(), "group law has 1 of 1 sequences running (max_running)"
    groups = [{"name": "law", "weight": 3, "max_running": 1}, {"name": "tax", "group": "law"}]
    tenants = [{"name": name, "group": "tax", "keys": [hash_key(name)]} for name in ("a", "b")]
    fields: dict[str, Any] = {"tenants": tenants, "groups": groups}
    async with Upstream(holding(held, {0})) as upstream, start(upstream.url, **fields) as live:
        asked = [asyncio.ensure_future(live.ask(CHAT, chat(f"Say {n}"), key=key)) for n, key in enumerate("ab")]
        await until(lambda: (live.engine.queued, live.engine.dispatched) == (1, 1))
        [waiting] = live.engine.requests.waiting.requests
        explained = (await live.get(f"/explain/{waiting}", admin=True)).json
        assert explained["reason"] == f"queued: {is_full}"
        assert explained["numbers"].items() >= {"weight": 1.0, "part_percent": 50.0}.items()
        [pool] = (await live.get("/state", admin=True)).json["pools"]
        assert pool["limited_by_is"] == f"1 request of b in the queue: {is_full}."
        assert {one["tenant"]: one["ceiling"] for one in pool["tenants"]} == {"a": "", "b": is_full}
        [own] = (await live.get("/fairgate/me", key="b")).json["pools"]
        assert own["ceiling"] == is_full
        _, out, _ = await run("top", "--admin", f"http://127.0.0.1:{live.gateway.admin_port}")
        assert f"waiting: {is_full}" in out
        rows = [re.sub(r" +", " ", row.strip()) for row in out.splitlines()]
        assert "law - 3 100.0% 100.0% 1 1 1" in rows
        assert "tax law 1 100.0% 100.0% 1 1 -" in rows
        refused = await live.ask(CHAT, chat("Say 2"), key="b", x_fairgate_wait_s_max="0.01")
        assert refused.status in (429, 503)
        assert refused.error["message"].endswith(f"; {is_full}")
        explained = (await live.get(f"/explain/{refused.headers['x-request-id']}", admin=True)).json
        assert f"({is_full})" in explained["reason"]
        held.set()
        assert [(await one).status for one in asked] == [200, 200]
