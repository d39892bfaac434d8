"""The ways to several engines that are compared: fairgate, two of its replicas, routers, nginx, and none at all."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from bench.fleet import redis_server
from bench.proxies import is_installed, sglang_router, started, vllm_router
from bench.stack import BenchError, Engine, Route, fairgate, nginx_proxy

OURS = ("fairgate", "replicas")
ROUTERS = ("sglang-router cache_aware", "vllm-router cache_aware", "vllm-router round_robin")
WAYS = (*OURS, *ROUTERS, "nginx least_conn", "direct")


def chosen(names: Sequence[str], policies: Sequence[str]) -> list[str]:
    """The named ways, fairgate's once with each policy; routers that are missing are left out. Raises BenchError."""
    found = []
    for name in names:
        if name.split()[0] in OURS:
            found += [f"{name} {policy}" for policy in policies] if name in OURS and policies else [name]
        elif name not in WAYS:
            raise BenchError(f"no way {name!r}; there are {', '.join(WAYS)}")
        elif name not in ROUTERS or is_installed(name.split()[0]):
            found.append(name)
    return found


@contextlib.asynccontextmanager
async def open_way(name: str, engines: Sequence[Engine], tenants: dict[str, float]) -> AsyncIterator[Route]:
    """Runs what the way needs until the block ends; nothing else runs meanwhile, so that nobody else asks engines."""
    urls = [engine.url for engine in engines]
    kind, _, variant = name.partition(" ")
    async with contextlib.AsyncExitStack() as stack:
        if kind == "direct":
            route = Route(name, urls[0], others=tuple(urls[1:]))
        elif kind == "nginx":
            route = await stack.enter_async_context(nginx_proxy(*urls, balance=f"{variant};"))
        elif kind in OURS:
            state = {}
            if kind == "replicas":
                state["state"] = (await stack.enter_async_context(redis_server())).url
            opened = [
                await stack.enter_async_context(fairgate(urls, tenants, policy=variant or None, **state))
                for _ in range(2 if state else 1)
            ]
            route = replace(opened[0], others=tuple(each.url for each in opened[1:]))
        else:
            start = {"sglang-router": sglang_router, "vllm-router": vllm_router}[kind]
            route = await stack.enter_async_context(started(name, lambda port, _: start(port, urls, variant)))
        yield replace(route, name=name)
