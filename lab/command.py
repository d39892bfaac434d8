"""The command `python -m lab`: runs experiments and prints what came out; its exit status says whether it holds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from lab.experiment import Experiment, Findings, Inputs, SkippedError, Verdict
from lab.reproduce import UnknownExperimentError, experiments, measures_json, measures_text, run_all, write_docs
from lab.reproduction import as_json, as_text, summary
from lab.vtc.recorded import measures, read_runs
from simulation.traces.lines import TraceError

MISSED, BAD_INPUT = 1, 2


@click.command()
@click.argument("names", metavar="[NAME ...]", nargs=-1)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the numbers here.")
@click.option("--docs", type=click.Path(file_okay=False, path_type=Path), help="Write reproduction.md into it.")
@click.option("--traces", default="../shared/traces", show_default=True, help="Directory of the recorded traces.")
@click.option("--processes", type=click.IntRange(1), help="Experiments at a time.  [default: one for each core]")
def reproduce(
    names: tuple[str, ...], json_path: Path | None, docs: Path | None, traces: str, processes: int | None
) -> None:
    """Rerun the experiments of the papers, all or those named: published value, our value, verdict.

    \b
    python -m lab                                   everything, some minutes
    python -m lab table2 fig9 --json result.json
    python -m lab metrics RUNS.csv                  VTC's measures of recorded runs

    Exits with 1 if a requirement is missed, and with 2 if a trace is missing or at fault.
    """
    sys.exit(_run(names, json_path, docs, traces, processes))


def _run(names: tuple[str, ...], json_path: Path | None, docs: Path | None, traces: str, processes: int | None) -> int:
    """Run those named, all if there are none. Return the exit status. Raise UsageError."""
    if names[:1] == ("metrics",):
        if docs is not None:
            raise click.UsageError("metrics writes no page: leave out --docs")
        return _measure(names[1:], json_path)
    try:
        chosen = experiments(names)
    except UnknownExperimentError as error:
        raise click.BadParameter(str(error), param_hint="NAME") from error
    outcomes: dict[Experiment, Findings] = {}
    is_skipped = False
    try:
        if json_path is not None:
            json_path.touch()  # what cannot be written should be known before a long run
        for experiment, outcome in run_all(chosen, Inputs(Path(traces)), processes=processes or os.cpu_count() or 1):
            if isinstance(outcome, SkippedError):
                is_skipped = True
                click.echo(f"{experiment.name}: skipped: {outcome}", err=True)
                continue
            outcomes[experiment] = outcome
            click.echo(as_text(experiment, outcome))
        if json_path is not None:
            json_path.write_text(as_json(outcomes), encoding="utf-8")
        if docs is not None:
            click.echo(f"written: {write_docs(outcomes, docs)}")
    except OSError as error:
        click.echo(f"fairgate: {error}", err=True)
        return BAD_INPUT
    rows = [row for outcome in outcomes.values() for row in outcome.rows]
    click.echo(summary(rows))
    if any(row.verdict is Verdict.MISSED for row in rows):
        return MISSED
    return BAD_INPUT if is_skipped else 0


def _measure(files: tuple[str, ...], json_path: Path | None) -> int:
    """The measures of recorded runs, of one file."""
    if len(files) != 1:
        raise click.UsageError("metrics needs one table of recorded runs: python -m lab metrics FILE.csv")
    try:
        runs = [measures(run) for run in read_runs(Path(files[0]))]
        if json_path is not None:
            json_path.write_text(measures_json(runs), encoding="utf-8")
    except (TraceError, OSError) as error:
        click.echo(f"fairgate: {error}", err=True)
        return BAD_INPUT
    click.echo(measures_text(runs), nl=False)
    return 0
