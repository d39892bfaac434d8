"""Runs every benchmark against one engine and writes docs/benchmarks.md and docs/flood.svg from the results.

    python -m bench.all [--quick] [--render]

About 20 minutes; `--quick` takes one short round of each (about 8). `--render` runs nothing and writes the documents
from the last results. Nothing else should run on the machine meanwhile.
"""

import argparse
import asyncio
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvloop

from bench import report
from bench.burst import burst_table
from bench.cpu import cpu_table
from bench.flood import flood_table, small_table
from bench.shares import shares_table
from bench.stack import ROOT, BenchError, engine

FULL = {
    "flood": ["bench.flood", "--rounds", "2", "--window", "15"],
    "small": ["bench.flood", "--case", "small", "--rounds", "2", "--window", "10"],
    "shares": ["bench.shares", "--window", "60"],
    "burst": ["bench.burst", "--rounds", "3"],
    "cpu": ["bench.cpu", "--rounds", "3", "--seconds", "4"],
}
QUICK = {
    "flood": ["bench.flood", "--rounds", "1", "--window", "12"],
    "small": ["bench.flood", "--case", "small", "--rounds", "1", "--window", "8"],
    "shares": ["bench.shares", "--window", "20"],
    "burst": ["bench.burst", "--rounds", "1"],
    "cpu": ["bench.cpu", "--rounds", "1", "--seconds", "3"],
}
# The upstream of this one is not the engine.
ALONE = {"cpu"}
PART_LIMIT_S = 1800.0
COLORS = {"direct": "#9a9a9a", "nginx": "#d08c4a", "fairgate": "#2f6f9f"}

Results = dict[str, dict[str, Any]]


async def run_parts(parts: dict[str, list[str]]) -> None:
    """Runs one benchmark after the other. Raises BenchError naming the one that fails."""
    async with engine(None) as target:
        for name, command in parts.items():
            shared = [] if name in ALONE else ["--engine-url", target.url]
            child = await asyncio.create_subprocess_exec(sys.executable, "-m", *command, *shared, cwd=ROOT)
            try:
                status = await asyncio.wait_for(child.wait(), PART_LIMIT_S)
            except TimeoutError:
                child.terminate()
                await child.wait()
                raise BenchError(f"{name} took more than {PART_LIMIT_S:.0f} s") from None
            if status:
                raise BenchError(f"{name} ended with status {status}: python -m {' '.join(command)}")


@dataclass(frozen=True, slots=True)
class Goal:
    """One line of the summary: what is asked, and how to read what was measured. `least` turns the limit around."""

    measure: str
    limit: float
    read: Callable[[Results], float]
    form: str = "{:.3f}"
    least: bool = False

    def row(self, results: Results) -> list[str]:
        bound = f"{'at least' if self.least else 'at most'} {self.form.format(self.limit)}"
        try:
            value = self.read(results)
        except KeyError:
            return [self.measure, bound, "not measured", ""]
        met = value >= self.limit if self.least else value <= self.limit
        return [self.measure, bound, self.form.format(value), "" if math.isnan(value) else "yes" if met else "no"]


def flood_ratio(count: str, field: str, base: str) -> Callable[[Results], float]:
    def read(results: Results) -> float:
        routes = results["flood"]["clients"][count]
        return float(routes["fairgate"][field] / routes[base][field])

    return read


def small_ratio(kind: str) -> Callable[[Results], float]:
    def read(results: Results) -> float:
        routes = results["small"]["answers"][kind]
        return float(routes["fairgate"]["requests_per_s"] / routes["nginx"]["requests_per_s"])

    return read


def failed(results: Results) -> float:
    """Failed requests through fairgate, over all benchmarks."""
    groups = [*results["flood"]["clients"].values(), *results["small"]["answers"].values()]
    groups += results["burst"]["loads"].values()
    through = sum(group["fairgate"]["failed"] for group in groups)
    return float(through + sum(case["failed"] for case in results["shares"]["cases"].values()))


def burst_waiting(results: Results) -> float:
    return float(max(routes["fairgate"]["waiting_max"] for routes in results["burst"]["loads"].values()))


def preemptions(count: str) -> Callable[[Results], float]:
    return lambda results: float(results["flood"]["clients"][count]["fairgate"]["preemptions"])


def share_error(case: str) -> Callable[[Results], float]:
    return lambda results: abs(results["shares"]["cases"][case]["off"])


def times_nginx(case: str) -> Callable[[Results], float]:
    return lambda results: float(results["cpu"]["cases"][case]["fairgate"]["times_nginx"])


