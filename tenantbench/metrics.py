"""The metrics (a) to (k) of one run of one workload.

Service is what the engine's log says: prompt tokens that it computed, and output tokens at twice the weight, as in VTC.
A tenant waits while one of its requests has been sent and has not started in the engine. A client that is refused
without a time waits until it asks again.
"""

# ruff: noqa: E501 a metric is a row
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import inf

from tenantbench.engine_model import Profile
from tenantbench.events import Event
from tenantbench.load import UNTOLD_WAIT_S, Record
from tenantbench.timeline import Interval, Service, intersection, length, percentile, slope, union
from tenantbench.workloads import HEAVY, LIGHT, WEIGHTS, Workload

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
BLINK_S = 0.25
"""A tenant whose next request comes this soon has not stopped waiting."""
ON_THE_WAY_S = 0.1
"""Time that a request has to reach the engine before it counts as held back."""
WINDOWS = 12
CONVERGED = 0.1
LAG_S_MAX = 0.1
OTHERS_MAX = 0.25
"""Part of the machine's cores that others may use."""


@dataclass(frozen=True)
class Metric:
    key: str
    title: str
    formula: str
    workloads: tuple[str, ...]
    is_high_good: bool = False
    unit: str = ""


CONTENDED = ("W2", "W3", "W9")
METRICS = (
    Metric("a_gap", "(a) service gap", "max D - min D while both wait, D(t) = S_i(t)/w_i - S_j(t)/w_j", CONTENDED, False, "tokens"),
    Metric("a_growth", "(a) growth of the gap", "|least-squares slope of D| over the longest time both wait", CONTENDED, False, "tokens/s"),
    Metric("b_jain", "(b) Jain, mean", "(sum x)^2 / (n sum x^2), x_i = S_i/w_i in windows of T/12 where all wait", CONTENDED, True),
    Metric("b_jain_min", "(b) Jain, least window", "the least of these windows", CONTENDED, True),
    Metric("c_ttft_p50", "(c) isolation, p50", "p50 of the light tenant's TTFT beside / alone", ("W1",)),
    Metric("c_ttft_p99", "(c) isolation, p99", "p99 of the light tenant's TTFT beside / alone", ("W1",)),
    Metric("c_beside_p99_s", "(c) TTFT beside, p99", "p99 of the light tenant's TTFT while another tenant floods", ("W1",), False, "s"),
    Metric("d_tokens_per_s", "(d) tokens/s", "(prompt + output tokens that the engine computed once) / T", ("W1", "W2", "W6", "W8"), True),
    Metric("d_of_engine", "(d) work conservation", "tokens/s / tokens/s of the engine alone in the same round", ("W1", "W2", "W6", "W8"), True),
    Metric("d_idle_s", "(d) idle while requests wait", "integral of free slots / slots while KV is free and a request is held outside for 0.1 s", ("W1", "W2", "W6", "W8"), False, "s"),
    Metric("e_convergence_s", "(e) convergence", "after a join, until a window of 1/8 of the stay within 10 % of the fair share; the stay if never", ("W5",), False, "s"),
    Metric("e_starvation_s", "(e) longest starvation", "longest time in which a tenant waits and none of its tokens is computed", ("W1", "W5", "W6"), False, "s"),
    Metric("f_share_error", "(f) share error", "max |share_i / (w_i / sum w) - 1| while all wait", ("W3", "W9")),
    Metric("g_tasks", "(g) agents' tasks", "tasks of which all calls were answered", ("W7",), True),
    Metric("g_task_p95_s", "(g) task, p95", "from its first call to its last answer", ("W7",), False, "s"),
    Metric("g_wasted", "(g) wasted", "tokens that the engine computed again after preemption or eviction", ("W7",), False, "tokens"),
    Metric("h_cheat_gain", "(h) cheat gain", "service of 50 sessions / service of one", ("W4",)),
    Metric("i_honesty", "(i) honesty", "told waits that came true / told waits that were tried", ("W6",), True),
    Metric("i_refused", "(i) refused", "rejected tries, 429 and 503", ("W6", "W8")),
    Metric("j_errors", "(j) errors", "answers that failed or broke off, of valid requests", ("W1", "W6", "W8", "W10")),
    Metric("j_lost", "(j) lost", "made by the engine for a finished request, and not received", ("W1", "W6", "W8", "W10"), False, "tokens"),
    Metric("j_doubled", "(j) doubled", "received twice, or made by a second run of one request", ("W1", "W6", "W8", "W10"), False, "tokens"),
    Metric("k_cpu_ms", "(k) CPU per request", "CPU time of the gateway's processes, both instances / requests", ("W1", "W10"), False, "ms"),
    Metric("k_ttft_ms", "(k) TTFT alone, p50", "p50 from a request's time to its first token", ("W10",), False, "ms"),
    Metric("k_rss_mb", "(k) memory", "largest resident set of the gateway's processes", ("W1", "W10"), False, "MB"),
)  # fmt: skip
"""Rows of a report, in order. (c) and (d) stand side by side: limiters win (c) alone, FCFS wins (d) alone."""


