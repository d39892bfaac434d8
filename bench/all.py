"""Run what needs a real vLLM or our internals, and write docs/benchmarks.md from the results.

    python -m bench.all [--render]

About 20 minutes. `--render` runs nothing and writes the page from the last
results, those of `tenantbench` among them. Nothing else should run on the machine meanwhile.
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench import report
from bench.running import running_table
from bench.stack import ROOT, engine, run_bench, run_part
from tenantbench.plots import draw
from tenantbench.report import text_of

PARTS = {
    "flood": ["bench.flood", "--rounds", "2", "--window", "15"],
    "small": ["bench.flood", "--case", "small", "--rounds", "2", "--window", "10"],
    "shares": ["bench.shares", "--window", "60"],
    "burst": ["bench.burst", "--rounds", "3"],
    "running": ["bench.running", "--rows", "1x256,1x1024"],
}
WITHOUT_ENGINE = {"running"}
PART_LIMIT_S = 1800.0
COLORS = {"direct": "#9a9a9a", "nginx": "#d08c4a", "fairgate": "#2f6f9f"}
INK = "#6e7781"
"""Text that is read on light and on dark ground; there is none of the figure's own."""
DOCS = ROOT / "docs"
PAGE = DOCS / "benchmarks.md"
TENANTBENCH = ROOT / "tenantbench-results"
ENGINES = {"simulated": "A simulated engine", "llama": "A real llama.cpp"}

Results = dict[str, dict[str, Any]]


async def run_parts() -> None:
    """Run one benchmark after the other. Raises BenchError naming the one that fails."""
    async with engine(None) as target:
        for name, command in PARTS.items():
            shared = [] if name in WITHOUT_ENGINE else ["--engine-url", target.url]
            await run_part([*command, *shared], PART_LIMIT_S)


@dataclass(frozen=True, slots=True)
class Row:
    """A measure on each route, and the limit of fairgate's: alone, or over that of the route `over`."""

    measure: str
    part: tuple[str, str, str]
    """Benchmark, its group, and the case."""
    field: str
    form: str = "{:,.0f}"
    scale: float = 1.0
    limit: float | None = None
    over: str = ""
    is_least: bool = False

    def cells(self, results: Results) -> list[str]:
        benchmark, group, case = self.part
        routes = results[benchmark][group][case]
        values = [routes[name][self.field] if name in routes else None for name in COLORS]
        shown = ["" if value is None else self.form.format(value * self.scale) for value in values]
        return [self.measure, *shown, *self._judged({name: row[self.field] for name, row in routes.items()})]

    def _judged(self, values: dict[str, float]) -> list[str]:
        if self.limit is None:
            return ["", ""]
        value = values["fairgate"] / (values[self.over] or 1) if self.over else values["fairgate"]
        bound = f"{'at least' if self.is_least else 'at most'} {self.limit:g}{f' of {self.over}' if self.over else ''}"
        is_met = value >= self.limit if self.is_least else value <= self.limit
        return [bound, f"{value:.2g}: {'yes' if is_met else 'no'}"]


def flood_rows(count: str, ttft_limit: float) -> list[Row]:
    part = ("flood", "clients", count)
    return [
        Row(
            f"light tenant's median TTFT, N={count}", part, "light_ttft_p50_s", "{:,.0f} ms", 1e3, ttft_limit, "direct"
        ),
        Row(f"light tenant's p95, N={count}", part, "light_ttft_p95_s", "{:,.0f} ms", 1e3),
        Row(f"tokens per second, N={count}", part, "tokens_per_s", limit=0.97, over="nginx", is_least=True),
        Row(f"KV cache in use, N={count}", part, "kv_fill", "{:.0%}"),
        Row(f"preemptions, N={count}", part, "preemptions", limit=1.0, over="direct"),
        Row(f"failed, N={count}", part, "failed", limit=0.0),
    ]


ROWS = (
    *flood_rows("64", 1 / 5),
    *flood_rows("200", 1 / 20),
    *(
        Row(f"small requests per second, {kind}", ("small", "answers", kind), "requests_per_s", limit=0.97,
            over="nginx", is_least=True)
        for kind in ("streamed", "not streamed")
    ),
    *(
        Row(f"engine's own queue in a burst of 200, {case}", ("burst", "loads", case), "waiting_max", limit=4.0)
        for case in ("200 in, 200 out", "40 in, 16 out")
    ),
)  # fmt: skip
HEADS = ["measure", *COLORS, "required", "met"]


def vllm_block(results: Results) -> str:
    """Return the table of routes to a real vLLM, and that of shares."""
    flood, shares = results["flood"], results["shares"]
    cases = [[name, f"1 : {row['ratio']:.2f}", f"{row['off']:+.1%}"] for name, row in shares["cases"].items()]
    return "\n".join([
        f"{flood['machine']}, {flood['measured'][:10]}; medians over {flood['rounds']} rounds, of bursts the worst.",
        "",
        report.table(HEADS, [row.cells(results) for row in ROWS]),
        "",
        f"Through fairgate, two tenants of {shares['clients']} streams each for {shares['window_s']:g} s:",
        "",
        report.table(["case", "service", "off the fair ratio"], cases),
    ])  # fmt: skip


def gateways_block() -> str:
    """Return each engine's table of all gateways, fairgate's losing rows first; draw its plots beside the page.

    Gateways are listed once where all engines had the same ones.
    """
    parts, before = [], ""
    for name, title in ENGINES.items():
        path = TENANTBENCH / name / "result.json"
        if path.exists():
            results = [json.loads(path.read_text())]
            draw(results, DOCS / f"tenantbench-{name}.svg")
            text = text_of(results, "fairgate").partition("\n\n")[2].partition("\n## Formulas\n")[0]
            run, gateways, rest = text.replace("\n## ", "\n#### ").split("\n\n", 2)
            text = "\n\n".join([run, rest] if gateways == before else [run, gateways, rest])
            before = gateways
            parts.append(f"### {title}\n\n![Metrics of each gateway](tenantbench-{name}.svg)\n\n{text}")
    return "\n".join(parts).rstrip()


def written(page: str, block: str, text: str) -> str:
    """Return the page with the text of one block replaced."""
    pattern = re.compile(rf"(<!-- {block} -->\n).*?(<!-- end -->)", re.DOTALL)
    assert pattern.search(page), f"docs/benchmarks.md has no block {block}"
    return pattern.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page)


def render(results: Results) -> str:
    """Return the page with each block whose benchmarks have results."""
    page = PAGE.read_text()
    if {"flood", "small", "shares", "burst"} <= results.keys():
        page = written(page, "vllm", vllm_block(results))
        draw_flood(results["flood"])
    if "running" in results:
        page = written(page, "running", running_table(results["running"]["rows"]))
    if gateways := gateways_block():
        page = written(page, "gateways", gateways)
    return page


def draw_flood(flood: dict[str, Any]) -> None:
    """Write docs/flood.svg: the light tenant's time to first token on every route, median and p95."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "fairgate"
    for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"):
        matplotlib.rcParams[name] = INK
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    counts: Sequence[str] = list(flood["clients"])
    for place, (route, color) in enumerate(COLORS.items()):
        for group, count in enumerate(counts):
            row = flood["clients"][count][route]
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
    figure.savefig(DOCS / "flood.svg", metadata={"Date": None}, transparent=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="every benchmark of this folder that a page needs, and the page")
    parser.add_argument("--render", action="store_true", help="only write the page from the last results")
    options = parser.parse_args()
    if not options.render:
        run_bench("all", run_parts())
    PAGE.write_text(render({name: result for name in PARTS if (result := report.load(name)) is not None}))
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
