"""The page at the admin listener's root, in a real browser: what an operator sees, in every state of the gateway."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.live import CHAT, WAIT_S, Live, Starter, chat, simulated
from tests.kit.browser import CHROMIUM, expect, window
from tests.kit.overload import full, question, tenants
from tests.ports import free_port
from tests.waiting import eventually

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)"),
]
TOKEN = "an-operator's-token"
EVIL = "<script>document.title='owned'</script>"


async def test_a_flood_is_seen_and_each_request_explained(start: Starter) -> None:
    patient = {"queue_wait_s_max": 3600}  # a slow machine takes minutes for the steps of this test
    async with full(start, EVIL, "unlucky", time_scale=30.0, limits=patient) as gate, window() as seen:
        assert (await gate.ask(EVIL, question())).status == 200
        assert (await gate.ask("unlucky", question("a"))).status == 200
        assert (await gate.ask("unlucky", question("b"))).status == 429
        await seen.open(gate.live)
        await seen.shows("#limit-sentence", "1 request of holder in the queue: the KV cache has no room")
        await seen.shows(
            "#lanes-body", re.compile(r"Who waits1 request, the oldest for .*Behind whom3 requests at the")
        )
        await seen.shows("#lanes-body", "For whatthe next request waits for KV")
        await seen.shows("#lanes-body .key", "holder 1 waiting, 3 running")
        await seen.shows("#tenants-body", re.compile(r"holder1\S* \S+for KV3\d+ %\d+ %1"))
        await seen.shows("#engines-body", re.compile(r"3 of \d+ slots, KV [\d.]+ %the KV cache has no room"))
        await seen.shows("#tenants-body", "1 request refused (over user limit): under overload")
        await seen.shows("#tenants-body", "Most: unlucky.")
        await seen.shows("#tenants-body", EVIL)
        await seen.shows("#requests-body", "under overload, at the start of an interaction")
        await seen.shows("#requests-body", re.compile(r"first token|4 out"))
        assert await seen.page.title() == "1 waiting, fairgate"
        await seen.is_accessible()

        await seen.page.locator("#tenants-body").get_by_role("link", name="holder").click()
        await seen.page.locator("#explained a.id").first.click()
        await seen.shows("#explained", "queued: the KV cache has no room for the next request in order.")
        await seen.shows("#explained", re.compile(r"The request waited .* for KV"))
        await seen.is_accessible()
        await seen.page.keyboard.press("Escape")
        await expect(seen.page.locator("#explained")).to_be_hidden()

        await seen.page.locator("#requests-body li", has_text="unlucky").first.locator("a.id").click()
        await seen.shows("#explained", "refused: under overload")
        await seen.page.locator("#explained-close").click()
        await seen.page.get_by_label("Why did it wait?").fill("req_unknown")
        await seen.page.get_by_role("button", name="Explain").click()
        await seen.shows("#explained", "no decision on this request is remembered")
        seen.faults[:] = [fault for fault in seen.faults if "404" not in fault]  # the browser itself notes that

        await seen.page.keyboard.press("Escape")
        gate.release()
        await seen.shows("#limit-sentence", "Nothing limits the pool")


async def test_groups_stand_above_their_tenants_with_floor_and_ceiling(start: Starter) -> None:
    groups = [
        {"name": "research", "guaranteed_share": 0.3, "max_share": 0.8},
        {"name": "interns", "group": "research", "max_running": 4, "weight": 2},
    ]
    named = tenants("one", "two")
    named[0]["group"], named[1]["group"] = "interns", "research"
    async with simulated() as sim, start(sim.url, tenants=named, groups=groups) as live, window() as seen:
        for key in ("one", "two"):
            assert (await live.ask(CHAT, chat(max_tokens=3), key=key)).status == 200
            [pool] = (await live.get("/state", admin=True)).json["pools"]
            assert {tenant["weight"] for tenant in pool["tenants"]} == {1.0}, "of the config, whoever is there"
            research, interns = pool["groups"]
            assert (research["guaranteed_share"], research["max_share"], research["in"]) == (0.3, 0.8, None)
            assert (interns["max_running"], interns["weight"], interns["in"]) == (4, 2.0, "research")
            assert research["share_received"] == 1.0
        await seen.open(live)
        rows = seen.page.locator("#tenants-body tbody tr")
        said = [(await rows.nth(n).inner_text()).split("\t")[0] for n in range(await rows.count())]
        assert said == ["research floor 30 %, at most 80 %", "interns at most 4 running", "one", "two"]


async def test_pages_share_a_document_that_costs_much_for_longer_and_who_asks_alone_gets_a_new_one(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def share(at_least_s: float, cost_max: float) -> None:
        monkeypatch.setattr("gateway.operator.admin_listener.SHARED_S", at_least_s)
        monkeypatch.setattr("gateway.operator.admin_listener.COST_MAX", cost_max)

    async with simulated() as sim, start(sim.url, tenants=tenants("t")) as live:

        async def is_shared(path: str) -> bool:
            first = (await live.get(path, admin=True)).body
            await live.ask(CHAT, chat(max_tokens=3), key="t")
            return (await live.get(path, admin=True)).body == first

        share(WAIT_S, 1e9)
        assert (await is_shared("/state?shared"), await is_shared("/state")) == (True, False)
        share(0.0, 1e9)
        assert not await is_shared("/state?shared")
        share(0.0, 1e-9)
        assert await is_shared("/state?shared")


async def test_a_click_on_a_name_says_what_is_known_of_it(start: Starter, tmp_path: Path) -> None:
    usage = str(tmp_path / "usage.db")
    async with full(start, EVIL, "idle", time_scale=30.0, usage=usage) as gate, window() as seen:
        assert (await gate.ask(EVIL, question())).status == 200
        await eventually(lambda: usage_of(gate.live))
        await seen.open(gate.live)
        await seen.shows("#tenants-body tr.idle", re.compile(r"idle00idle"))
        await seen.page.locator("#tenants-body").get_by_role("link", name=EVIL).click()
        await seen.shows("#explained-head", EVIL)
        await seen.shows("#explained", re.compile(r"Received [\d.]+ % of the pool's service, due [\d.]+ %"))
        await seen.shows("#explained", re.compile(r"first token|4 out"))
        await seen.is_accessible()
        await seen.page.keyboard.press("Escape")
        await expect(seen.page.locator("#explained")).to_be_hidden()
        await seen.page.locator("#engines-body a").click()
        await seen.shows("#explained", "Running requests by tenant")
        await seen.shows("#explained", "holder 3 requests")
        await seen.page.reload()
        await seen.shows("#explained", "holder 3 requests")
        await seen.page.locator("#explained-close").click()
        gate.release()


async def usage_of(live: Live) -> Any:
    return (await live.get("/usage?by=tenant", admin=True)).json["rows"]


async def test_it_says_what_to_do_goes_on_by_itself_unless_it_is_paused_and_filters_rows(
    start: Starter, tmp_path: Path
) -> None:
    usage = str(tmp_path / "usage.db")
    async with (
        simulated() as sim,
        start(sim.url, tenants=tenants("one", "two"), usage=usage) as live,
        window() as seen,
    ):
        await seen.open(live)
        await seen.shows("#link", "live")
        await seen.shows("#limit-sentence", "Nothing limits the pool: no request waits or runs.")
        await seen.shows("#lanes-body", "Who waitsnobody: each request starts on arrival")
        await seen.shows("#tenants-body", f"curl http://127.0.0.1:{live.gateway.port}/v1/chat/completions")
        await seen.shows("#tenants-body", '"model":"simulated"')
        await seen.shows("#requests-body", "No request has ended")
        await seen.shows("#engines-body", re.compile(r"0 of \d+ slots"))
        await seen.is_accessible()
        assert await seen.page.evaluate(
            "performance.getEntriesByType('resource').every(e => e.name.startsWith(origin))"
        )
        first = (await live.ask(CHAT, chat(max_tokens=3), key="one")).headers["x-request-id"]
        await seen.shows("#requests-body", first)
        await seen.page.get_by_role("button", name="Pause").click()
        second = (await live.ask(CHAT, chat(max_tokens=3), key="two")).headers["x-request-id"]
        await seen.shows("#tenants-body", re.compile(r"two00\d"))
        await expect(seen.page.locator("#requests-body")).not_to_contain_text(second)
        await seen.page.get_by_role("button", name="Resume").click()
        await seen.shows("#requests-body", second)
        await seen.page.locator("#request-filter").fill("TWO")
        await expect(seen.page.locator("#requests-body li")).to_have_count(1)
        await seen.shows("#requests-body", second)
        await seen.page.get_by_label("Show tenants").fill("nobody")
        await expect(seen.page.locator("#tenants-body tbody tr")).to_have_count(0)
        await eventually(lambda: usage_of(live))
        await seen.page.reload()
        await seen.shows("#tenants-body tbody", re.compile(r"\d+ tokens, 1 request"))


async def test_the_token_stays_in_the_tab_and_no_other_page_can_use_what_is_served(start: Starter) -> None:
    async with simulated() as sim, start(sim.url, admin_token=TOKEN) as live, window(quiet=False) as seen:
        await seen.open(live)
        await seen.page.get_by_role("textbox", name="Token").fill("wrong")
        await seen.is_accessible()
        await seen.page.get_by_role("button", name="Open").click()
        await seen.shows("#token-wrong", "This is not the token.")
        await seen.page.get_by_role("textbox", name="Token").fill(TOKEN)
        await seen.page.get_by_role("button", name="Open").click()
        await seen.shows("#link", "live")
        await seen.shows("#engines-body", re.compile(r"0 of \d+ slots"))
        await seen.page.reload()
        await seen.shows("#link", "live")
        assert TOKEN not in seen.page.url
        assert all("401" in fault for fault in seen.faults), seen.faults
        for path in ("/state", "/page/", "/page/files.py", "/page/nothing"):
            assert (await live.get(path, admin=True)).status == 401
        for path in ("/", "/page/page.js", "/page/page.css", "/page/icon.svg"):
            got = await live.get(path, admin=True, key=None)
            assert got.status == 200
            assert "default-src 'none'; script-src 'self'" in got.headers["content-security-policy"]
            assert got.headers["x-content-type-options"] == "nosniff"
            assert path != "/" or not re.search(r"<script>|<style|\son\w+=|\sstyle=|https?://", got.body.decode())


async def test_a_gateway_that_goes_and_comes_back(start: Starter) -> None:
    admin = f"127.0.0.1:{free_port()}"
    async with simulated() as sim, window(quiet=False) as seen:
        async with start(sim.url, admin=admin) as live:
            await seen.open(live)
            await seen.shows("#link", "live")
            await live.ask(CHAT, chat(max_tokens=3))
            await seen.shows("#requests-body", "completed")
        await seen.shows("#link", "the gateway has not answered since")
        await expect(seen.page.locator("body")).to_have_class(re.compile("stale"))
        async with start(sim.url, admin=admin):
            await seen.shows("#link", "restarted")
            await seen.shows("#requests-body", "No request has ended")
            await expect(seen.page.locator("body")).not_to_have_class(re.compile("stale"))


async def test_several_pools_are_chosen_from_and_an_engine_that_is_down_says_why(start: Starter) -> None:
    async with simulated(models=("two",)) as engine:
        urls = {"one": f"http://127.0.0.1:{free_port()}", "two": engine.url}
        pools = [{"name": name, "models": [name], "backends": [{"url": url}]} for name, url in urls.items()]
        async with start(pools=pools) as live, window() as seen:
            await live.ask(CHAT, {**chat(max_tokens=3), "model": "two"})
            await seen.open(live)
            await seen.shows("#limit-sentence", "No engine is in service")
            await seen.shows("#engines-body .down", "out of service: ")
            await seen.page.get_by_role("combobox").select_option("two")
            await seen.shows("#requests-body", "completed")
            await seen.is_accessible()