class Run:
    """Records and engine events of one workload, on a clock that begins with it."""

    def __init__(self, workload: Workload, records: list[Record], events: list[Event], profile: Profile) -> None:
        self.workload, self.profile = workload, profile
        self.span: Interval = (0.0, workload.seconds)
        self.records = records
        inside = [event for event in events if event.t_s <= workload.seconds]
        self.events = sorted(inside, key=lambda event: event.t_s)  # an abort is logged amid a step whose end is known
        self.starts = {event.request: event.t_s for event in self.events if event.kind == "start"}
        self.arrivals = {event.request: event.t_s for event in reversed(self.events) if event.kind == "arrive"}
        steps: dict[str, list[tuple[float, float]]] = {tenant: [] for tenant in workload.tenants}
        for event in self.events:
            if event.kind == "serve" and event.tenant in steps:
                steps[event.tenant].append((event.t_s, PROMPT_WEIGHT * event.prompt + OUTPUT_WEIGHT * event.output))
        self.service = {tenant: Service(steps[tenant]) for tenant in steps}
        self.waits = {tenant: self._waits(tenant) for tenant in steps}
        self.all_wait = [self.span]
        for waits in self.waits.values():
            self.all_wait = intersection(self.all_wait, waits)

    def _waits(self, tenant: str) -> list[Interval]:
        waits = []
        for record in self.records:
            if record.tenant == tenant and record.outcome != "bad":
                end = self.gave_up_s(record)
                waits.append((record.sent_s, min(self.starts.get(record.request, end), end)))
        return union(waits, BLINK_S)

    def gave_up_s(self, record: Record) -> float:
        """Return when a request ended; if it was refused, when its client might ask again."""
        end = self.workload.seconds if record.end_s is None else record.end_s
        return min(end + UNTOLD_WAIT_S * (record.outcome == "refused"), self.workload.seconds)

    def share_served(self) -> dict[str, float]:
        """Return the service of each tenant while all wait."""
        return {t: sum(service.within(i) for i in self.all_wait) for t, service in self.service.items()}


def service_gap(run: Run) -> dict[str, float | None]:
    """Return (a)."""

    def served(tenant: str, interval: Interval) -> float:
        return run.service[tenant].within(interval) / WEIGHTS[tenant]

    gap, growth, longest_s = 0.0, 0.0, 0.0
    for one, other in combinations(run.service, 2):
        times = sorted({*run.service[one].times, *run.service[other].times})
        for interval in intersection(run.waits[one], run.waits[other]):
            begin, end = interval
            within = [t for t in times if begin < t <= end]
            points = [(t, served(one, (begin, t)) - served(other, (begin, t))) for t in within]
            differences = [0.0, *(difference for _, difference in points)]
            gap = max(gap, max(differences) - min(differences))
            if end - begin > longest_s:
                longest_s, growth = end - begin, abs(slope(points))
    return {"a_gap": gap if longest_s else None, "a_growth": growth if longest_s else None}


