"""The tables of a light tenant's wait, shares, bursts and agents before an engine of yours, on a GPU or not.

    python -m bench.gpu http://localhost:8000 [--quick] [--slots N]

It needs the address of a vLLM and nothing else. That vLLM should be idle and stay so, and should not ask for a key. The
load fits itself to the engine: a probe finds out how many requests it runs at once, and then a heavy tenant keeps
twice as many streams open, and six times as many. The other benchmarks of this folder run as they are, against this
engine and its model; the agents' contexts are twice its KV cache. The first table is of the engine alone: streams of
200 words in and 200 tokens out, begun together. Words are about a token each with the usual tokenizers; answers are of
an exact length (`ignore_eos`). The lengths of the flood's answers vary by half: where 256 of one length start together,
they end together, and whoever comes meanwhile waits for that end.

About 20 minutes; `--quick` takes one short round of each, about 6. Clients and fairgate should be on another machine
than the engine, or on cores that it does not need: they use two.
"""

import argparse
import asyncio
import json
import re
import shutil
import statistics

from bench import report
from bench.flood import HEAVY, keyed, watch
from bench.load import Client, Request
from bench.stack import RUNNING, BenchError, Engine, Route, engine, run_bench, run_part

PROBE_STREAMS, PROBE_S, SAMPLE_EVERY_S = 1500, 6.0, 0.1
STREAMS_MAX = 4000
PART_LIMIT_S = 1200.0
TOGETHER = (1, 50, 100, 250)
CACHE_CONFIG = re.compile(rb"^vllm:cache_config_info\{([^}]*)\}", re.M)
LABEL = re.compile(rb'(block_size|num_gpu_blocks)="(\d+)"')


async def model_of(url: str) -> str:
    """The first model that the engine names. BenchError if it names none."""
    client = Client(url)
    reply = await client.get("/v1/models")
    client.close()
    try:
        return str(json.loads(reply.body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise BenchError(f"{url}/v1/models names no model: {reply.failure or reply.status}") from None


async def slots_of(target: Engine, model: str) -> int:
    """How many requests does it run at once? Found out by sending it more than it can run."""
    client = Client(target.url)
    request = Request(HEAVY.words_in, HEAVY.tokens_out, model=model)
    route = Route("direct", target.url)
    async with watch(target, SAMPLE_EVERY_S, RUNNING) as running:
        tasks = [asyncio.create_task(client.send(keyed(request, route, ""))) for _ in range(PROBE_STREAMS)]
        await asyncio.wait(tasks, timeout=PROBE_S)
        client.abandon(started=True)
        await asyncio.wait(tasks)
    client.close()
    await target.wait_idle()
    if not (found := int(max(running, default=0))):
        raise BenchError(f"the engine at {target.url} ran nothing within {PROBE_S:g} s")
    return found


async def kv_tokens_of(target: Engine) -> int:
    """How many tokens does its KV cache hold? 0 if its metrics do not say."""
    found = CACHE_CONFIG.search((await target.client.get("/metrics")).body)
    labels = {name: int(value) for name, value in LABEL.findall(found.group(1))} if found else {}
    return labels.get(b"block_size", 0) * labels.get(b"num_gpu_blocks", 0)


async def steps_table(target: Engine, model: str) -> str:
    """Milliseconds between tokens, tokens a second and the first token of streams that begin together."""
    client, rows = Client(target.url), []
    request = Request(HEAVY.words_in, HEAVY.tokens_out, model=model)
    route, loop = Route("direct", target.url), asyncio.get_running_loop()

    async def stream() -> tuple[float, float, int]:
        reply = await client.send(keyed(request, route, ""))
        return reply.ttft_s, (loop.time() - reply.first_s) / max(1, reply.events - 1), reply.events

    for count in TOGETHER:
        begin_s = loop.time()
        streams = await asyncio.gather(*(stream() for _ in range(count)))
        spent_s = loop.time() - begin_s
        first_s, between_s, events = zip(*streams, strict=True)
        rows.append([
            str(count), f"{statistics.median(between_s) * 1e3:.1f}", f"{sum(events) / spent_s:,.0f}",
            f"{statistics.median(first_s):.3f} s",
        ])  # fmt: skip
    client.close()
    return report.table(["streams at once", "ms between tokens", "tokens a second", "first token, p50"], rows)


def parts(slots: int, kv_tokens: int, quick: bool) -> list[list[str]]:
    """The benchmarks, with as many clients as this engine needs to be full."""
    counts = [min(STREAMS_MAX, times * slots) for times in (2, 6)]
    routes = "direct,nginx,fairgate" if shutil.which("nginx") else "direct,fairgate"
    rounds, window_s = ("1", "10") if quick else ("3", "20")
    agents = ["bench.full_cache", "--kv", str(kv_tokens), "--rounds", rounds, "--window", "30" if quick else "45"]
    return [
        ["bench.flood", "--clients", ",".join(map(str, counts)), "--routes", routes, "--rounds", rounds,
         "--window", window_s, "--vary", "0.5"],
        ["bench.shares", "--clients", str(counts[0]), "--window", "20" if quick else "60"],
        ["bench.burst", "--arrivals", str(counts[1]), "--rounds", rounds],
        *([agents] if kv_tokens else []),
    ]  # fmt: skip


async def run(options: argparse.Namespace) -> None:
    async with engine(options.url) as target:
        model = await model_of(target.url)
        await target.wait_idle()
        slots = options.slots or await slots_of(target, model)
        kv_tokens = await kv_tokens_of(target)
        print(f"{model} at {target.url} runs {slots} requests at once in {kv_tokens:,} tokens of KV\n", flush=True)
        print(f"{await steps_table(target, model)}\n", flush=True)
        for command in parts(slots, kv_tokens, options.quick):
            await run_part([*command, "--engine-url", target.url], PART_LIMIT_S, FAIRGATE_BENCH_MODEL=model)
    print("All numbers are in bench/results/. Please send them with the GPU, the vLLM version and its flags.")


def main() -> None:
    parser = argparse.ArgumentParser(description="waits, shares, bursts and agents before an engine of yours")
    parser.add_argument("url", help="a running vLLM")
    parser.add_argument("--slots", type=int, default=0, help="requests it runs at once; default: found out")
    parser.add_argument("--quick", action="store_true", help="one short round of each")
    run_bench("bench.gpu", run(parser.parse_args()))


if __name__ == "__main__":
    main()
