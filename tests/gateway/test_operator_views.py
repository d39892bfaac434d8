"""What an operator sees of the present and of the last minutes: /state, `fairgate top`, and the sums that both show."""

from __future__ import annotations

import asyncio
import re
import time
from math import inf
from pathlib import Path
from typing import Any

import pytest

from gateway.operator.snapshots import snapshot as snapshots
from gateway.operator.snapshots import state_document as present
from gateway.operator.snapshots.of_replicas import decode_answer, encode
from gateway.operator.snapshots.recent_sums import Sums, TenantSums, set_due, sums
from gateway.operator.snapshots.snapshot import PoolSnapshot, ReplicaAnswer, RunningRequest, together
from gateway.operator.snapshots.snapshot import snapshot_of as of_process
from gateway.telemetry.ends import EndedRequest
from gateway.telemetry.recent_requests import MINUTE_S, RecentRequests
from policies.queue.bounds import QueueSummary
from tests.commands import run
from tests.gateway.live import CHAT, Starter, chat, simulated, until
from tests.kit.overload import full, question, seen, tenants
from tests.kit.served import config_file
from tests.kit.tracing import end
from tests.ports import free_port


async def test_the_queue_and_its_engine_say_who_waits_and_for_what_in_the_state_and_in_top(start: Starter) -> None:
    async with full(start) as gate:
        [pool] = (await seen(gate.live, "/state"))["pools"]
        assert (pool["limited_by"], pool["waits_for"]) == ("kv", "for KV")
        assert (pool["queued_requests"], pool["dispatched_requests"]) == (1, 3)
        assert pool["limited_by_is"].startswith("1 request of holder in the queue: the KV cache has no room")
        [waiting] = pool["requests"]
        assert waiting["request_id"] == pool["next_request_id"]
        assert (waiting["tenant"], len(waiting["user"])) == ("holder", 16)
        assert waiting["wait_s"] >= 0
        assert 0 < waiting["expires_in_s"] <= 120
        [holder] = pool["tenants"]
        assert (holder["tenant"], holder["queued_requests"]) == ("holder", 1)
        assert holder["oldest_wait_s"] == pytest.approx(waiting["wait_s"], abs=0.0015)
        assert (pool["requests_left_out"], pool["tenants_left_out"]) == (0, 0)
        [engine] = pool["backends"]
        assert engine["url"] == f"http://{engine['backend']}"
        assert (engine["in_service"], engine["reason"], engine["obstacle"]) == (True, "", "kv")
        assert (engine["running_sequences"], engine["kv_capacity_tokens"]) == (3, 12288)
        assert 0 <= engine["kv_ratio"] <= 1
        assert 0 < engine["kv_expected_ratio"] <= 1
        code, out, said = await run("top", "--admin", gate.live.admin_url)
        assert (code, said) == (0, "")
        assert "\x1b" not in out
        assert "pool pool, policy fairserve: 1 waiting, 3 running" in out
        assert "1 request of holder in the queue: the KV cache has no room" in out
        assert re.search(r"^tenant +weight +received +due +queued +running +p50 +p95 +refused", out, re.M)
        assert re.search(r"^holder +1 +100.0% +100.0% +1 +3 ", out, re.M)
        assert re.search(r"^127.0.0.1:\d+ +3 +[48] +[\d.]+% +0 +(steps|metrics) +kv", out, re.M)
        gate.release()
        await until(gate.live.holds_nothing)
        [pool] = (await seen(gate.live, "/state"))["pools"]
        assert (pool["limited_by"], pool["backends"][0]["obstacle"]) == (None, None)
        assert pool["limited_by_is"] == "Nothing limits the pool: no request waits or runs."


async def test_the_answers_are_bounded_and_say_what_they_leave_out(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "REQUESTS_MAX", 1)
    monkeypatch.setattr(present, "TENANTS_MAX", 1)
    async with full(start, "other") as gate:
        assert (await gate.ask("other", question())).status == 200
        asked = [asyncio.ensure_future(gate.ask("holder", question(), user=user)) for user in "56"]
        await until(lambda: gate.live.engine.queued == 3)
        [pool] = (await seen(gate.live, "/state"))["pools"]
        assert (len(pool["requests"]), pool["requests_left_out"]) == (1, 2)
        [pool] = (await seen(gate.live, "/state"))["pools"]
        assert (len(pool["tenants"]), pool["tenants_left_out"]) == (1, 1)
        gate.release()
        await asyncio.gather(*asked)


