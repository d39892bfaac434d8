"""A running gateway remembers no more of names that clients invent than its configuration has room for."""

from __future__ import annotations

import asyncio

from gateway.config.memory_bounds import MEMORY_MAX_LEAST, bounds_of
from tests.gateway.capture import Upstream, answer, replies
from tests.gateway.live import MODEL, Starter, chat, until

OK = answer(b'{"choices":[{"finish_reason":"tool_calls"}],"usage":{"prompt_tokens":7,"completion_tokens":2}}')
POOLS, ASKED, AT_ONCE = 20, 160, 20


async def test_every_table_of_a_running_gateway_has_its_bound(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream:
        backends = [{"url": f"{upstream.url}/{number}"} for number in range(2)]
        pools = [{"name": "first", "models": [MODEL], "backends": backends}]
        pools += [
            {"name": f"p{number}", "models": [f"m{number}"], "backends": [{"url": f"{upstream.url}/of/{number}"}]}
            for number in range(1, POOLS)
        ]
        async with start(pools=pools, memory_max=MEMORY_MAX_LEAST, quota={"tokens_per_day": 10**9}) as live:
            for begun in range(0, ASKED, AT_ONCE):
                answers = [
                    live.ask("/v1/chat/completions", chat(f"question {n}", user=f"u{n}"), key=f"key {n}")
                    for n in range(begun, begun + AT_ONCE)
                ]
                assert {each.status for each in await asyncio.gather(*answers)} == {200}
            await until(live.holds_nothing)
            bounds = bounds_of(MEMORY_MAX_LEAST, POOLS)
            gateway, engine = live.gateway, live.engine
            backlog = engine.policy.order.backlog
            assert backlog is not None
            assert backlog.remembered() == bounds.of("flows") // 2 * 2 < ASKED
            assert len(engine.recent._decided) == bounds.of("decisions") < ASKED
            assert len(engine.requests.lengths._populations) == bounds.of("lengths") < ASKED  # type: ignore[attr-defined]
            assert engine.policy.prefixes is not None
            assert engine.policy.prefixes._blocks_max == bounds.blocks
            assert engine.interactions.settings.open_max == bounds.of("interactions")
            assert engine.interactions.paces.apps_max == bounds.of("paces")
            assert engine.quotas is not None
            assert engine.quotas.day._members_max == engine.quotas.minute._members_max == bounds.of("quotas")
            assert gateway.recent._ends.maxlen == bounds.of("ends")
            assert gateway.shared.claims is not None
            assert gateway.shared.claims._flows_max == bounds.of("texts")
            assert gateway._server is not None
            limits = gateway._server.state.limits
            assert (limits.bodies_bytes_max, limits.connections_max) == (bounds.bodies_bytes, bounds.connections)
            assert engine.limits.queue_bytes_max == bounds.queue_bytes
