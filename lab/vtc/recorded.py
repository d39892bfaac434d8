"""How fair were runs that somebody else measured? The measures of VTC on a table of requests.

Columns: `run, client, input_tokens, output_tokens, t_s, ttft_s, e2e_s` (from arrival; -1 = rejected), and what names
the run, `scheduler` and `suite`. Beside `FILE.csv` or `FILE.csv.gz`, `FILE.meta.json` may say how long each run took:
`[{"run": 6, "total_time_s": 928.66}]`. Without it, a run ends with its last answer.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from lab.vtc.fairness import Discrepancy, Served, discrepancy, tokens_per_s
from policies.orders.cost import LinearCost, ProfiledCost
from simulation.traces.lines import TraceError, csv_rows

REJECTED = -1.0
REQUESTS_MAX = 5_000_000


class _Row(Struct):
    run: Annotated[str, Meta(max_length=1024)]
    client: Annotated[str, Meta(max_length=1024)]
    input_tokens: Annotated[int, Meta(ge=0, le=1_000_000_000)]
    output_tokens: Annotated[int, Meta(ge=0, le=1_000_000_000)]
    t_s: Annotated[float, Meta(ge=0)]
    ttft_s: float
    e2e_s: float
    scheduler: str = ""
    suite: str = ""


class _RunMeta(Struct):
    run: str | int
    total_time_s: Annotated[float, Meta(gt=0)]


@dataclass(slots=True)
class RecordedRun:
    """A run of the table, in the order of its lines."""

    run: str
    scheduler: str
    suite: str
    requests: list[Served]
    total_s: float


@dataclass(frozen=True, slots=True)
class RunMeasures:
    """The measures of one run; `admitted` of `requests` were not rejected, `throughput` is in tokens per second."""

    run: str
    scheduler: str
    suite: str
    requests: int
    admitted: int
    linear: Discrepancy
    profiled: Discrepancy
    throughput: float

    def as_dict(self) -> dict[str, Any]:
        """As it is written to JSON: of the linear cost at the top, of the profiled one below."""
        fields = asdict(self)
        linear, profiled = fields.pop("linear"), fields.pop("profiled")
        if self.run.isdecimal():
            fields["run"] = int(self.run)
        return fields | _named(linear) | {"profiled": _named(profiled)}


def _named(measure: dict[str, float]) -> dict[str, float]:
    return {"max_diff": measure["max"], "avg_diff": measure["avg"], "diff_var": measure["var"]}


def measures(run: RecordedRun) -> RunMeasures:
    """Tables 2 to 6 of the paper in numbers."""
    requests = run.requests
    return RunMeasures(
        run.run, run.scheduler, run.suite, len(requests), sum(each.finished_s is not None for each in requests),
        discrepancy(requests, cost=LinearCost()), discrepancy(requests, cost=ProfiledCost()),
        tokens_per_s(requests, run.total_s),
    )  # fmt: skip


def read_runs(path: Path) -> list[RecordedRun]:
    """Every run of a table, in the order in which they first appear. Raises TraceError."""
    runs: dict[str, RecordedRun] = {}
    for count, (number, row) in enumerate(csv_rows(path, _Row), 1):
        if count > REQUESTS_MAX:
            raise TraceError(path, f"more than {REQUESTS_MAX} requests; cut it up", line=number)
        run = runs.get(row.run)
        if run is None:
            run = runs[row.run] = RecordedRun(row.run, row.scheduler, row.suite, [], 0.0)
        run.requests.append(_served(path, number, row))
    if not runs:
        raise TraceError(path, "holds no request")
    total_times_s = _total_times_s(path)
    for run in runs.values():
        last_s = max((each.finished_s or each.arrived_s for each in run.requests), default=0.0)
        run.total_s = total_times_s.get(run.run, last_s) or 1.0
    return list(runs.values())


def _served(path: Path, number: int, row: _Row) -> Served:
    for column in ("t_s", "ttft_s", "e2e_s"):
        value = getattr(row, column)
        if not isfinite(value) or (value < 0 and value != REJECTED):
            problem = f"{value:g} is no time; it is 0 or more, or -1 if the request was rejected"
            raise TraceError(path, problem, line=number, column=column)
    if (row.ttft_s == REJECTED) != (row.e2e_s == REJECTED):
        raise TraceError(path, "-1 in only one of ttft_s and e2e_s: was it rejected?", line=number, column="e2e_s")
    if row.e2e_s < row.ttft_s:
        problem = f"{row.e2e_s:g} is before its first token at {row.ttft_s:g}"
        raise TraceError(path, problem, line=number, column="e2e_s")
    if row.ttft_s == REJECTED:
        return Served(row.client, row.input_tokens, row.output_tokens, row.t_s, None, None)
    first_s, last_s = row.t_s + row.ttft_s, row.t_s + row.e2e_s
    return Served(row.client, row.input_tokens, row.output_tokens, row.t_s, first_s, last_s)


def _total_times_s(path: Path) -> dict[str, float]:
    """Return the total time of each run in the file beside this one; empty if there is no such file."""
    beside = path.with_name(path.name.removesuffix(".gz").removesuffix(".csv") + ".meta.json")
    if not beside.exists():
        return {}
    try:
        runs = msgspec.json.decode(beside.read_bytes(), type=list[_RunMeta])
    except OSError as error:
        raise TraceError(beside, f"cannot be read: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise TraceError(beside, f"{error}: expected a list of runs, each with run and total_time_s") from error
    return {str(one.run): one.total_time_s for one in runs}
