"""Which metrics are there? One entry each: its kind, its text, its labels, and how values of several workers merge.

The reference is made from this table. `fairgate_..._total` are counters. The owner of the numbers supplies the rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

Row = tuple[Any, ...]
"""Values of the labels, and of the metric; for a histogram its buckets and its sum."""
SUM, MOST, LEAST = "sum", "most", "least"


class MetricFamily(NamedTuple):
    """The text, labels and kind of one metric."""

    text: str
    labels: tuple[str, ...] = ()
    merged: str = SUM
    """Merge rule for values of several workers: their sum if each has a part, else the largest or smallest."""
    made_by: type[Metric] = GaugeMetricFamily


def _counter(text: str, *labels: str, merged: str = SUM) -> MetricFamily:
    return MetricFamily(text, labels, merged, CounterMetricFamily)


def _histogram(text: str, *labels: str) -> MetricFamily:
    return MetricFamily(text, labels, SUM, HistogramMetricFamily)


_ENGINE: Final = ("pool", "backend")
_TENANT: Final = ("pool", "tenant")
_GROUP: Final = ("pool", "group")
FAMILIES: Final = {
    "fairgate_requests_total": _counter("Requests ended.", "pool", "tenant", "model", "outcome"),
    "fairgate_not_completed_total": _counter("Requests that did not complete.", "pool", "tenant", "outcome", "reason"),
    "fairgate_key_not_completed_total": _counter(
        "Requests that did not complete, for keys with labels.", "tenant", "key", "outcome", "reason"
    ),
    "fairgate_tokens_total": _counter(
        "Tokens settled; cached tokens are part of input.", "pool", "tenant", "model", "kind"
    ),
    "fairgate_wasted_tokens_total": _counter("Tokens of interactions in which a later call was refused.", "tenant"),
    "fairgate_given_back_total": _counter(
        "Requests of class batch that were preempted at their engine for other work, and wait again.", "pool"
    ),
    "fairgate_faults_total": _counter("Events that failed by a fault of the gateway; see its log.", "pool"),
    "fairgate_queue_seconds": _histogram("Wait before dispatch.", "pool", "tenant", "outcome"),
    "fairgate_expected_waits_total": _counter(
        "Waits of over a second: right (half to twice the expected wait), longer or shorter.", "pool", "outcome",
    ),
    "fairgate_held_back_seconds": _histogram("Part of the wait, by its cause.", "pool", "obstacle"),
    "fairgate_first_token_seconds": _histogram("Arrival to first token.", "pool", "tenant", "model"),
    "fairgate_request_seconds": _histogram("Arrival to end.", "pool", "outcome"),
    "fairgate_queued_requests": MetricFamily("Requests waiting.", _TENANT),
    "fairgate_queued_bytes": MetricFamily("Bytes of bodies waiting.", ("pool",)),
    "fairgate_wanted_requests": MetricFamily("Requests that wait or run, also without an engine.", ("pool",)),
    "fairgate_wanted_tokens": MetricFamily("Prompt and expected answer tokens of the wanted requests.", ("pool",)),
    "fairgate_start_seconds": MetricFamily("Usual time of an engine's start, with start_s_max.", ("pool",), MOST),
    "fairgate_recent_service": MetricFamily("Service received within the last minute.", _TENANT),
    "fairgate_recent_service_due": MetricFamily("Service due within the last minute, by weight.", _TENANT),
    "fairgate_group_service": MetricFamily("Service that a group received within the last minute.", _GROUP),
    "fairgate_group_service_due": MetricFamily("Service due to a group within the last minute.", _GROUP),
    "fairgate_group_share": MetricFamily("Part of a pool for the group if all tenants ask for more.", ("group",), MOST),
    "fairgate_group_floor": MetricFamily("Floor of the group as part of a pool; 0: none.", ("group",), MOST),
    "fairgate_group_ceiling": MetricFamily("Ceiling of the group as part of a pool; 1: none.", ("group",), MOST),
    "fairgate_quota_used_ratio": MetricFamily("Used part of a limit, of 1.", ("holder", "limit"), MOST),
    "fairgate_open_interactions": MetricFamily("Open interactions."),
    "fairgate_working_set_tokens": MetricFamily("Tokens of contexts of open interactions.", _TENANT),
    "fairgate_overloaded": MetricFamily("1 while new interactions may be refused.", ("pool",), MOST),
    "fairgate_dispatched_sequences": MetricFamily("Sequences dispatched.", _ENGINE),
    "fairgate_backend_slots": MetricFamily("Sequences that the engine is expected to run at once.", _ENGINE, MOST),
    "fairgate_kv_projected_ratio": MetricFamily("Largest expected use of the KV cache, of 1.", _ENGINE, MOST),
    "fairgate_backend_up": MetricFamily("1 if the engine is in service.", _ENGINE, LEAST),
    "fairgate_backend_info": MetricFamily("1; `engine` is the kind of the engine.", (*_ENGINE, "engine"), MOST),
    "fairgate_backend_on_steps": MetricFamily("1 if the engine reports its steps.", _ENGINE, LEAST),
    "fairgate_backend_draining": MetricFamily("1 while an operator or a reload drains the engine.", _ENGINE, MOST),
    "fairgate_backend_preemptions_total": _counter("Preemptions, as the engine reports.", *_ENGINE, merged=MOST),
    "fairgate_backend_prompt_tokens_total": _counter(
        "Prompt tokens settled: input, cached (part of input), expected to be cached, and the error of that.",
        *_ENGINE, "kind",
    ),
    "fairgate_name_lookup_success": MetricFamily("1 if the name had addresses when last looked up.", ("name",), LEAST),
    "fairgate_name_addresses": MetricFamily("Addresses of a name: engines, or left out.", ("name", "state"), MOST),
    "fairgate_replica_alone": MetricFamily("1 while other replicas cannot be reached.", ("about",), MOST),
    "fairgate_redis_commands_total": _counter("Commands to Redis.", "outcome"),
    "fairgate_state_shared": MetricFamily("1 while state is shared with replicas.", (), LEAST),
    "fairgate_usage_written": MetricFamily("1 while usage is written, 0 while usage is kept in memory.", (), LEAST),
    "fairgate_usage_waiting_sums": MetricFamily("Sums of usage that are not written yet."),
    "fairgate_usage_requests_dropped_total": _counter(
        "Requests whose usage is lost: no room, or an older copy replaced the database."
    ),
    "fairgate_batches": MetricFamily("Batches under way."),
    "fairgate_batch_items_total": _counter("Requests of batches whose results are written.", "outcome"),
    "fairgate_config_info": MetricFamily("1; equal hashes mean equal settings.", ("hash",), MOST),
    "fairgate_config_reload_success": MetricFamily("1 if the last reload succeeded.", (), LEAST),
    "fairgate_config_reload_timestamp_seconds": MetricFamily("Time at which the config in force was read.", (), LEAST),
    "fairgate_build_info": MetricFamily("1; the labels name version and build.", ("version", "build"), MOST),
    "fairgate_background_failures_total": _counter("Failures of a background task.", "task"),
    "fairgate_access_log_lines_lost_total": _counter("Lines of the access log that could not be written."),
    "fairgate_spans_total": _counter("Spans of requests.", "outcome"),
}  # fmt: skip


def family(name: str, rows: Iterable[Row]) -> Metric:
    """Return the metric with these rows."""
    one = FAMILIES[name]
    made = one.made_by(name, one.text, labels=one.labels)  # type: ignore[call-arg]
    for row in rows:
        made.add_metric(*row)  # type: ignore[attr-defined]
    return made


def single(name: str, value: float) -> Metric:
    """Return the metric without labels."""
    return family(name, [((), value)])
