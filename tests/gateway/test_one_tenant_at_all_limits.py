"""One tenant holds all that it can of everything, and another one is served as if nothing was.

What is shown here is order: whose request is dispatched next, and that it is answered while the rest is held.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import pytest

from gateway.config.sections.keys import hash_key
from tests.gateway.attacks import FLOOD, HOLD, Attack, Attacker, all_of, attacks
from tests.gateway.capture import BEGUN, DONE, STREAM_END, Peer, Seen, Upstream, answer, chunk, token, usage_event
from tests.gateway.live import CHAT, MODEL, Live, Starter, chat, until

SLOTS, QUEUED, CONNECTIONS = 16, 30, 300
FULL = QUEUED * 9 // 10
"""The rest is kept for who was refused and comes back in time."""
ASKED = 10
ASKING = 4
"""Connections of the attacker that ask on and on: of each, one request may be under way."""
FIELDS = {
    "tenants": [{"name": name, "keys": [hash_key(name)]} for name in ("attacker", "victim")],
    "limits": {
        "queue_requests_max": QUEUED,
        "client_connections_max": CONNECTIONS,
        "client_head_s": 1000,
        "client_body_s": 1000,
        "client_body_bytes_per_s": 1,
        "client_stall_s": 1000,
        "response_buffer_bytes_max": 65536,
    },
}
ATTACKS = attacks(
    "attacker", MODEL, MODEL, connections=CONNECTIONS + 10, queued=SLOTS + QUEUED + 30, bodies=8, readers=4,
    requests=ASKING, every_s=0.02,
)  # fmt: skip

Held = Callable[[Live, Attacker], bool]
HELD: dict[str, Held] = {
    "queue": lambda live, attacker: live.engine.queued >= FULL and attacker.statuses["queue"][429] > 0,
    "slow readers": lambda live, attacker: attacker.open["slow readers"] == 4 and live.engine.dispatched >= 4,
    "beside the queue": lambda live, attacker: attacker.statuses["beside the queue"][429] > 0,
    "half-sent bodies": lambda live, attacker: attacker.open["half-sent bodies"] == 8,
    "slow heads": lambda live, attacker: attacker.open["slow heads"] == ATTACKS["slow heads"].connections,
    "label values": lambda live, attacker: (
        sum(attacker.statuses["label values"].values()) > 50 or live.engine.queued >= FULL
    ),
    "refused requests": lambda live, attacker: sum(attacker.statuses["refused requests"].values()) > 50,
    "wrong keys": lambda live, attacker: attacker.statuses["wrong keys"][429] > 0,
    "idle connections": lambda live, attacker: attacker.statuses["idle connections"][429] > 0,
}
"""Has the attack come to what it can hold at most?"""


class Engine:
    """Does as it is asked; every answer is a stream."""

    def __init__(self) -> None:
        self.held: deque[asyncio.Event] = deque()
        """Those that take a place in it and go on when they are told."""

    async def __call__(self, seen: Seen, peer: Peer) -> None:
        messages, prompt = seen.json.get("messages"), seen.json.get("prompt")
        if not messages and not prompt:
            await peer.send(answer(b'{"error":{"message":"no messages"}}', status=b"400 Bad Request"))
            return
        asked = messages[0]["content"] if messages else prompt
        await peer.send(BEGUN)
        if asked.startswith(HOLD):
            go_on = asyncio.Event()
            if messages:
                self.held.append(go_on)
            await go_on.wait()
        while asked == FLOOD:
            await peer.send(chunk(token("a" * 1000) * 16))
        await peer.send(chunk(usage_event(len(asked) // 4, 1)) + chunk(DONE) + STREAM_END)


def waits(live: Live, tenant: str) -> bool:
    return any(request.flow.tenant == tenant for request in live.engine.requests.waiting.requests.values())


def runs(live: Live, tenant: str) -> bool:
    return any(lease.request.flow.tenant == tenant for lease in live.engine.requests.leases.values())


LASTING = ("slow readers", "half-sent bodies", "slow heads")


@pytest.mark.parametrize("chosen", [chosen for _, chosen in all_of(ATTACKS)], ids=[name for name, _ in all_of(ATTACKS)])
async def test_another_tenant_is_next_and_served_while_the_attack_is_held(
    start: Starter, chosen: dict[str, Attack]
) -> None:
    engine = Engine()
    async with Upstream(engine) as upstream:
        pools = [{"name": "pool", "backends": [{"url": upstream.url, "max_num_seqs": SLOTS}]}]
        async with start(pools=pools, **FIELDS) as live:
            attacker = Attacker(live.gateway.port, again_s=0.1)
            async with attacker.holding(chosen):
                for number in range(ASKED):
                    await until(lambda: all(HELD[name](live, attacker) for name in chosen))
                    if "queue" in chosen:  # what was dispatched has reached the engine
                        await until(lambda: not any(ledger.starting for ledger in live.engine.backends.values()))
                    ended = [attacker.ended[name] for name in LASTING]
                    text = f"victim {number}"
                    asking = asyncio.ensure_future(live.ask(CHAT, chat(text, stream=True), key="victim"))
                    await until(lambda asking=asking: waits(live, "victim") or runs(live, "victim") or asking.done())
                    before = len(upstream.requests)  # what came earlier went ahead of nobody
                    while waits(live, "victim"):
                        reached = len(upstream.requests)
                        engine.held.popleft().set()
                        await until(lambda reached=reached: len(upstream.requests) > reached)
                    got = await asking
                    assert (got.status, DONE in got.body) == (200, True)
                    assert [attacker.ended[name] for name in LASTING] == ended
                    place = next(at for at, seen in enumerate(upstream.requests) if text.encode() in seen.body)
                    ahead = place - before
                    assert ahead <= (1 if set(chosen) == {"queue"} else 1 + ASKING)  # at equal service, who came first
            await until(live.holds_nothing)
