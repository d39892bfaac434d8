"""Runs every benchmark against one engine and writes docs/benchmarks-all.md with its figures from the results.

    python -m bench.all [--quick] [--render]

About 35 minutes; `--quick` takes one short round of each (about 15). `--render` runs nothing and writes the documents
from the last results. Nothing else should run on the machine meanwhile.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench import report
from bench.burst import burst_table
from bench.cpu import PACED, REQUEST, cpu_table
from bench.flood import flood_table, small_table
from bench.latency import latency_table
from bench.locality import CASES, locality_table
from bench.memory import memory_table
from bench.shares import shares_table
from bench.stack import ROOT, engine, run_bench, run_part

FULL = {
    "flood": ["bench.flood", "--rounds", "2", "--window", "15"],
    "small": ["bench.flood", "--case", "small", "--rounds", "2", "--window", "10"],
    "shares": ["bench.shares", "--window", "60"],
    "burst": ["bench.burst", "--rounds", "3"],
    "cpu": ["bench.cpu", "--rounds", "3", "--seconds", "3"],
    "latency": ["bench.latency", "--rounds", "3", "--seconds", "4"],
    "memory": ["bench.memory", "--seconds", "5"],
}
QUICK = {
    "flood": ["bench.flood", "--rounds", "1", "--window", "12"],
    "small": ["bench.flood", "--case", "small", "--rounds", "1", "--window", "8"],
    "shares": ["bench.shares", "--window", "20"],
    "burst": ["bench.burst", "--rounds", "1"],
    "cpu": ["bench.cpu", "--rounds", "1", "--seconds", "2"],
    "latency": ["bench.latency", "--rounds", "1", "--seconds", "2"],
    "memory": ["bench.memory", "--seconds", "3"],
}
# The upstream of these is not the engine.
ALONE = {"cpu", "latency", "memory"}
PART_LIMIT_S = 1800.0
COLORS = {"direct": "#9a9a9a", "nginx": "#d08c4a", "fairgate": "#2f6f9f"}
PLAIN_COLOR = "#b8bec4"
COMPARED = ((REQUEST, "per request of 1 kB"), (PACED, "per chunk at 50 a second, 200 streams"))

Results = dict[str, dict[str, Any]]


async def run_parts(parts: dict[str, list[str]]) -> None:
    """Runs one benchmark after the other. Raises BenchError naming the one that fails."""
    async with engine(None) as target:
        for name, command in parts.items():
            shared = [] if name in ALONE else ["--engine-url", target.url]
            await run_part([*command, *shared], PART_LIMIT_S)


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


def times_peer(case: str, peer: str) -> Callable[[Results], float]:
    """fairgate's CPU over a peer's."""

    def read(results: Results) -> float:
        proxies = results["cpu"]["cases"][case]
        return float(proxies["fairgate"]["us"] / proxies[peer]["us"])

    return read


def added_ms(field: str) -> Callable[[Results], float]:
    return lambda results: float(results["latency"]["proxies"]["fairgate"][field]) * 1000


def stream_kb(results: Results) -> float:
    return float(results["memory"]["proxies"]["fairgate"]["bytes_per_stream"]) / 1000


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
        Goal("CPU per request of 1 kB, times sglang-router", 1, times_peer(REQUEST, "sglang-router"), "{:.2f}"),
        Goal("CPU per request of 1 kB, times LiteLLM", 1 / 100, times_peer(REQUEST, "litellm"), "{:.4f}"),
        Goal("CPU per chunk at 50 a second, times nginx", 1.35, times_nginx(PACED), "{:.2f}"),
        Goal("added latency at half load, p50, ms", 0.4, added_ms("p50_s"), "{:.2f}"),
        Goal("added latency at half load, p99, ms", 2, added_ms("p99_s"), "{:.2f}"),
        Goal("memory of each of 10,000 open streams, kB", 40, stream_kb, "{:.1f}"),
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
        "time of the whole process tree by request or by event, medians over {rounds} rounds of {seconds:g} s; times "
        "nginx is the median of the rounds' own ratios. fairgate runs with keys, `fairserve`, ledger, metrics and "
        "access log; nginx and aiohttp relay and do nothing else. Errors are the load generator's: connections, "
        "statuses, timeouts.",
        cpu_table,
    ),
    "latency": (
        "Latency that the proxy adds",
        "Requests of 1 kB at random times, at half the rate that saturates fairgate (or the proxy itself, if that is "
        "less). The load generator's timers tick once a millisecond, so that a few come together and wait for each "
        "other. The same load goes straight to the upstream; added is the difference of the quantiles. Medians over "
        "{rounds} rounds of {seconds:g} s.",
        latency_table,
    ),
    "memory": (
        "Many open streams",
        "{streams} streams with one event a second each, fewer for proxies that cannot begin so many. Memory is the "
        "process tree's (PSS) less what it took before; CPU is by event, over {seconds:g} s in which nothing begins or "
        "ends.",
        memory_table,
    ),
    # Run by themselves, since each starts engines of its own: `bench.locality`.
    **{f"locality-{name}": (f"Several engines: {name}", case.text, locality_table) for name, case in CASES.items()},
}


PLOTS = {
    "flood": "![Light tenant's time to first token on three routes](flood.svg)",
    "cpu": "![CPU of each proxy, times nginx](cpu.svg)",
}


BESIDE = ROOT / "docs" / "benchmarks"


def render(results: Results) -> str:
    """The text of docs/benchmarks-all.md; the tables are written beside it."""
    some = next(iter(results.values()))
    lines = [
        "# Every benchmark",
        "",
        "Written by `python -m bench.all` (`make bench`); each part also runs alone, see `bench/README.md`. The engine "
        "is a real vLLM on the CPU with a tiny model: 32 running sequences, 255 usable KV blocks of 32 tokens. The "
        "numbers of each benchmark are in a file beside this page. Several engines have 24,000 tokens of KV cache each "
        "and share one core, so that all are equally fast; `gpu` has simulated engines. Their numbers are medians over "
        "the rounds, with least and largest.",
        "",
        f"{report.SHARED_CORES} {some['machine']}, {some['measured'][:10]}.",
        "",
        report.table(["measure", "required", "measured", "met"], [goal.row(results) for goal in goals(results)]),
    ]
    for name, (title, text, make_table) in PARTS.items():
        if name not in results:
            continue
        report.save_csv(BESIDE / f"{name}.csv", make_table(results[name]))
        lines += ["", f"## {title}", "", f"{text.format(**results[name])} [Numbers](benchmarks/{name}.csv)."]
        if name in PLOTS:
            lines += ["", PLOTS[name]]
    return "\n".join(lines) + "\n"


INK = "#6e7781"
"""Text that is read on light and on dark ground; there is none of the figure's own."""
FACTOR_MAX = 20.0
"""Bars end here; what is longer says so. On a longer axis the others could not be told apart."""


