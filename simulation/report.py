"""Reports of a replay: tables in the terminal, JSON, and a picture, which matplotlib draws, an extra."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from backends.simulated.engine_profiles import EngineProfile
from simulation.replay import TENANTS_LISTED, ReplayResult
from simulation.run import IMPOSSIBLE
from simulation.traces.reader import Trace
from simulation.verdict import in_seconds, named, runs_to_compare, short, verdict

NOTHING = "-"


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """A trace, its engines, the results of its runs (at least one), and remarks."""

    trace: Trace
    profile: EngineProfile
    results: Sequence[ReplayResult]
    remarks: Sequence[str] = ()

    @property
    def backends(self) -> list[int]:
        """Numbers of engines of the runs."""
        return list(dict.fromkeys(each.backends for each in self.results))

    @property
    def listed(self) -> list[int]:
        """Return the indices of the tenants in the tables: those with most demand, and those who gain and pay most."""
        names = [one.name for one in self.results[0].tenants]
        shown = {*names[: TENANTS_LISTED + (len(names) == TENANTS_LISTED + 1)], *named(self.results)}
        return [place for place, name in enumerate(names) if name in shown]

    def heading(self) -> str:
        """Return a heading with the traffic and the engines."""
        trace, engines = self.trace, "engine" if self.backends[-1] == 1 else "engines"
        return (
            f"{trace.name}: {_count(trace.requests, 'request')} of {_count(len(trace.demand), 'tenant')} in "
            f"{_span(trace.span_s)} ({trace.format} format), before {' and '.join(map(str, self.backends))} simulated "
            f"{engines} like {self.profile.name}"
        )

    def label(self, result: ReplayResult) -> str:
        """Return the name of a run among the others."""
        return result.policy if len(self.backends) == 1 else f"{result.policy}, {_count(result.backends, 'engine')}"

    def warning(self) -> str:
        """Return why these numbers mean nothing, or ""."""
        if any(each.queued for each in self.results):
            return ""
        return (
            "No request had to wait: this load never fills the engines, and policies differ only where requests wait. "
            "Try --speed 2 and more, fewer --backends or a smaller --profile."
        )

    def notes(self) -> list[str]:
        """Return remarks to read before the numbers."""
        trace, notes = self.trace, list(self.remarks)
        impossible = max((each.refused.get(IMPOSSIBLE, 0) for each in self.results), default=0)
        context = f"{self.profile.name} ({self.profile.max_model_len:,} tokens)"
        passed = (
            (trace.foreign, "line", "left out: no whole lines of an access log."),
            (trace.elsewhere, "line", "left out: requests for models that another pool serves."),
            (trace.skipped, "line", "skipped: requests that never asked an engine for anything."),
            (trace.assumed, "request", "had no answer in the trace; its length is taken to be the mean of the same "
             "tenant and app."),
            (impossible, "request", f"refused as longer than the context of {context}, as the gateway refuses them."),
        )  # fmt: skip
        notes += [f"{_count(number, what)} {text}" for number, what, text in passed if number]
        if left_out := len(self.results[0].tenants) - len(self.listed):
            notes.append(
                f"{_count(left_out, 'more tenant')} not shown: --json has all, up to the 1,000 with most demand."
            )
        if len(trace.demand) == 1:
            notes.append("The trace has one tenant: there is nobody to share with, and policies differ within it only.")
        elif not any(each.gap_max for each in self.results) and not self.warning():
            notes.append("No two tenants waited at the same time.")
        return notes


def columns(rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> str:
    """Return aligned columns with a rule below the first row; columns in `left` are left-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(aligned).rstrip()

    return "\n".join([line(rows[0]), "  ".join("-" * width for width in widths), *map(line, rows[1:])])


# --- text ---


def as_text(replayed: ReplayReport) -> str:
    """Return tables: the policies side by side, then each tenant under each policy."""
    warning = replayed.warning()
    parts = [f"Warning: {warning}", ""] if warning else []
    parts += [verdict(replayed.results), "", replayed.heading(), "", columns(_policy_rows(replayed)), ""]
    refused = _refused_rows(replayed)
    if len(refused) > 1:
        parts += ["Refused, by reason", columns(refused, left=(0, 1)), ""]
    parts += ["Tenants: time to first token in seconds, and service", columns(_tenant_rows(replayed)), ""]
    parts += [f"Note: {note}" for note in replayed.notes()]
    return "\n".join(parts).rstrip() + "\n"