def jain(values: list[float]) -> float:
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def jain_windows(run: Run) -> dict[str, float | None]:
    """Return (b)."""
    width = run.workload.seconds / WINDOWS
    found = []
    for begin, end in run.all_wait:
        for i in range(int((end - begin) / width + 1e-9)):
            window = (begin + i * width, begin + (i + 1) * width)
            found.append(jain([service.within(window) / WEIGHTS[t] for t, service in run.service.items()]))
    return {"b_jain": sum(found) / len(found) if found else None, "b_jain_min": min(found, default=None)}


def isolation(run: Run) -> dict[str, float | None]:
    """Return (c). A request without a first token counts with the time that it had; none of the last twentieth count."""
    alone: list[float] = []
    beside: list[float] = []
    for record in run.records:
        if record.tenant == LIGHT and record.due_s < run.workload.seconds * 0.95:
            answered_s = record.first_s if record.first_s is not None else run.workload.seconds
            (alone if record.due_s < run.workload.join_s else beside).append(answered_s - record.due_s)
    found = {"c_beside_p99_s": percentile(beside, 0.99)}
    for key, part in (("c_ttft_p50", 0.5), ("c_ttft_p99", 0.99)):
        before, after = percentile(alone, part), percentile(beside, part)
        found[key] = after / before if before and after is not None else None
    return found


def work_conservation(run: Run) -> dict[str, float | None]:
    """Return (d)."""
    tokens = sum(event.prompt + event.output for event in run.events if event.kind == "serve")
    valid = [record for record in run.records if record.outcome != "bad"]
    held = [
        (record.sent_s + ON_THE_WAY_S, min(run.arrivals.get(record.request, inf), run.gave_up_s(record)))
        for record in valid
    ]
    largest = max((record.prompt for record in valid), default=0)
    outside, idle_s, since, free = union(held), 0.0, 0.0, 1.0
    for event in [*(e for e in run.events if e.kind == "state"), Event("state", run.workload.seconds)]:
        idle_s += free * length(intersection([(since, event.t_s)], outside)) if free else 0.0
        has_room = event.waiting == 0 and event.kv_tokens + largest <= run.profile.kv_tokens
        since, free = event.t_s, 1 - event.running / run.profile.slots if has_room else 0.0
    return {"d_tokens_per_s": tokens / run.workload.seconds, "d_idle_s": idle_s}


def starvation(run: Run) -> dict[str, float | None]:
    """Return (e)."""
    longest = 0.0
    for tenant, service in run.service.items():
        for begin, end in run.waits[tenant]:
            times = [begin, *(time for time in service.times if begin < time < end), end]
            longest = max(longest, max(after - before for before, after in pairwise(times)))
    return {"e_starvation_s": longest}


def convergence(run: Run) -> dict[str, float | None]:
    """Return (e): the whole stay where the shares did not converge before the tenant left."""
    join, leave = run.workload.join_s, run.workload.leave_s
    width = (leave - join) / 8
    fair = WEIGHTS[LIGHT] / sum(WEIGHTS[tenant] for tenant in run.service)
    for time in [join, *(time for time in run.service[LIGHT].times if join < time <= leave - width)]:
        window = (time, time + width)
        total = sum(service.within(window) for service in run.service.values())
        if total and abs(run.service[LIGHT].within(window) / total / fair - 1) <= CONVERGED:
            return {"e_convergence_s": time - join}
    return {"e_convergence_s": leave - join}


def share_error(run: Run) -> dict[str, float | None]:
    """Return (f)."""
    served = run.share_served()
    total, weights = sum(served.values()), sum(WEIGHTS[tenant] for tenant in served)
    if not total:
        return {"f_share_error": None}
    return {"f_share_error": max(abs(served[t] / total / (WEIGHTS[t] / weights) - 1) for t in served)}


