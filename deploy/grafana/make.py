"""Writes the dashboards beside this file: python deploy/grafana/make.py

What Grafana keeps of a panel is forty lines of JSON, of which its title, its queries and its unit are worth reading.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "dashboards"
WIDTH, HEIGHT = 12, 8
POOL = 'pool=~"$pool"'


@dataclass(frozen=True)
class Panel:
    title: str
    says: str
    """What one looks for, in the corner of the panel."""
    queries: dict[str, str]
    """By legend. What ends in `due`, `slots` or `there are` is what the others are measured against, and dashed."""
    unit: str = "short"
    most: float | None = None
    stacks: bool = False


def quantiles(metric: str, by: str, **labels: str) -> dict[str, str]:
    of = ", ".join([POOL, *(f'{name}="{value}"' for name, value in labels.items())])
    rates = f"sum by (le, {by}) (rate({metric}_bucket{{{of}}}[$__rate_interval]))"
    return {f"{{{{{by}}}}} p{share:.0%}"[:-1]: f"histogram_quantile({share}, {rates})" for share in (0.5, 0.95)}


def of_all(metric: str, by: str = "tenant") -> str:
    total = f"scalar(sum(fairgate_recent_service{{{POOL}}}))"
    return f"sum by ({by}) ({metric}{{{POOL}}}) / {total}"


TENANTS = (
    Panel(
        "Share received against share due",
        "Of the service within the last minute. Who waits and stays below its dashed line is not served fairly.",
        {
            "{{tenant}}": of_all("fairgate_recent_service"),
            "{{tenant}} due": of_all("fairgate_recent_service_due"),
        },
        "percentunit",
    ),
    Panel(
        "Groups",
        "Of the service within the last minute. `part`: if all ask for more; `floor` and `ceiling`: by the config.",
        {
            "{{group}} received": of_all("fairgate_group_service", "group"),
            "{{group}} due": of_all("fairgate_group_service_due", "group"),
            "{{group}} part": "max by (group) (fairgate_group_share)",
            "{{group}} floor": "max by (group) (fairgate_group_floor) > 0",
            "{{group}} ceiling": "max by (group) (fairgate_group_ceiling) < 1",
        },
        "percentunit",
    ),
    Panel(
        "Requests that wait, by tenant",
        "A tenant that asks for more than its share waits behind its own requests; the others should not.",
        {"{{tenant}}": f"sum by (tenant) (fairgate_queued_requests{{{POOL}}})"},
        stacks=True,
    ),
    Panel(
        "Wait before an engine, p50 and p95",
        "Of completed requests.",
        quantiles("fairgate_queue_seconds", "tenant", outcome="completed"),
        "s",
    ),
    Panel(
        "Time to first token, p50 and p95",
        "From arrival at the gateway, so the wait is part of it. Of streamed answers.",
        quantiles("fairgate_first_token_seconds", "tenant"),
        "s",
    ),
    Panel(
        "What requests wait for",
        "The mean number of requests that wait for each. `turn`: others go first. The rest is what the engines lack.",
        {"{{obstacle}}": f"sum by (obstacle) (rate(fairgate_held_back_seconds_sum{{{POOL}}}[$__rate_interval]))"},
        stacks=True,
    ),
    Panel(
        "Refused and failed, by reason",
        "docs/operating.md has the reasons. A tenant's own mistakes are among the refused.",
        {
            "{{outcome}}: {{reason}}": "sum by (outcome, reason) "
            '(rate(fairgate_not_completed_total{pool=~"$pool|"}[$__rate_interval]))'
        },
        "reqps",
        stacks=True,
    ),
    Panel(
        "Requests ended, by tenant",
        "In whatever way.",
        {"{{tenant}}": f"sum by (tenant) (rate(fairgate_requests_total{{{POOL}}}[$__rate_interval]))"},
        "reqps",
        stacks=True,
    ),
    Panel(
        "Tokens used, by tenant",
        "As the engines count them. Cached tokens are part of the input.",
        {"{{tenant}} {{kind}}": f"sum by (tenant, kind) (rate(fairgate_tokens_total{{{POOL}}}[$__rate_interval]))"},
        "short",
    ),
)

ENGINES = (
    Panel(
        "Engines in service",
        "Of each pool, and how many there are.",
        {
            "{{pool}}": f"sum by (pool) (min by (pool, backend) (fairgate_backend_up{{{POOL}}}))",
            "{{pool}}: there are": f"count by (pool) (count by (pool, backend) (fairgate_backend_up{{{POOL}}}))",
        },
    ),
    Panel(
        "KV cache expected, by engine",
        "With the growth of what runs. It should be close to full while requests wait.",
        {"{{backend}}": f"max by (backend) (fairgate_kv_projected_ratio{{{POOL}}})"},
        "percentunit",
        most=1.0,
    ),
    Panel(
        "Sequences and slots, by engine",
        "What runs, and what is taken to run side by side.",
        {
            "{{backend}}": f"sum by (backend) (fairgate_dispatched_sequences{{{POOL}}})",
            "{{backend}} slots": f"max by (backend) (fairgate_backend_slots{{{POOL}}})",
        },
    ),
    Panel(
        "Preemptions, by engine",
        "How often an engine took the KV cache from a running request, which it then begins again. Should be none.",
        {"{{backend}}": f"max by (backend) (rate(fairgate_backend_preemptions_total{{{POOL}}}[$__rate_interval]))"},
        "ops",
    ),
    Panel(
        "Prompt tokens found in the prefix cache, by engine",
        "Of all prompt tokens.",
        {
            "{{backend}}": "sum by (backend) "
            f'(rate(fairgate_backend_prompt_tokens_total{{{POOL}, kind="cached"}}[$__rate_interval]))'
            " / sum by (backend) "
            f'(rate(fairgate_backend_prompt_tokens_total{{{POOL}, kind="input"}}[$__rate_interval]))'
        },
        "percentunit",
        most=1.0,
    ),
    Panel(
        "KV cache overloaded",
        "1 while new interactions of those beyond their limits are refused.",
        {"{{pool}}": f"max by (pool) (fairgate_overloaded{{{POOL}}})"},
        most=1.0,
    ),
    Panel(
        "Is all well with the gateway?",
        "1: yes. The last reload was taken; Redis answers; usage is written. The last two where the config has them.",
        {
            "{{instance}} reload": "fairgate_config_reload_success",
            "{{instance}} Redis": "fairgate_state_shared",
            "{{instance}} usage": "fairgate_usage_written",
        },
        most=1.0,
    ),
    Panel(
        "What was lost",
        "Lines of the access log, requests that are not in the usage, spans. Should be none.",
        {
            "{{instance}} log lines": "rate(fairgate_access_log_lines_lost_total[$__rate_interval])",
            "{{instance}} usage": "rate(fairgate_usage_requests_dropped_total[$__rate_interval])",
            "{{instance}} spans": 'rate(fairgate_spans_total{outcome="lost"}[$__rate_interval])',
        },
        "ops",
    ),
    Panel(
        "CPU of the gateway",
        "Of one core.",
        {"{{instance}}": 'rate(process_cpu_seconds_total{job="fairgate"}[$__rate_interval])'},
        "percentunit",
    ),
    Panel(
        "Memory of the gateway",
        "",
        {"{{instance}}": 'process_resident_memory_bytes{job="fairgate"}'},
        "bytes",
    ),
)

DASHBOARDS = {
    "fairgate-tenants": ("fairgate: who is served", TENANTS),
    "fairgate-engines": ("fairgate: engines and gateway", ENGINES),
}


def dashboard(uid: str, title: str, panels: tuple[Panel, ...]) -> dict[str, Any]:
    return {
        "uid": uid,
        "title": title,
        "tags": ["fairgate"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": list(_variables())},
        "links": [{"type": "dashboards", "title": "fairgate", "tags": ["fairgate"], "includeVars": True}],
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    yield {
        "name": "pool",
        "label": "Pool",
        "type": "query",
        "datasource": _source(),
        "query": "label_values(fairgate_backend_up, pool)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _source() -> dict[str, str]:
    return {"type": "prometheus", "uid": "${datasource}"}


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 30 if panel.stacks else 0, "showPoints": "never"}
    if panel.stacks:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": custom}
    if panel.most is not None:
        defaults["max"] = panel.most
    dashed = {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 6]}}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.says,
        "datasource": _source(),
        "gridPos": {"x": number % 2 * WIDTH, "y": number // 2 * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {
            "defaults": defaults,
            "overrides": [
                {"matcher": {"id": "byRegexp", "options": "/ (due|slots|there are)$/"}, "properties": [dashed]}
            ],
        },
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}, "legend": {"displayMode": "list"}},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": expression, "legendFormat": legend, "datasource": _source()}
            for at, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def files() -> dict[Path, str]:
    """What is in each file."""
    return {
        FOLDER / f"{uid}.json": json.dumps(dashboard(uid, title, panels), indent=1) + "\n"
        for uid, (title, panels) in DASHBOARDS.items()
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in files().items():
        path.write_text(text)