async def test_tenants_have_what_they_received_and_what_they_were_due(start: Starter) -> None:
    async with full(start, "light") as gate:
        waiting = asyncio.ensure_future(gate.ask("light", question(), user="9"))
        await waiting
        found = await seen(gate.live, "/state")
        [pool] = found["pools"]
        assert found["window_s"] == 60
        holder, light = pool["tenants"]
        assert (holder["tenant"], light["tenant"]) == ("holder", "light")
        assert holder["share_received"] + light["share_received"] == pytest.approx(1, abs=1e-3)
        assert holder["share_due"] + light["share_due"] == pytest.approx(1, abs=1e-3)
        assert light["share_due"] == light["share_received"], "it wants no more, and had less than half"
        assert (holder["queued_requests"], holder["running_requests"]) == (1, 3)
        assert (light["queued_requests"], light["running_requests"]) == (0, 0)
        assert light["ended_requests"] == {"completed": 1}
        assert 0 <= light["wait_p50_s"] <= light["wait_p95_s"]
        refused = await gate.ask("light", question(), user="9")
        assert refused.status == 429
        [pool] = (await seen(gate.live, "/state"))["pools"]
        [light] = [each for each in pool["tenants"] if each["tenant"] == "light"]
        assert light["refused_requests"] == {"over_user_limit": 1}


async def test_what_one_process_sees_reaches_another_and_is_put_together_with_percentiles_of_nearest_rank(
    start: Starter,
) -> None:
    async with full(start) as gate:
        found, ends = of_process(gate.live.gateway), gate.live.gateway.recent.latest(9)
        answer = ReplicaAnswer("one", 1000.0, found, ends, 9)
        assert decode_answer(encode(answer)) == answer
        twice = together([("one", found), ("other", found)])
        assert twice.pools[0].dispatched_requests == 6
        config = gate.live.gateway.config
        before = present.state(found, gate.live.gateway.recent, config)()["pools"][0]["tenants"]
        answer.move(0.0)
        later = answer.snapshot
        after = present.state(later, gate.live.gateway.recent, config)()["pools"][0]["tenants"]
        assert after[0]["oldest_wait_s"] == before[0]["oldest_wait_s"], "all times of a look by one clock"
        assert all(later.at_s - 60 < each.dispatched_s <= later.at_s for each in later.pools[0].running)
        # Of twenty waits the 10th is the median, and the 19th the 95th percentile.
        recent = RecentRequests()
        at_s: dict[str, Any] = {"dispatched_s": found.at_s - 2.0, "ended_s": found.at_s - 1.0, "service": 1.0}
        at_s["pool"] = "pool"
        recent.add_reported([end("t", queue_s=float(wait_s), first_token_s=0.0004, **at_s) for wait_s in range(1, 21)])
        tenants = {one["tenant"]: one for one in present.state(found, recent, config)()["pools"][0]["tenants"]}
        assert (tenants["t"]["wait_p50_s"], tenants["t"]["wait_p95_s"]) == (10.0, 19.0)
        assert tenants["t"]["first_token_p95_s"] == 0.0, "rounded to milliseconds"
        assert tenants["holder"]["first_token_p95_s"] is None, "no request of the holder has ended"