def agents(run: Run) -> dict[str, float | None]:
    """Return (g)."""
    calls = {session.name: len(session.asks) for session in run.workload.sessions if session.is_task}
    tasks: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for record in run.records:
        if record.session in calls:
            tasks[record.session, record.task].append(record)
    times = [
        max(record.end_s or 0.0 for record in task) - task[0].due_s
        for (session, _), task in tasks.items()
        if sum(record.outcome == "done" for record in task) == calls[session]
    ]
    wasted = sum(event.wasted for event in run.events if event.kind == "serve") if run.profile.logs_waste else None
    return {"g_tasks": len(times), "g_task_p95_s": percentile(times, 0.95), "g_wasted": wasted}


def cheat_gain(run: Run) -> dict[str, float | None]:
    """Return (h). Both tenants have requests open all the time, so the whole run counts."""
    served = {tenant: service.within(run.span) for tenant, service in run.service.items()}
    return {"h_cheat_gain": served[HEAVY] / served[LIGHT] if served[LIGHT] else None}


def honesty(run: Run) -> dict[str, float | None]:
    """Return (i). The next try after each told wait counts, if its outcome is known."""
    tried = came_true = 0
    for record in run.records:
        for i, (_, _, told_s) in enumerate(record.attempts):
            is_last = i == len(record.attempts) - 1
            is_admitted = is_last and (record.first_s is not None or record.outcome == "done")
            if told_s is not None and (not is_last or is_admitted):
                tried += 1
                came_true += is_admitted
    refused = sum(status in (429, 503) for record in run.records for _, status, _ in record.attempts)
    return {"i_honesty": came_true / tried if tried else None, "i_refused": refused}


def integrity(run: Run) -> dict[str, float | None]:
    """Return (j)."""
    runs: dict[str, list[int]] = defaultdict(list)
    for event in run.events:
        if event.kind == "stop":
            runs[event.request].append(event.output)
    lost = doubled = errors = 0
    for record in run.records:
        made = runs[record.request]
        errors += record.outcome == "error"
        doubled += record.doubled + (sum(made) - max(made) if made else 0)
        if record.outcome == "done" and made:
            lost += max(0, max(made) - record.tokens)
    return {"j_errors": errors, "j_lost": lost, "j_doubled": doubled}


def measure(run: Run, cpu_s: float | None = None, rss_bytes: float | None = None) -> dict[str, float | None]:
    """Return all metrics that this workload is for."""
    requests = max(1, len(run.records))
    found: dict[str, float | None] = {"k_cpu_ms": None if cpu_s is None else 1000 * cpu_s / requests}
    waits = [record.first_s - record.due_s for record in run.records if record.first_s is not None]
    found["k_ttft_ms"] = 1000 * (percentile(waits, 0.5) or 0.0) if waits else None
    found["k_rss_mb"] = None if rss_bytes is None else rss_bytes / 1e6
    for metric in (service_gap, jain_windows, work_conservation, starvation, share_error, honesty, integrity):
        found |= metric(run)
    special = {"W1": isolation, "W4": cheat_gain, "W5": convergence, "W7": agents}
    if metric_of_one := special.get(run.workload.name):
        found |= metric_of_one(run)
    return {m.key: found.get(m.key) for m in METRICS if run.workload.name in m.workloads}


def reasons_void(lags_s: list[float], busy_others: float) -> list[str]:
    """Return why these numbers must not be used: a client that lagged, or a machine that did other work."""
    lag_s = percentile(lags_s, 0.99) or 0.0
    reasons = []
    if lag_s >= LAG_S_MAX:
        reasons.append(f"the client lagged: p99 {1000 * lag_s:.0f} ms")
    if busy_others > OTHERS_MAX:
        reasons.append(f"the machine was loaded: {100 * busy_others:.0f} % of its cores by others")
    return reasons