def goals(results: Results) -> list[Goal]:
    """The project's goals. Of preemptions, those of the direct route are the limit."""
    found = [
        Goal("light median TTFT over direct, N=64", 1 / 5, flood_ratio("64", "light_ttft_p50_s", "direct")),
        Goal("light median TTFT over direct, N=200", 1 / 20, flood_ratio("200", "light_ttft_p50_s", "direct")),
    ]
    for count in ("64", "200"):
        over = f"tokens per second over {{}}, N={count}"
        direct = results.get("flood", {}).get("clients", {}).get(count, {}).get("direct", {})
        found += [
            Goal(over.format("nginx"), 0.97, flood_ratio(count, "tokens_per_s", "nginx"), least=True),
            Goal(over.format("direct"), 0.88, flood_ratio(count, "tokens_per_s", "direct"), least=True),
            Goal(f"preemptions, N={count}", direct.get("preemptions", 0), preemptions(count), "{:.0f}"),
        ]
    small = "small requests per second over nginx, {}"
    found += [Goal(small.format(kind), 0.97, small_ratio(kind), least=True) for kind in ("streamed", "not streamed")]
    cases = ("weights 1:1", "weights 1:3", "50 flows against 1, weights 1:1")
    found += [Goal(f"{case}: off the fair ratio", 0.05, share_error(case), "{:.1%}") for case in cases]
    return [
        *found,
        Goal("burst of 200: engine waiting, target of 2 plus 2", 4, burst_waiting, "{:.0f}"),
        Goal("CPU per request that is not streamed, times nginx", 4, times_nginx("request"), "{:.2f}"),
        Goal("CPU per chunk at 50 a second, times nginx", 2, times_nginx("chunk, 50/s"), "{:.2f}"),
        Goal("CPU per chunk in a burst, times nginx", 2, times_nginx("chunk, burst"), "{:.2f}"),
        Goal("failed requests", 0, failed, "{:.0f}"),
    ]


PARTS: dict[str, tuple[str, str, Callable[[dict[str, Any]], str]]] = {
    "flood": (
        "A light tenant under flood",
        "N streams of a heavy tenant (200 words in, 200 tokens out); a light one sends 30 words for 20 tokens every "
        "0.4 s. fairgate runs `vtc`, which throttles nobody. Times count from when a request was due. Medians over "
        "{rounds} rounds of {window_s:g} s, the routes "
        "taking turns.",
        flood_table,
    ),
    "small": (
        "Many small requests",
        "128 closed-loop clients, 40 words in, 16 tokens out. Medians over {rounds} rounds of {window_s:g} s, the "
        "routes taking turns.",
        small_table,
    ),
    "shares": (
        "Shares",
        "Two flooding tenants with {clients} streams each, through fairgate, for {window_s:g} s. Service is prompt "
        "tokens plus twice the output tokens.",
        shares_table,
    ),
    "burst": (
        "A burst of arrivals",
        "{arrivals} requests within a few milliseconds, the engine's waiting gauge read every 10 ms; the largest of "
        "{rounds} rounds. The engine refreshes it once per step.",
        burst_table,
    ),
    "cpu": (
        "CPU of the proxy",
        "The proxy alone on one core; nginx's echo module as upstream and wrk as load on the other. User and system "
        "time of the whole process by request or by event, medians over {rounds} rounds of {seconds:g} s. fairgate "
        "runs with keys, `fairserve`, ledger, metrics and access log; nginx and aiohttp relay and do nothing else.",
        cpu_table,
    ),
}


def render(results: Results) -> str:
    """The text of docs/benchmarks.md."""
    some = next(iter(results.values()))
    lines = [
        "# Benchmarks",
        "",
        "Written by `python -m bench.all` (`make bench`); each part also runs alone, see `bench/README.md`. The engine "
        "is a real vLLM on the CPU with a tiny model: 32 running sequences, 255 usable KV blocks of 32 tokens.",
        "",
        f"{report.SHARED_CORES} {some['machine']}, {some['measured'][:10]}.",
        "",
        report.table(["measure", "required", "measured", "met"], [goal.row(results) for goal in goals(results)]),
    ]
    for name, (title, text, make_table) in PARTS.items():
        if name not in results:
            continue
        lines += ["", f"## {title}", "", text.format(**results[name]), "", make_table(results[name])]
        if name == "flood":
            lines += ["", "![Light tenant's time to first token on three routes](flood.svg)"]
    return "\n".join(lines) + "\n"


def draw(flood: dict[str, Any]) -> None:
    """docs/flood.svg: the light tenant's time to first token on every route, median and p95."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "fairgate"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    counts = list(flood["clients"])
    for place, (route, color) in enumerate(COLORS.items()):
        rows = [flood["clients"][count].get(route) for count in counts]
        for group, row in enumerate(rows):
            if row is None:
                continue
            middle, high = row["light_ttft_p50_s"], row["light_ttft_p95_s"]
            x = group + (place - 1) * 0.27
            axes.bar(x, middle, 0.25, color=color, label=route if group == 0 else None)
            axes.plot([x, x], [middle, high], color="#333333", linewidth=1)
            label = f"{middle:.1f} s" if middle >= 1 else f"{middle * 1000:.0f} ms"
            axes.annotate(label, (x, high), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    axes.set_yscale("log")
    axes.margins(y=0.12)
    axes.set_xticks(range(len(counts)), [f"{count} heavy streams" for count in counts])
    axes.set_ylabel("light tenant's TTFT, seconds")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_title("Time to first token under flood: median, line to p95", fontsize=9)
    figure.savefig(ROOT / "docs" / "flood.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description="every benchmark, and the documents they fill")
    parser.add_argument("--quick", action="store_true", help="one short round of each")
    parser.add_argument("--render", action="store_true", help="only write the documents from the last results")
    options = parser.parse_args()
    if not options.render:
        uvloop.run(run_parts(QUICK if options.quick else FULL))
    results = {name: result for name in PARTS if (result := report.load(name)) is not None}
    if not results:
        raise SystemExit("no results in bench/results: run without --render")
    if "flood" in results:
        draw(results["flood"])
    path = ROOT / "docs" / "benchmarks.md"
    path.write_text(render(results))
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
