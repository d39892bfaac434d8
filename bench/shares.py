"""Whether two flooding tenants get service by their weights, whatever the number of flows each splits into.

    python -m bench.shares [--window 60] [--clients 50] [--engine-url URL]

Both tenants keep the same number of streams open through fairgate (200 words in, 200 tokens out). Service is
prompt tokens plus twice the output tokens, counted by the client: replies that ended by their own usage, replies
under way by their events so far. Cases: equal weights, weights 1:3, and one tenant with 50 end users (`user` in the
body) against one with a single flow at equal weights.
"""

import argparse
import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench import report
from bench.flood import HEAVY, RAMP_S
from bench.load import Client, Reply, Request
from bench.stack import Engine, Route, engine, fairgate, run_bench

# The service function of the gateway's default: an output token costs as much as two prompt tokens.
OUTPUT_COST = 2
USERS = 50


@dataclass(frozen=True, slots=True)
class Case:
    """Two tenants, their weights, and how many end users each names."""

    name: str
    weights: tuple[int, int]
    users: tuple[int, int]

    @property
    def fair_ratio(self) -> float:
        return self.weights[1] / self.weights[0]


CASES = (
    Case("weights 1:1", (1, 1), (1, 1)),
    Case("weights 1:3", (1, 3), (1, 1)),
    Case("50 flows against 1, weights 1:1", (1, 1), (USERS, 1)),
)
TENANTS = ("first", "second")


class Tenant:
    """One tenant's flood, and the service it has had. `pick`: which of the routes is the next request's? `made`: a
    client for each route that is there already, with connections."""

    def __init__(
        self,
        routes: Sequence[Route],
        name: str,
        users: int,
        clients: int,
        pick: Callable[[], int] = lambda: 0,
        made: Sequence[Client] = (),
    ) -> None:
        self.clients = list(made) or [Client(route.url) for route in routes]
        self.pick = pick
        self.settled = 0
        self.failed = 0
        self.stopping = False
        # What every prompt of this load measures, as the last usage stated it; the words are one token each.
        self.prompt_tokens = HEAVY.words_in
        request = asdict(HEAVY) | {"key": routes[0].key(name), "usage": True}
        loads = [Request(**request | {"user": f"user-{n % users}"}) for n in range(clients)]
        self.tasks = [asyncio.create_task(self._keep_sending(load)) for load in loads]

    async def _keep_sending(self, request: Request) -> None:
        while not self.stopping:
            reply = await self.clients[self.pick()].send(request)
            if reply.ok and reply.prompt_tokens:
                self.prompt_tokens = reply.prompt_tokens
                self.settled += reply.prompt_tokens + OUTPUT_COST * request.tokens_out
            elif not self.stopping:
                self.settled += self._under_way(reply)
                self.failed += 1
                await asyncio.sleep(reply.again_after_s)

    def service(self) -> int:
        """Service up to now, replies under way included."""
        replies = [connection.reply for client in self.clients for connection in client.busy]
        return self.settled + sum(self._under_way(reply) for reply in replies if reply is not None)

    def _under_way(self, reply: Reply) -> int:
        """Return the service of a reply without usage so far. The first event carries the role, not a token."""
        if not reply.events:
            return 0
        return self.prompt_tokens + OUTPUT_COST * min(reply.events - 1, HEAVY.tokens_out)

    async def stop(self) -> None:
        self.stopping = True
        for client in self.clients:
            client.abandon(started=True)
        await asyncio.wait(self.tasks)
        for client in self.clients:
            client.close()


async def run_case(case: Case, target: Engine, clients: int, window_s: float) -> dict[str, Any]:
    """Service of both tenants over one window."""
    await target.wait_idle()
    weights = dict(zip(TENANTS, map(float, case.weights), strict=True))
    async with fairgate(target.url, weights, policy="vtc") as route:
        tenants = [Tenant([route], name, users, clients) for name, users in zip(TENANTS, case.users, strict=True)]
        try:
            await asyncio.sleep(RAMP_S)
            before = [tenant.service() for tenant in tenants]
            await asyncio.sleep(window_s)
            got = [tenant.service() - start for tenant, start in zip(tenants, before, strict=True)]
        finally:
            for tenant in tenants:
                await tenant.stop()
    ratio = got[1] / got[0] if got[0] else float("inf")
    return {
        "service": got,
        "ratio": ratio,
        "fair_ratio": case.fair_ratio,
        "off": ratio / case.fair_ratio - 1,
        "failed": sum(tenant.failed for tenant in tenants),
    }


def shares_table(result: dict[str, Any]) -> str:
    heads = ["case", "service of the first", "of the second", "ratio", "off the fair ratio", "failed"]
    rows = []
    for name, row in result["cases"].items():
        service = [f"{tokens:,}" for tokens in row["service"]]
        rows.append([name, *service, f"{row['ratio']:.3f}", f"{row['off']:+.1%}", str(row["failed"])])
    return report.table(heads, rows)


async def run(options: argparse.Namespace) -> None:
    result: dict[str, Any] = {"window_s": options.window, "clients": options.clients, "cases": {}}
    async with engine(options.engine_url) as target:
        for case in CASES:
            print(f"shares, {case.name}", flush=True)
            result["cases"][case.name] = await run_case(case, target, options.clients, options.window)
    report.save("shares", result)
    print(f"\n{shares_table(result)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="service of two flooding tenants")
    parser.add_argument("--window", type=float, default=60.0, help="seconds measured per case")
    parser.add_argument("--clients", type=int, default=50, help="streams each tenant keeps open")
    parser.add_argument("--engine-url", help="a running vLLM; default: start the tiny one of deploy/real-vllm")
    run_bench("shares", run(parser.parse_args()))


if __name__ == "__main__":
    main()
