"""The whole gateway keeps to HTTP: of every case of the table, the engine sees exactly the requests whose answers the
client has got, in their order, and not a byte besides."""

from __future__ import annotations

import re
from pathlib import Path

from gateway.config.sections.keys import hash_key
from tests.gateway.capture import Peer, Seen, Upstream, answer
from tests.gateway.live import Starter
from tests.http.conformance import BODY, CASES, FOLLOWER, Outcome
from tests.http.http_raw import exchange, statuses_of

TENANTS = [{"name": "t", "keys": [hash_key("known")]}]
SERVED = re.compile(rb"(?i)^x-served: ([0-9]+)\r$", re.M)


class Engine:
    """Numbers its answers, so that each can be found again at the client."""

    def __init__(self) -> None:
        self.answers = 0

    async def __call__(self, seen: Seen, peer: Peer) -> None:
        self.answers += 1
        whole = answer(b'{"usage":{"prompt_tokens":3,"completion_tokens":1}}', b"X-Served: %d" % self.answers)
        await peer.send(whole if not seen.line.startswith(b"HEAD ") else whole[: whole.index(b"\r\n\r\n") + 4])


async def test_it_does_as_the_table_says_and_nothing_is_smuggled(tmp_path: Path) -> None:
    engine = Engine()
    async with Upstream(engine) as upstream, Starter(tmp_path)(upstream.url, tenants=TENANTS) as live:
        for name, case in CASES.items():
            served, before = engine.answers, len(upstream.requests)
            answers = await exchange(live.gateway.port, case.sent + FOLLOWER)  # a good request right behind it
            reached = upstream.requests[before:]
            assert Outcome(tuple(statuses_of(answers)), tuple(seen.line for seen in reached)) == case.outcome, name
            assert (b"connection: close\r\n" in answers.partition(b"\r\n\r\n")[0] + b"\r\n") == case.closes, name
            assert [int(number) for number in SERVED.findall(answers)] == [*range(served + 1, engine.answers + 1)], name
            for seen in reached:
                assert seen.unsalted == (BODY if seen.line.startswith(b"POST") else b""), name
                assert not {"upgrade", "http2-settings", "transfer-encoding", "expect"} & set(seen.headers), name
        assert upstream.unread == []
