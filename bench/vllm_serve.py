"""What `vllm bench serve` says of each route: the first thing that a user of vLLM runs against a proxy.

    python -m bench.vllm_serve [--at-once 16,64,256,1024] [--rounds 3] [--api completions|chat] [--engine-url URL]

One key, no user, fairgate's defaults (and `vtc`, if asked for by --routes): nobody else is there. Prompts have 200
tokens and answers 100. Routes take turns within every round, in rotating order, each with prompts of its own, so that
none finds another's in the engine's cache. Reported are failed requests and output tokens per second, as vLLM's own
tool counts them; `over nginx` is the median of the rounds' own ratios.
"""

import argparse
import asyncio
import json
import tempfile
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from bench import report
from bench.stack import VLLM_VENV, BenchError, Engine, Route, engine, fairgate, routes_to, run_bench

TOKENS_IN, TOKENS_OUT = 200, 100
REQUESTS_MIN = 256
TURN_LIMIT_S = 900.0
TENANT = "bench"
ENDPOINTS = {"completions": ("openai", "/v1/completions"), "chat": ("openai-chat", "/v1/chat/completions")}


async def run_tool(route: Route, at_once: int, api: str, seed: int) -> dict[str, float]:
    """One run of the tool. Raises BenchError with its last words if it fails."""
    backend, endpoint = ENDPOINTS[api]
    tokenizer = VLLM_VENV / "tiny"
    with tempfile.TemporaryDirectory(prefix="fairgate-bench-") as folder:
        command = [
            str(VLLM_VENV / "bin" / "vllm"), "bench", "serve", "--backend", backend, "--endpoint", endpoint,
            "--base-url", route.url, "--model", "tiny", "--tokenizer", str(tokenizer), "--dataset-name", "random",
            "--random-input-len", str(TOKENS_IN), "--random-output-len", str(TOKENS_OUT), "--ignore-eos",
            "--num-prompts", str(max(REQUESTS_MIN, at_once)), "--max-concurrency", str(at_once), "--seed", str(seed),
            "--disable-tqdm", "--save-result", "--result-dir", folder, "--result-filename", "result.json",
        ]  # fmt: skip
        if key := route.key(TENANT):
            command += ["--header", f"Authorization=Bearer {key}"]
        child = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=asyncio.subprocess.STDOUT)
        try:
            async with asyncio.timeout(TURN_LIMIT_S):
                said, _ = await child.communicate()
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        told = _told(Path(folder, "result.json"))
    if child.returncode or told is None:
        raise BenchError(f"vllm bench serve on {route.name} ended with {child.returncode}:\n{said.decode()[-3000:]}")
    return {
        "completed": told["completed"],
        "failed": told["num_prompts"] - told["completed"],
        "output_per_s": told["output_throughput"],
        "ttft_p50_s": told["median_ttft_ms"] / 1000,
        "ttft_p99_s": told["p99_ttft_ms"] / 1000,
    }


def _told(result: Path) -> dict[str, Any] | None:
    return json.loads(result.read_text()) if result.exists() else None


async def run_rounds(routes: list[Route], target: Engine, at_once: int, api: str, rounds: int) -> dict[str, Any]:
    """Every route once per round; medians, and the ratio to nginx of the same round."""
    legs: dict[str, list[dict[str, float]]] = {route.name: [] for route in routes}
    for turn in range(rounds):
        for at, route in enumerate(routes[turn % len(routes) :] + routes[: turn % len(routes)]):
            await target.wait_idle()
            leg = await run_tool(route, at_once, api, seed=1000 * at_once + 10 * turn + at)
            legs[route.name].append(leg)
            line = f"{leg['output_per_s']:.0f} output tokens/s, {leg['failed']:.0f} failed"
            print(f"  {at_once} at once, round {turn + 1}, {route.name}: {line}", flush=True)
    found: dict[str, Any] = {}
    for name, own in legs.items():
        found[name] = {field: report.median([leg[field] for leg in own]) for field in own[0]}
        found[name]["failed"] = sum(leg["failed"] for leg in own)
        if "nginx" in legs:
            ratios = [a["output_per_s"] / b["output_per_s"] for a, b in zip(own, legs["nginx"], strict=True)]
            found[name] |= {"over_nginx": report.median(ratios), "ratios": ratios}
    return found


def vllm_serve_table(result: dict[str, Any]) -> str:
    heads = ["at once", "route", "failed", "output tokens/s", "over nginx", "TTFT p50", "p99"]
    rows = []
    for at_once, routes in result["at_once"].items():
        for name, row in routes.items():
            ratios = sorted(row.get("ratios", []))
            over = f"{row['over_nginx']:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})" if ratios else ""
            ends = [f"{row[f'ttft_{p}_s']:.2f} s" for p in ("p50", "p99")]
            rows.append([at_once, name, f"{row['failed']:.0f}", f"{row['output_per_s']:,.0f}", over, *ends])
    return report.table(heads, rows)


def open_routes(target: Engine, names: list[str]) -> AbstractAsyncContextManager[list[Route]]:
    """The named routes to one engine."""
    of_default, of_vtc = fairgate(target.url, {TENANT: 1}), fairgate(target.url, {TENANT: 1}, policy="vtc")
    return routes_to(target, names, {"fairgate": of_default, "vtc": of_vtc})


async def run(options: argparse.Namespace) -> None:
    result: dict[str, Any] = {"rounds": options.rounds, "api": options.api, "at_once": {}}
    async with engine(options.engine_url) as target, open_routes(target, options.routes.split(",")) as routes:
        for at_once in [int(number) for number in options.at_once.split(",")]:
            result["at_once"][str(at_once)] = await run_rounds(routes, target, at_once, options.api, options.rounds)
    report.save(f"vllm-serve-{options.api}", result)
    print(f"\n{vllm_serve_table(result)}\n\n{report.SHARED_CORES}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="vllm bench serve, by each route to one engine")
    parser.add_argument("--at-once", default="16,64,256,1024", help="requests at once, one run for each")
    parser.add_argument("--routes", default="direct,nginx,fairgate", help="also: vtc")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--api", choices=list(ENDPOINTS), default="completions")
    parser.add_argument("--engine-url", help="a running vLLM; default: start the tiny one of deploy/real-vllm")
    run_bench("vllm_serve", run(parser.parse_args()))


if __name__ == "__main__":
    main()
