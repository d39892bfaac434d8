"""What an honest tenant keeps beside a tenant whose requests the engine refuses at once.

    python -m bench.refused [--window 10] [--policies fairserve,vtc]

The prompts of the flood are a little longer than the context, so the engine answers 400 within milliseconds. Each
connection of the flood asks again as soon as it is answered. Engines are simulated, at the speed of a small vLLM.
"kept": tokens of the honest tenant per second, as a part of what it gets alone in the same run.
"""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from bench import report
from bench.fleet import simulated
from bench.load import Client, Request
from bench.stack import Route, fairgate, run_bench

POLICIES = ("fairserve", "wsc", "vtc", "dlpm", "d2lpm")
CONNECTIONS = (0, 12, 100)
STREAMS = 40
ASKED = Request(words_in=100, tokens_out=60)
TOO_LONG = Request(words_in=4200, tokens_out=1)
RAMP_S = 2.0
"""Before the window, so that it begins under full load."""


async def measured(route: Route, streams: int, connections: int, window_s: float) -> tuple[float, int]:
    """Tokens per second of the honest tenant, and how many requests of the other one were refused."""
    honest, other = Client(route.url), Client(route.url)
    tokens = refused = 0

    async def asking(client: Client, request: Request) -> None:
        nonlocal tokens, refused
        while True:
            reply = await client.send(request)
            if reply.ok:
                tokens += request.tokens_out
            elif reply.status == 400:
                refused += 1
            else:
                await asyncio.sleep(reply.again_after_s)

    loads = [(honest, Request(ASKED.words_in, ASKED.tokens_out, key=route.key("honest")))] * streams
    loads += [(other, Request(TOO_LONG.words_in, TOO_LONG.tokens_out, key=route.key("other")))] * connections
    tasks = [asyncio.create_task(asking(client, request)) for client, request in loads]
    try:
        await asyncio.sleep(RAMP_S)
        tokens = refused = 0
        await asyncio.sleep(window_s)
        return tokens / window_s, refused
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        honest.close()
        other.close()


async def run(policies: Sequence[str], window_s: float) -> list[dict[str, Any]]:
    """Every policy before one engine and before two."""
    rows: list[dict[str, Any]] = []
    for engines in (1, 2):
        async with AsyncExitStack() as stack:
            urls = [(await stack.enter_async_context(simulated("demo"))).url for _ in range(engines)]
            for policy in policies:
                alone = 0.0
                for connections in CONNECTIONS:
                    async with fairgate(urls, {"honest": 1.0, "other": 1.0}, policy={"name": policy}) as route:
                        rate, refused = await measured(route, STREAMS * engines, connections, window_s)
                    alone = alone or rate
                    row = {"engines": engines, "policy": policy, "connections": connections, "tokens/s": round(rate)}
                    rows.append(row | {"kept": round(rate / alone, 2), "refused/s": round(refused / window_s, 1)})
                    print(" ".join(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
    return rows


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench.refused", description=__doc__.splitlines()[0])
    parser.add_argument("--window", type=float, default=10.0, help="seconds of each measurement")
    parser.add_argument("--policies", default=",".join(POLICIES))
    options = parser.parse_args()
    rows = run_bench("refused", run(options.policies.split(","), options.window))
    print(report.table([*rows[0]], [[str(value) for value in row.values()] for row in rows]))


if __name__ == "__main__":
    main()
