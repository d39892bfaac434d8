"""Tracing: one OpenTelemetry span for each request whose trace is recorded.

The span is made at the end, from the record that the access log is written from. The SDK sends batches in a thread of
its own. At most SPANS_WAITING_MAX spans wait for it: a slow or absent collector loses spans, which are counted, and
delays no request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import AttributeValue
from prometheus_client.metrics_core import Metric

from gateway import __version__
from gateway.telemetry.access_log import hidden, interaction_name
from gateway.telemetry.metric_families import family
from gateway.telemetry.record import PATH_LENGTH_MAX, Outcome, RequestRecord
from gateway.telemetry.trace import TraceContext

logger = logging.getLogger("fairgate")

SPANS_WAITING_MAX: Final = 2048
BATCH_SPANS_MAX: Final = 512
BATCH_S: Final = 1.0
SEND_S: Final = 10.0
CLOSE_S: Final = 2.0
TEXT_MAX: Final = 256
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""Operations by path, as the conventions name them (`gen_ai.operation.name`). The conventions have no name for other
paths."""


class SpanExport(SpanExporter):
    """Maker of spans, and their exporter, which counts them and logs when sending fails or works again."""

    def __init__(self, endpoint: str | None) -> None:
        """Set up the exporter. OpenTelemetry's own environment variables supply a missing endpoint, and headers."""
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=SEND_S)
        self._place = endpoint or "the collector that OTEL_EXPORTER_OTLP_ENDPOINT names"
        self._processor = BatchSpanProcessor(
            self,
            max_queue_size=SPANS_WAITING_MAX,
            schedule_delay_millis=BATCH_S * 1000,
            max_export_batch_size=BATCH_SPANS_MAX,
        )
        own = Resource({SERVICE_NAME: "fairgate", SERVICE_VERSION: __version__})
        self._resource = Resource.get_empty().merge(own).merge(OTELResourceDetector().detect())
        self._scope = InstrumentationScope("fairgate", __version__)
        self._made = self._found_no_room = 0
        """Spans, and requests whose span found no room. Written by the loop; the other counts by the SDK's thread."""
        self._taken = self._sent = self._not_sent = 0
        self._lost_reported = 0

    def ended(self, record: RequestRecord) -> None:
        """Export the span of an ended request if its trace is recorded. Never waits."""
        trace = record.trace
        if trace is None or not trace.is_sampled:
            return
        if self._made - self._taken >= SPANS_WAITING_MAX:
            self._found_no_room += 1
            return
        self._made += 1
        self._processor.on_end(self._span(record, trace))

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch. Runs in the SDK's thread."""
        self._taken += len(spans)
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self._sent += len(spans)
            if self.lost > self._lost_reported:
                logger.info("spans are sent to %s again; %d were lost", self._place, self.lost - self._lost_reported)
                self._lost_reported = self.lost
            return result
        if self.lost == self._lost_reported:
            logger.warning(
                "spans cannot be sent to %s, and are lost: %s", self._place, _LAST_MESSAGE.text or "no reason given"
            )
        self._not_sent += len(spans)
        return result

    @property
    def lost(self) -> int:
        """Number of spans that found no room, or that the collector did not take."""
        return self._found_no_room + self._not_sent

    def close(self) -> None:
        """Send the rest within CLOSE_S, and log how many spans are lost."""
        ending = threading.Thread(target=self._processor.shutdown, name="last spans", daemon=True)
        ending.start()
        ending.join(CLOSE_S)
        if ending.is_alive():
            self.shutdown()  # ends its retries
        if lost := self._made - self._sent + self._found_no_room - self._lost_reported:
            logger.warning("%d spans were not sent to %s", lost, self._place)

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for the registry."""
        yield family("fairgate_spans_total", [(["sent"], self._sent), (["lost"], self.lost)])

    def _span(self, record: RequestRecord, trace: TraceContext) -> ReadableSpan:
        epoch_s = time.time() - time.monotonic()
        state = TraceState.from_header([trace.state.decode("ascii", "replace")]) if trace.state else TraceState()
        parent = None
        if trace.parent_id:
            parent = SpanContext(trace.trace_id, trace.parent_id, is_remote=True, trace_flags=_SAMPLED)
        operation = _OPERATIONS.get(record.path, "")
        # Clients may invent models that no pool has, and there should be few names of spans.
        name = f"{operation} {record.model}" if operation and record.pool else operation or "request"
        return ReadableSpan(
            name,
            SpanContext(trace.trace_id, trace.span_id, False, _SAMPLED, state),
            parent,
            self._resource,
            _attributes(record, operation),
            kind=SpanKind.SERVER,
            status=Status(StatusCode.ERROR if record.outcome == Outcome.FAILED else StatusCode.UNSET),
            start_time=int((epoch_s + record.arrived_s) * 1e9),
            end_time=int((epoch_s + record.ended_s) * 1e9),
            instrumentation_scope=self._scope,
        )


def _attributes(record: RequestRecord, operation: str) -> dict[str, AttributeValue]:
    """Return the span's attributes, by the conventions' names or else under `fairgate`, without unknown values."""
    found: dict[str, AttributeValue | None] = {
        "url.path": record.path[:PATH_LENGTH_MAX],
        "client.address": record.client,
        "error.type": record.reason,
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "fairgate" if operation else None,
        "gen_ai.request.model": record.model[:TEXT_MAX],
        "fairgate.request_id": record.id,
        "fairgate.client_request_id": record.client_id,
        "fairgate.tenant": record.tenant,
        "fairgate.outcome": record.outcome,
        "fairgate.policy": record.policy,
        "fairgate.pool": record.pool,
        "fairgate.backend": record.backend,
        "fairgate.tries": record.tries if record.tries > 1 else None,
    }
    request, service = record.request, record.service
    if request is not None:
        interaction = interaction_name(request)
        found |= {
            "gen_ai.request.stream": record.stream,
            "gen_ai.usage.input_tokens": service.prompt or None,
            "gen_ai.usage.output_tokens": service.output if service.prompt else None,
            "gen_ai.usage.cache_read.input_tokens": service.cached,
            "gen_ai.response.time_to_first_chunk": record.first_token_s,
            "fairgate.app": record.app,
            "fairgate.user": hidden(request.flow.user),
            "fairgate.queue_s": record.queue_s,
            "fairgate.interaction": interaction,
            "fairgate.stage": request.progress.stage if interaction else None,
            **{f"fairgate.waited_s.{obstacle}": seconds for obstacle, seconds in record.waited_s.items()},
        }
    return {name: value for name, value in found.items() if value is not None and value != ""}


class _LastMessageHandler(logging.Handler):
    """A handler that keeps the SDK's last message, in place of a log line for every batch: `export` logs it once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        sdk = logging.getLogger("opentelemetry")
        sdk.propagate = False
        sdk.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()[:TEXT_MAX]


_LAST_MESSAGE: Final = _LastMessageHandler()