def _policy_rows(replayed: ReplayReport) -> list[list[str]]:
    rows = [[
        "policy", "requests", "completed", "refused", "TTFT p50", "p95", "p99", "tokens/s", "Jain", "max gap",
        "preemptions", "wasted tokens",
    ]]  # fmt: skip
    for each in replayed.results:
        jain = NOTHING if each.jain is None else f"{each.jain:.3f}"
        rows.append([
            replayed.label(each), f"{each.requests:,}", f"{each.completed:,}", f"{sum(each.refused.values()):,}",
            *_quantiles(each.ttft_s), f"{each.tokens_per_s:,.0f}", jain, f"{each.gap_max:,.0f}",
            f"{each.preemptions:,}", f"{each.wasted_tokens:,}",
        ])  # fmt: skip
    return rows


def _refused_rows(replayed: ReplayReport) -> list[list[str]]:
    rows = [["policy", "reason", "requests"]]
    for each in replayed.results:
        rows += [[replayed.label(each), reason, f"{count:,}"] for reason, count in each.refused.items()]
    return rows


def _tenant_rows(replayed: ReplayReport) -> list[list[str]]:
    rows = [["tenant", "weight", "policy", "requests", "completed", "p50", "p95", "p99", "service"]]
    for number in replayed.listed:
        tenant = replayed.results[0].tenants[number]
        for each in replayed.results:
            of = each.tenants[number]
            rows.append([
                short(tenant.name), f"{tenant.weight:g}", replayed.label(each), f"{of.requests:,}",
                f"{of.completed:,}", *_quantiles(of.ttft_s), f"{of.service:,.0f}",
            ])  # fmt: skip
    return rows


# --- JSON ---


def as_json(replayed: ReplayReport) -> str:
    """Return all measurements as JSON; times are in seconds."""
    trace = replayed.trace
    one, other = runs_to_compare(replayed.results)
    document = {
        "verdict": {
            "text": verdict(replayed.results),
            "gains_most": named(replayed.results)[0],
            "pays_most": named(replayed.results)[1],
            "compared": [{"policy": each.policy, "backends": each.backends} for each in (one, other)],
        },
        "trace": {
            "paths": [str(path) for path in trace.paths], "format": trace.format, "requests": trace.requests,
            "span_s": trace.span_s, "tenants": len(trace.demand), "skipped": trace.skipped, "foreign": trace.foreign,
            "elsewhere": trace.elsewhere, "assumed": trace.assumed,
        },
        "engines": {"backends": replayed.backends, "profile": replayed.profile.name},
        "warning": replayed.warning(),
        "notes": replayed.notes(),
        "policies": [asdict(each) for each in replayed.results],
    }  # fmt: skip
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


# --- picture ---


class PictureError(Exception):
    """A picture that cannot be drawn."""


def draw(replayed: ReplayReport, file: Path) -> None:
    """Draw the service per second by tenant, a panel for each policy, and the gap between tenants.

    The ending of `file` names the format: png, svg or pdf. Raise PictureError for others, and without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise PictureError("a picture needs matplotlib: pip install 'fairgate[plots]'") from None
    results = replayed.results
    figure = Figure(figsize=(9, 2.5 * (len(results) + 1)), layout="constrained")
    panels = figure.subplots(len(results) + 1, sharex=True, squeeze=False)[:, 0]
    for axes, result in zip(panels, results, strict=False):
        for tenant, course in result.service.items():
            axes.plot(*_columns(course), label=tenant)
        axes.set(title=replayed.label(result), ylabel="service per second")
        axes.sharey(panels[0])
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    for result in results:
        panels[-1].plot(*_columns(result.gap), label=replayed.label(result))
    panels[-1].set(title="Gap between tenants", xlabel="seconds", ylabel="service per weight")
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(replayed.trace.name)
    try:
        figure.savefig(file)
    except ValueError as error:
        raise PictureError(f"{file} cannot be written: {error}") from error


def _columns(course: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [at_s for at_s, _ in course], [value for _, value in course]


# --- words ---


def _quantiles(values: Mapping[str, float] | None) -> list[str]:
    return [NOTHING] * 3 if values is None else [in_seconds(each) for each in values.values()]


def _span(value: float) -> str:
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.1f} h"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
