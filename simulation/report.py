"""Reports of a replay: tables in the terminal, JSON, and a page that opens offline."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files
from string import Template

from backends.simulated.engine_profiles import EngineProfile
from simulation.plots import COLOURS, Series, chart
from simulation.replay import TENANTS_LISTED, Percentiles, ReplayResult, TenantResult
from simulation.run import IMPOSSIBLE
from simulation.traces.reader import Trace
from simulation.verdict import compared, in_seconds, named, short, verdict

NOTHING = "-"
POINTS_MIN = 3
"""Fewest points that make a chart."""
Course = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Replayed:
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
        """Indices of the tenants in the tables: those with most demand, and those who gain and pay most."""
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


def as_text(replayed: Replayed) -> str:
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


POLICY_HEADS = (
    "policy", "requests", "completed", "refused", "TTFT p50", "p95", "p99", "tokens/s", "Jain", "max gap",
    "preemptions", "wasted tokens",
)  # fmt: skip


def _policy_rows(replayed: Replayed) -> list[list[str]]:
    return [list(POLICY_HEADS), *([replayed.label(each), *_policy_cells(each)] for each in replayed.results)]


def _policy_cells(each: ReplayResult) -> list[str]:
    jain = NOTHING if each.jain is None else f"{each.jain:.3f}"
    return [
        f"{each.requests:,}", f"{each.completed:,}", f"{sum(each.refused.values()):,}", *_quantiles(each.ttft_s),
        f"{each.tokens_per_s:,.0f}", jain, f"{each.gap_max:,.0f}", f"{each.preemptions:,}", f"{each.wasted_tokens:,}",
    ]  # fmt: skip


def _refused_rows(replayed: Replayed) -> list[list[str]]:
    rows = [["policy", "reason", "requests"]]
    for each in replayed.results:
        rows += [[replayed.label(each), reason, f"{count:,}"] for reason, count in each.refused.items()]
    return rows


def _tenant_rows(replayed: Replayed) -> list[list[str]]:
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


def as_json(replayed: Replayed) -> str:
    """Return all measurements as JSON; times are in seconds."""
    trace = replayed.trace
    one, other = compared(replayed.results)
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
            "elsewhere": trace.elsewhere,
            "assumed": trace.assumed,
        },
        "engines": {"backends": replayed.backends, "profile": replayed.profile.name},
        "warning": replayed.warning(),
        "notes": replayed.notes(),
        "policies": [asdict(each) for each in replayed.results],
    }  # fmt: skip
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


# --- page ---


def as_html(replayed: Replayed) -> str:
    """Return one HTML file with its styles, plots and script. Empty sections are left out."""
    results = replayed.results
    most = max((rate for each in results for course in each.service.values() for _, rate in course), default=0.0)
    last_s = max((course[-1][0] for each in results for course in each.service.values() if course), default=0.0)
    services = [
        _figure(replayed.label(each), "service per second", each.service, x_to=last_s, y_to=most) for each in results
    ]
    gap = _figure("Gap", "service per weight", {replayed.label(each): each.gap for each in results})
    refused = _refused_rows(replayed)
    template = Template((files("simulation") / "replay.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(replayed.trace.name),
        verdict=re.sub("`(.+?)`", r"<code>\1</code>", escape(verdict(results))),
        heading=escape(replayed.heading()),
        notes="".join(f"<li>{escape(note)}</li>" for note in [replayed.warning(), *replayed.notes()] if note),
        policies=_table(_policy_rows(replayed)),
        tenants=_bars(replayed),
        services=_section(
            "Service over time",
            "What each tenant received, per second, averaged around each moment. All charts have the same scale.",
            _charts(services),
        ),
        gap=_section(
            "Gap over time",
            "How far apart two tenants came while both had requests waiting; a fair policy keeps it bounded.",
            _charts([gap] if any(each.gap_max for each in results) else []),
        ),
        refused=_section("Refused, by reason", "", _table(refused, left=(0, 1)) if len(refused) > 1 else ""),
    )


def _section(title: str, text: str, body: str) -> str:
    """Return a section, or "" for an empty body."""
    return f'\n<h2>{title}</h2>\n<p class="soft">{text}</p>\n{body}' if body else ""


def _charts(figures: Sequence[str]) -> str:
    drawn = "".join(figures)
    return f'<div class="charts">\n{drawn}</div>\n' if drawn else ""


def _table(rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        kinds = (' class="left"' if column in left else "" for column in range(len(row)))
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(row, kinds, strict=True))

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows[1:])
    return f'<div class="wide"><table><thead><tr>{cells(rows[0], "th")}</tr></thead><tbody>{body}</tbody></table></div>'


def _figure(title: str, y_label: str, courses: Mapping[str, Course], *, x_to: float = 0.0, y_to: float = 0.0) -> str:
    """Return a chart with its points for the pointer script, or "" without a course."""
    drawn = [
        Series(short(name), [(round(time_s, 2), round(value, 1)) for time_s, value in course])
        for name, course in courses.items()
        if len(course) >= POINTS_MIN
    ]
    if not any(value for one in drawn for _, value in one.points):
        return ""
    svg = chart(drawn, title, "seconds", y_label, x_to=x_to, y_to=y_to)
    points = json.dumps([(one.name, one.points) for one in drawn], ensure_ascii=False).replace("<", "\\u003c")
    return f'<figure>{svg}<script type="application/json">{points}</script></figure>\n'


def _bars(replayed: Replayed) -> str:
    """Return bars of each tenant's time to first token under each policy: dark to the median, light to the p95."""
    results = replayed.results
    longest_s = max(
        (each.ttft_s.p95 for one in results for each in one.tenants if each.ttft_s is not None), default=0.0
    )
    heads = ["tenant", "policy", "", "p50", "p95", "p99", "completed", "service"]
    head = "".join(f"<th{_LEFT if column < 3 else ''}>{name}</th>" for column, name in enumerate(heads))
    bodies = []
    for number in replayed.listed:
        tenant = results[0].tenants[number]
        name = f'<th rowspan="{len(results)}"{_LEFT}>{escape(short(tenant.name))}{_weight(tenant)}</th>'
        rows = []
        for index, each in enumerate(results):
            of = each.tenants[number]
            cells = [*_quantiles(of.ttft_s), f"{of.completed:,} of {of.requests:,}", f"{of.service:,.0f}"]
            numbers = "".join(f"<td>{cell}</td>" for cell in cells)
            bar = _bar(of.ttft_s, longest_s, COLOURS[index % len(COLOURS)])
            label = escape(replayed.label(each))
            rows.append(f"<tr>{name}<td{_LEFT}>{label}</td><td{_LEFT}>{bar}</td>{numbers}</tr>")
            name = ""
        bodies.append(f"<tbody>{''.join(rows)}</tbody>")
    return f'<div class="wide"><table class="bars"><thead><tr>{head}</tr></thead>{"".join(bodies)}</table></div>'


def _bar(ttft_s: Percentiles | None, longest_s: float, colour: str) -> str:
    if ttft_s is None or not longest_s:
        return ""
    shares = (100 * value / longest_s for value in (ttft_s.p95, ttft_s.p50))
    parts = (f'<i style="width:{share:.2f}%;background:{colour}"></i>' for share in shares)
    return f'<div class="bar">{"".join(parts)}</div>'


_LEFT = ' class="left"'


# --- words ---


def _weight(tenant: TenantResult) -> str:
    return "" if tenant.weight == 1 else f" <small>weight {tenant.weight:g}</small>"


def _quantiles(values: Percentiles | None) -> list[str]:
    return [NOTHING] * 3 if values is None else [in_seconds(each) for each in (values.p50, values.p95, values.p99)]


def _span(value: float) -> str:
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.1f} h"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
