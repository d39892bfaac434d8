"""Why is a request where it is? The admin listener and the command give the decision with its numbers, no content."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.config.sections.keys import hash_key, open_name
from gateway.telemetry.logged import LogExcerpt
from policies.admission.explanation import SHOWN_S_MIN
from tests.commands import running
from tests.gateway.live import CHAT, MODEL, WAIT_S, Live, Starter, chat, simulated, until
from tests.kit.access_logs import logged, write
from tests.kit.overload import full, question
from tests.ports import free_port

SECRET = "patient 4711 has the flu"


async def explained(live: Live, request_id: str) -> dict[str, Any]:
    got = await live.get(f"/explain/{request_id}", admin=True)
    assert got.status == 200, got.body
    assert b"4711 has" not in got.body, "numbers may be like it"
    found: dict[str, Any] = got.json
    return found


async def test_a_refusal_is_explained_with_the_limit_and_the_kv_state(start: Starter) -> None:
    async with full(start, "t") as gate:
        assert (await gate.ask("t", question("a"), user=SECRET)).status == 200
        refused = await gate.ask("t", question(SECRET), user=SECRET)
        assert refused.status == 429
        found = await explained(gate.live, refused.headers["x-request-id"])
        assert (found["state"], found["inside_an_interaction"]) == ("rejected", False)
        assert found["decision"]["refused"] == "over_user_limit"
        assert found["decision"]["retry_after_s"] >= 1
        assert (found["flow"]["tenant"], len(found["flow"]["user"])) == ("t", 16)
        assert found["pressure"]["overloaded"]
        assert "KV cache" in found["pressure"]["reason"]
        [limit] = [each for each in found["limits"] if each["name"] == "user_starts"]
        assert (limit["limit"], limit["remaining"], limit["reset_s"] > 0) == (1, 0, True)
        assert found["numbers"]
        assert all(isinstance(value, int | float) for value in found["numbers"].values())
        assert all(0 < part <= 1 for part in found["kv_expected"].values())


async def test_what_held_a_request_back_is_in_its_line_in_the_metrics_and_in_its_explanation(start: Starter) -> None:
    async with full(start) as gate:
        behind = asyncio.ensure_future(gate.ask("holder", question("a"), user="5"))
        await until(lambda: gate.live.engine.queued == 2)
        ids = {each.request.flow.user: each.request.id for each in gate.live.gateway.pools[0].dispatcher.exchanges()}
        found = await explained(gate.live, ids["4"])
        assert (found["state"], found["waits_for"], found["decision"]) == ("queued", "kv", None)
        assert found["reason"].startswith("queued: ")
        assert (found["numbers"]["queue"], found["numbers"]["place_in_tenant"]) == (2, 1)
        async with asyncio.timeout(WAIT_S):
            while (await explained(gate.live, ids["5"]))["waited_s"].get("turn", 0.0) < 2 * SHOWN_S_MIN:
                pass  # a shorter part of a wait goes without saying
        found = await explained(gate.live, ids["4"])
        assert found["waited"].startswith("waited ")
        assert "for KV" in found["waited"]
        assert "kv" in found["waited_s"]
        gate.holders[0].cancel()
        answer = await behind
        assert answer.status == 200
        found = await explained(gate.live, answer.headers["x-request-id"])
        assert "for its turn" in found["waited"]
        [line] = [line for line in await gate.live.lines(2) if line["request_id"] == answer.headers["x-request-id"]]
        assert line["waited_ms"].keys() == found["waited_s"].keys()
        assert line["waited_ms"]["turn"] > 0
        assert sum(line["waited_ms"].values()) <= line["queue_ms"] + 0.01 * len(line["waited_ms"])
        metrics = await gate.live.metrics()
        assert metrics["fairgate_held_back_seconds_count", "turn", "pool"] >= 1
        seconds = metrics["fairgate_held_back_seconds_sum", "turn", "pool"]
        assert abs(1000 * seconds - line["waited_ms"]["turn"]) < 0.01


async def test_a_request_is_found_by_what_its_client_calls_it(start: Starter) -> None:
    async with full(start) as gate:
        waiting = asyncio.ensure_future(gate.ask("holder", question("a"), user="5", headers={"x_request_id": "ours-1"}))
        await until(lambda: gate.live.engine.queued == 2)
        found = await explained(gate.live, "ours-1")
        assert (found["state"], found["client_request_id"]) == ("queued", "ours-1")
        assert found["request_id"].startswith("req_")
        assert found["others_of_this_id"] == []
        gate.release()
        first = (await waiting).headers["x-request-id"]
        again = await gate.ask("holder", question("b"), user="5", headers={"x_request_id": "ours-1"})
        found = await explained(gate.live, "ours-1")
        assert (found["request_id"], found["others_of_this_id"]) == (again.headers["x-request-id"], [first])
        assert (await explained(gate.live, first))["request_id"] == first


async def test_one_that_was_served_is_explained_after_its_end_also_by_the_command(start: Starter) -> None:
    async with simulated(time_scale=0) as sim, start(sim.url) as live:
        got = await live.ask(CHAT, chat(SECRET, max_tokens=2, user=SECRET))
        request_id = got.headers["x-request-id"]
        backend = sim.url.removeprefix("http://")
        known = await explained(live, request_id)
        assert (known["state"], known["pool"], known["policy"]) == ("dispatched", "pool", "fairserve")
        assert known["decision"] == {"dispatched_to": backend, "placed": "only", "tokens_cached_expected": 0}
        assert known["reason"].endswith(": no other engine had room")
        [line] = await live.lines(1)
        assert line["waited_ms"] == {}
        whose = f"{request_id} of {open_name(hashlib.sha256(b'k').digest())}"
        said = f"{whose} was dispatched to {backend} at once: no other engine had room.\n"
        assert await explains(request_id, "--admin", live.admin_url) == said
        found = json.loads(await explains(request_id, "--json", "--admin", live.admin_url))
        assert list(found) == list(known)
        # What counts over a window is a little less by now.
        assert all(found[name] == known[name] for name in found if name not in ("decided_s_ago", "numbers"))
        assert "no decision" in await explains("req_unknown", "--admin", live.admin_url, code=1)
        for unknown in ("%00", "x" * 5000, "a%2Fb"):
            refused = await live.get(f"/explain/{unknown}", admin=True)
            assert (refused.status, len(refused.body) < 500) == (404, True), unknown


@pytest.fixture
async def past(start: Starter, tmp_path: Path) -> AsyncIterator[Path]:
    """The file of a gateway that has forgotten what is in its log: half of it is rotated away, and something else
    writes into it, too. `light` waited for what `holder` ran, and one request of `light` was refused."""
    async with full(start, "light") as gate:
        behind = asyncio.ensure_future(
            gate.ask("light", question("x " * 6000), user="5", headers={"x_request_id": "of-the-client"})
        )
        await until(lambda: gate.live.engine.queued == 2)
        ids = {each.request.flow.user: each.request.id for each in gate.live.gateway.pools[0].dispatcher.exchanges()}
        async with asyncio.timeout(WAIT_S):
            while ": " not in (found := await explained(gate.live, ids["5"]))["waited"]:
                pass  # until its wait has a cause
        assert found["ahead"] == {"holder": 3}
        assert " behind 3 requests of holder: " in found["waited"]
        refused = await gate.ask("light", question("again"), user="5")
        assert refused.status == 429
        for holder in gate.holders:
            holder.cancel()
        assert (await behind).status == 200
        found = await explained(gate.live, ids["5"])
        assert found["state"] == "dispatched"
        assert 3 <= found["ahead"]["holder"] <= 4, "those that ended since are known, too"
        await gate.live.lines(6)
        log, config = tmp_path / "requests.log", tmp_path / "past.yaml"
        lines = gate.live.log.read_bytes().splitlines(keepends=True)
        log.with_name("requests.log.1.gz").write_bytes(gzip.compress(b"".join(lines[:3])))
        log.write_bytes(b"".join([*lines[3:], b"INFO something else\n", b'{"ts":1,"request_id":']))
        config.write_text(
            f"access_log: {log}\nadmin: 127.0.0.1:{free_port()}\nopen_access: true\n"
            'pools: [{name: main, backends: [{url: "http://127.0.0.1:1"}]}]\n'
        )
        yield config


async def explains(*arguments: str | Path, code: int = 0) -> str:
    async with running("explain", *map(str, arguments)) as command:
        assert await command.ended() == code, command.said
        return command.out.decode() if code == 0 else command.said


async def test_what_the_gateway_no_longer_knows_is_in_its_log(past: Path) -> None:
    log = past.with_name("requests.log")
    known = gzip.decompress(past.with_name("requests.log.1.gz").read_bytes()) + log.read_bytes()
    lines = [json.loads(line) for line in known.splitlines() if line.endswith(b"}")]
    [waited] = [line for line in lines if line["client_request_id"] == "of-the-client"]
    said = await explains("of-the-client", "-c", past)
    assert re.fullmatch(
        rf"{waited['request_id']} of light was dispatched to \S+: no other engine had room; it waited \S+ s behind "
        r"[34] requests of holder: .*; it completed after \S+ s\.\n",
        said,
    ), said
    assert await explains(waited["request_id"], "--log", log) == said
    assert json.loads(await explains(waited["request_id"], "--log", log, "--json"))["ahead"].keys() == {"holder"}
    [refused] = [line for line in lines if line["reason"] == "over_user_limit"]
    assert await explains(refused["request_id"], "--log", log) == (
        f"{refused['request_id']} of light was refused: under overload, at the start of an interaction, its user was "
        "beyond a limit.\n"
    )
    said = await explains("req_unknown", "-c", past, code=2)
    assert "refused" in said, "nor does the gateway answer"
    assert "it is not in the log" in said
    only = await explains("--tenant", "light", "--log", past.with_name("requests.log.1.gz"))
    assert only.startswith(f"{refused['request_id']} of light was refused: "), "one request is no statistics"
    assert "req_unknown: it is not in the log" in await explains("req_unknown", "--log", log, code=1)


async def test_why_a_tenant_was_slow_is_told_by_the_log(past: Path) -> None:
    said = await explains("--tenant", "light", "--since", "1h", "-c", past)
    why = r"Failed or refused: 1 over_user_limit\."
    assert re.match(rf"2 requests of light: 1 \w+, 1 \w+\.\n{why}\nTime in the queue: half of them 0", said)
    assert re.search(r"^Together they waited \S+ s behind [34] requests of holder: .*% of their time\.$", said, re.M)
    longest = re.search(r"^Longest waited (req_\w+): ask for it by this id\.$", said, re.M)
    assert longest is not None
    numbers = json.loads(await explains("--tenant", "light", "--json", "--log", past.with_name("requests.log")))
    assert (numbers["requests"], numbers["longest"], numbers["lines_left_out"]) == (2, longest[1], 1)
    assert numbers["reasons"] == {"over_user_limit": 1}
    assert "no request of light came" in await explains("--tenant", "light", "--until", "0:00", "--since", "1970-01-01",
                                                        "-c", past, code=1)  # fmt: skip
    for wrong in ([], ["req_1", "--tenant", "light"], ["--tenant", "light"], ["--tenant", "light", "--since", "soon"],
                  ["req_1", "--log", "/nowhere/access.log"]):  # fmt: skip
        said = await explains(*wrong, code=2)
        assert "Error: " in said or "'soon' is no time" in said or "No such file" in said


async def test_why_requests_of_a_tenant_failed_is_told_with_the_engine(start: Starter) -> None:
    async with simulated(time_scale=0) as sim:
        pools = [{"name": "p", "models": [MODEL], "backends": [{"url": sim.url, "name": "gpu-1"}]}]
        async with start(pools=pools, tenants=[{"name": "light", "keys": [hash_key("k")]}]) as live:
            sim.faults.cut_body_next = 2
            for _ in range(3):
                await live.ask("/v1/chat/completions", chat(max_tokens=3))
            await sim.server.stop()
            await live.ask("/v1/chat/completions", chat())
            await live.lines(4)
            said = await explains("--tenant", "light", "--since", "1h", "--log", live.log)
    assert "4 requests of light: 2 failed, 1 completed, 1 refused." in said
    assert "Failed or refused: 2 backend_failed at gpu-1, 1 no_backend at gpu-1." in said


def had(tenant: str, dispatched_s: float, ended_s: float, backend: str = "a", **more: object) -> str:
    """What an engine had from then to then, dispatched as it came."""
    return logged(
        tenant=tenant, ts=ended_s, total_ms=1000 * (ended_s - dispatched_s), queue_ms=0, backend=backend, **more
    )


def waited(name: str, since_s: float, until_s: float) -> str:
    """A request of `slow` that waited from then to then, and took a second at engine a."""
    queue_ms = 1000 * (until_s - since_s)
    return logged(
        request_id=name, tenant="slow", ts=until_s + 1, total_ms=queue_ms + 1000, queue_ms=queue_ms, backend="a",
        waited_ms={"turn": queue_ms},
    )  # fmt: skip


def test_those_are_ahead_that_the_same_engines_had_meanwhile(tmp_path: Path) -> None:
    log = write(
        tmp_path,
        waited("one", 100, 110),
        waited("two", 200, 210),
        *(had("before", 90 + n, 99 + n) for n in range(3)),  # the third ended while `one` waited
        *(had("batch", 101, 111) for _ in range(4)),
        had("batch", 205, 206, backend="b"),
        had("between", 150, 160),
        had("after", 110.5, 120),
        had("elsewhere", 101, 111, backend="c", model="another"),
    )
    both = LogExcerpt([log], lambda line: line.tenant == "slow")
    assert both.ahead == {"batch": 5, "before": 1}
    one = LogExcerpt([log], lambda line: line.request_id == "one", has="one")
    assert one.ahead == {"batch": 4, "before": 1}
    assert one.sentence() == (
        "one of slow was dispatched to a; it waited 10 s behind 4 requests of batch, 1 of before: 10 s for its turn; "
        "it had its first token after 0.2 s; it completed after 11 s."
    )
    assert LogExcerpt([log], lambda line: line.request_id == "two").ahead == {"batch": 1}