async def test_an_engine_that_is_down_says_why(start: Starter) -> None:
    async with start(f"http://127.0.0.1:{free_port()}") as live:
        [pool] = (await seen(live, "/state"))["pools"]
        [engine] = pool["backends"]
        assert (engine["in_service"], engine["reason"] != "") == (False, True)
        assert pool["limited_by_is"].startswith("No engine is in service (")
        assert engine["reason"] in pool["limited_by_is"]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        pytest.param(
            {"a": (60.0, 1.0, inf), "b": (30.0, 2.0, inf), "c": (10.0, 1.0, 0.0)}, {"a": 0.3, "b": 0.6, "c": 0.1},
            id="the rest is divided by weight",
        ),
        pytest.param({"a": (75.0, 1.0, 0.0), "b": (25.0, 1.0, inf)}, {"a": 0.5, "b": 0.5}, id="one had its half"),
        pytest.param({"a": (75.0, 1.0, 0.0), "b": (25.0, 1.0, 0.0)}, {"a": 0.75, "b": 0.25}, id="both have all"),
        pytest.param(
            {"flood": (90.0, 1.0, 500.0), "light": (10.0, 1.0, 5.0)}, {"flood": 0.85, "light": 0.15},
            id="who waits for little is due that",
        ),
        pytest.param(
            {"flood": (100.0, 1.0, 500.0), "starved": (0.0, 1.0, 20.0)}, {"flood": 0.8, "starved": 0.2},
            id="who received nothing",
        ),
        pytest.param({"a": (0.0, 1.0, 5.0)}, {"a": 0.0}, id="nobody received anything"),
    ],
)  # fmt: skip
def test_what_one_does_not_ask_for_is_left_to_the_others(
    asked: dict[str, tuple[float, float, float]], expected: dict[str, float]
) -> None:
    found = {name: TenantSums(weight, got, waiting=waiting) for name, (got, weight, waiting) in asked.items()}
    set_due(found)
    total = sum(one.received for one in found.values())
    assert {name: one.due / (total or 1.0) for name, one in found.items()} == pytest.approx(expected)


# --- fairgate top ---


async def test_long_names_are_cut(start: Starter) -> None:
    name = "a-tenant-with-a-name-" + "x" * 43
    pools = [
        {"name": "pool", "backends": [{"url": f"http://127.0.0.1:{free_port()}", "name": "an-engine-" + "y" * 54}]}
    ]
    async with simulated(time_scale=0) as sim:
        pools[0]["backends"].append({"url": sim.url, "name": "engine"})  # type: ignore[attr-defined]
        async with start(pools=pools, tenants=tenants(name)) as live:
            assert (await live.ask(CHAT, chat(max_tokens=2), key=name)).status == 200
            code, out, _ = await run("top", "--admin", live.admin_url)
            assert code == 0
            assert re.search(r"^a-tenant-\S*… +1 +100.0% +100.0% +0 +0 +\d+ ms +\d+ ms +0", out, re.M), out
            assert re.search(r"^an-engine-\S*… +0 +\d+ +0.0% +0 +answers +- +\S", out, re.M), out


async def test_top_finds_the_admin_listener_and_its_token_in_the_file(start: Starter, tmp_path: Path) -> None:
    async with simulated(time_scale=0) as sim, start(sim.url, admin_token="t" * 32) as live:
        path = config_file(tmp_path, sim.url, admin=f"127.0.0.1:{live.gateway.admin_port}", admin_token="t" * 32)
        code, out, _ = await run("top", "-c", path)
        assert code == 0
        assert "pool pool" in out
        assert "No request came in the last 60 s." in out
        assert "Nothing limits the pool" in out
        code, _, said = await run("top", "--admin", live.admin_url)
        assert code == 1
        assert "admin_token" in said


@pytest.mark.parametrize("command", [("top",), ("explain", "req_1")], ids=["top", "explain"])
async def test_a_command_says_what_is_wrong_with_its_input(command: tuple[str, str]) -> None:
    for address, message in (("ftp://x", "must be http://host:port"), (f"http://127.0.0.1:{free_port()}", "refused")):
        code, _, said = await run(*command, "--admin", address)
        assert code == 2
        assert message in said


# --- sums of the last seconds ---


NOW = 100.0


def within_5_s(*ends: EndedRequest, running: tuple[RunningRequest, ...] = (), **waiting: QueueSummary) -> Sums:
    pool = PoolSnapshot(
        "p", "vtc", [], True, 0, 0, None, None, requests=[], backends=[], running=[*running], waiting=waiting
    )
    return sums(pool, sorted(ends, key=lambda each: -each.ended_s), NOW, 5.0)


def shares(found: Sums) -> tuple[dict[str, float], dict[str, float]]:
    """The parts that the tenants received and were due."""
    total = sum(each.received for each in found.values())
    received = {name: each.received / total for name, each in found.items()}
    return received, {name: each.due / total for name, each in found.items()}