def _pyplot() -> Any:
    """matplotlib, which only this module needs, set up so that the same numbers give the same file."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "fairgate"
    for what in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"):
        matplotlib.rcParams[what] = INK
    from matplotlib import pyplot

    return pyplot


def draw_flood(flood: dict[str, Any]) -> None:
    """docs/flood.svg: the light tenant's time to first token on every route, median and p95."""
    figure, axes = _pyplot().subplots(figsize=(7, 3.2), layout="constrained")
    counts = list(flood["clients"])
    for place, (route, color) in enumerate(COLORS.items()):
        rows = [flood["clients"][count].get(route) for count in counts]
        for group, row in enumerate(rows):
            if row is None:
                continue
            middle, high = row["light_ttft_p50_s"], row["light_ttft_p95_s"]
            x = group + (place - 1) * 0.27
            axes.bar(x, middle, 0.25, color=color, label=route if group == 0 else None)
            axes.plot([x, x], [middle, high], color=INK, linewidth=1)
            label = f"{middle:.1f} s" if middle >= 1 else f"{middle:.2f} s"
            axes.annotate(label, (x, high), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    axes.margins(y=0.12)
    axes.set_xticks(range(len(counts)), [f"beside {count} heavy streams" for count in counts])
    axes.set_ylabel("seconds to the first token")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.set_title("How long a light tenant waits: median, line to p95", fontsize=9)
    figure.savefig(ROOT / "docs" / "flood.svg", metadata={"Date": None}, transparent=True)


def draw_cpu(cpu: dict[str, Any]) -> None:
    """docs/cpu.svg: what each proxy spends, as multiples of nginx."""
    cases = [(label, cpu["cases"][name]) for name, label in COMPARED if name in cpu["cases"]]
    if not cases:
        return
    figure, grid = _pyplot().subplots(1, len(cases), figsize=(9, 3), layout="constrained", squeeze=False)
    for axes, (label, proxies) in zip(grid[0], cases, strict=True):
        names = [name for name, row in proxies.items() if not math.isnan(row["times_nginx"])]
        values = [proxies[name]["times_nginx"] for name in names]
        shown = [min(value, FACTOR_MAX) for value in values]
        axes.barh(names, shown, color=[COLORS.get(name, PLAIN_COLOR) for name in names])
        for place, value in enumerate(values):
            text = f"{value:,.1f}" if value <= FACTOR_MAX else f"{value:,.0f} →"
            axes.annotate(text, (shown[place], place), (3, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_xlim(0, FACTOR_MAX * 1.15 if max(values) > FACTOR_MAX else max(values) * 1.15)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(f"CPU {label},\ntimes nginx", fontsize=9)
    figure.savefig(ROOT / "docs" / "cpu.svg", metadata={"Date": None}, transparent=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="every benchmark, and the documents they fill")
    parser.add_argument("--quick", action="store_true", help="one short round of each")
    parser.add_argument("--render", action="store_true", help="only write the documents from the last results")
    options = parser.parse_args()
    if not options.render:
        run_bench("all", run_parts(QUICK if options.quick else FULL))
    results = {name: result for name in PARTS if (result := report.load(name)) is not None}
    if not results:
        raise SystemExit("no results in bench/results: run without --render")
    if "flood" in results:
        draw_flood(results["flood"])
    if "cpu" in results:
        draw_cpu(results["cpu"])
    path = ROOT / "docs" / "benchmarks-all.md"
    path.write_text(render(results))
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
