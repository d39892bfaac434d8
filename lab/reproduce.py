"""What do the papers claim, and does it hold here? Runs experiments side by side and shows what came out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from lab.all_experiments import EXPERIMENTS
from lab.experiment import Experiment, Findings, Inputs, SkippedError
from lab.reproduction import as_csv, as_markdown, details, draw
from lab.vtc.recorded import RunMeasures

MET = re.compile(r"^`python -m lab [a-z0-9-]+`: (\d+) of (\d+)$", re.MULTILINE)
INTRODUCTION = """\
# Reproduction

Do the policies do what their papers measured? This page is written by

<!-- not run: takes minutes; tests/lab runs what is in it -->
```sh
python -m lab --docs docs
```

"""
METHOD = """\
## How it is made, and what differs

The policies are those of the gateway. For VTC's own setting they pick at every batching step of an engine loop
(`lab/vtc/in_engine.py`: S-LoRA's, with the step times published for an A10G and Llama-2-7b). All other experiments put
the production `AdmissionEngine` before a [model of vLLM](simulated-engine.md), in virtual time, so each run gives equal
numbers. Experiments without their trace (`--traces`) are skipped. Files beside this page have the numbers without a
requirement, and those of a long table that are met.

Not run: figures 11 to 14 and 18 of VTC, which plot the runs of table 2; figure 15, without published step times;
figures 8, 9 and 12 of DLPM, which need texts of conversations or show one run over time.

In VTC's code a step in which a request ends charges every request of the batch twice, and nobody is lifted when no
other client waits; here counters follow the paper's algorithm 2.

DLPM's schedulers sit inside the engine and see the radix tree; the gateway estimates the engines' caches. GPUs are
models. The published Jain index is over what clients see (all input counts); DLPM equalises what is computed.

"""


class UnknownExperimentError(ValueError):
    """No experiment has this name; the message lists the names that exist."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no experiment is named {name!r}; there are: metrics FILE.csv, {', '.join(EXPERIMENTS)}")
        self.name = name


def experiments(names: Sequence[str]) -> list[Experiment]:
    """Return the experiments with these names, all if there are none. Raise UnknownExperimentError."""
    for name in names:
        if name not in EXPERIMENTS:
            raise UnknownExperimentError(name)
    return [EXPERIMENTS[name] for name in dict.fromkeys(names)] if names else list(EXPERIMENTS.values())


def run_all(
    chosen: Sequence[Experiment], inputs: Inputs, *, processes: int
) -> Iterator[tuple[Experiment, Findings | SkippedError]]:
    """Each experiment with what came out, in the order given, several at a time; or why it was skipped."""
    tasks = [(one.name, inputs) for one in chosen]
    if processes == 1 or len(chosen) == 1:
        yield from zip(chosen, map(_run, tasks), strict=True)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield from zip(chosen, pool.map(_run, tasks), strict=True)


def _run(task: tuple[str, Inputs]) -> Findings | SkippedError:
    name, inputs = task
    try:
        return EXPERIMENTS[name].run(inputs)
    except SkippedError as error:
        return error


def write_docs(by_experiment: Mapping[Experiment, Findings], directory: Path) -> Path:
    """Write `reproduction.md` and its figures into a directory. Raises OSError.

    Of experiments that were not run, a page that is there keeps what it says.
    """
    figures = directory / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    path = directory / "reproduction.md"
    parts = _parts(path.read_text(encoding="utf-8")) if path.exists() else {}
    for one, findings in by_experiment.items():
        parts[one.reproduces] = as_markdown(one, findings)
        if details(findings):
            (directory / "reproduction").mkdir(exist_ok=True)
            (directory / "reproduction" / f"{one.name}.csv").write_text(as_csv(findings), encoding="utf-8")
        for figure in findings.figures:
            draw(figure, figures)
    shown = [parts[one.reproduces] for one in EXPERIMENTS.values() if one.reproduces in parts]
    met = [tuple(map(int, counts)) for counts in MET.findall("".join(shown))]
    summary = f"{sum(count for count, _ in met)} of {sum(of for _, of in met)} requirements are met.\n\n"
    path.write_text(INTRODUCTION + summary + METHOD + "\n".join(shown), encoding="utf-8")
    return path


def _parts(page: str) -> dict[str, str]:
    """Return the part of a page about each experiment, by its title."""
    _, *sections = page.split("\n## ")
    return {section.partition("\n")[0]: f"## {section.rstrip()}\n" for section in sections}


def measures_text(runs: Sequence[RunMeasures]) -> str:
    """A line for each recorded run: the linear cost, then the profiled one."""
    heads = ["run", "scheduler", "suite", "admitted", "max_diff", "avg_diff", "diff_var", "throughput", "profiled cost"]
    rows = [heads]
    for run in runs:
        linear, profiled = run.linear, run.profiled
        rows.append([
            run.run, run.scheduler, run.suite, f"{run.admitted}/{run.requests}", f"{linear.max:.2f}",
            f"{linear.avg:.2f}", f"{linear.var:.2f}", f"{run.throughput:.1f}",
            f"{profiled.max:.2f} / {profiled.avg:.2f} / {profiled.var:.2f}",
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[:3] = [cell.ljust(width) for cell, width in zip(row[:3], widths, strict=False)]
        lines.append("  ".join(cells))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def measures_json(runs: Sequence[RunMeasures]) -> str:
    return json.dumps([run.as_dict() for run in runs], indent=1) + "\n"