def test_service_counts_as_far_as_it_was_received_in_the_window() -> None:
    found = within_5_s(
        end("long", dispatched_s=80, ended_s=100, service=40),
        end("short", dispatched_s=96, ended_s=99, service=30),
        end("at once", dispatched_s=97, ended_s=97, service=5),
    )
    assert {name: one.received for name, one in found.items()} == {"long": 10, "short": 30, "at once": 5}
    assert within_5_s() == {}


def test_who_asked_for_little_is_due_that_and_who_floods_the_rest() -> None:
    greedy = RunningRequest("greedy", 1.0, 90.0, 90.0, "e")
    light = RunningRequest("light", 3.0, 95.0, 5.0, "e")
    flood = {"greedy": QueueSummary(40, 1.0, 80.0)}
    received, due = shares(within_5_s(running=(greedy, light), **flood))
    assert received == due == pytest.approx({"greedy": 0.9, "light": 0.1})
    known = end("light", dispatched_s=95, ended_s=95.1, service=1.0)
    both = {**flood, "light": QueueSummary(10, 3.0, 90.0)}  # ten more, each worth as much as the one that ended
    assert shares(within_5_s(known, running=(greedy, light), **both))[1]["light"] == pytest.approx(16 / 51)
    many = {**flood, "light": QueueSummary(1000, 3.0, 90.0)}
    assert shares(within_5_s(known, running=(greedy, light), **many))[1]["light"] == 0.75


def test_ends_are_counted_in_their_pool_and_refusals_by_reason() -> None:
    refused = {"service": 0, "outcome": "refused", "reason": "queue_full", "first_token_s": None}
    found = within_5_s(
        end("t", dispatched_s=96, ended_s=99, service=1, queue_s=2.0),
        end("t", dispatched_s=97, ended_s=97, **refused),  # type: ignore[arg-type]
        end("t", dispatched_s=96, ended_s=99, service=1, queue_s=9.0, pool="another"),
    )["t"]
    assert (found.outcomes.total(), found.refused) == (2, {"queue_full": 1})
    assert (found.waits_s, found.first_tokens_s) == ([2.0, 0.0], [0.2])


# --- minutes of a tenant ---


BEGINS_S = MINUTE_S - (time.time() - time.monotonic()) % MINUTE_S
"""When a minute begins, on the monotonic clock."""


def of_minute(number: int, tenant: str, queue_s: float, **fields: object) -> EndedRequest:
    """An end of this minute."""
    dispatched_s = BEGINS_S + MINUTE_S * number + 30.0
    return end(tenant, dispatched_s=dispatched_s, ended_s=dispatched_s + 1, service=1.0, queue_s=queue_s, **fields)


def test_a_minute_has_its_requests_and_the_slowest_of_them() -> None:
    recent = RecentRequests(40)
    refused = {"outcome": "refused", "reason": "queue_full"}
    recent.add_reported(
        [
            of_minute(1, "t", 2.0),
            of_minute(1, "t", 5.0),
            of_minute(1, "other", 9.0),
            of_minute(1, "t", 0.5, **refused),
            of_minute(2, "t", 1.0),
        ]
    )
    first, second = recent.minutes_of("t")
    assert (first.at_s % MINUTE_S, second.at_s - first.at_s) == (0.0, MINUTE_S)
    assert (first.requests, first.queue_s, first.slowest.queue_s) == (3, 7.5, 5.0)
    assert (first.not_served, first.reason) == (1, "queue_full")
    assert (second.requests, second.not_served, second.reason) == (1, 0, "")
    assert [one.requests for one in recent.minutes_of("t")] == [3, 1], "asking counts nothing again"


def test_a_flood_does_not_make_a_tenant_forget_and_all_is_bounded() -> None:
    recent = RecentRequests(40)
    recent.add_reported([of_minute(1, "quiet", 4.0)])
    recent.add_reported([of_minute(1, "flood", 1.0) for _ in range(1000)])
    assert "quiet" not in {one.tenant for one in recent.latest(1000)}
    assert [one.requests for one in recent.minutes_of("quiet")] == [1]
    assert [one.requests for one in recent.minutes_of("flood")] == [1000]
    recent.add_reported([of_minute(n, "flood", 1.0) for n in range(2, 100)])
    assert recent.minutes_of("quiet") == []
    assert len(recent.minutes_of("flood")) == 20
