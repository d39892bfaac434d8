"""Lines of a trace: one class for each format, with its columns and the request that a line describes.

The columns tenant, app, user and weight may be added to the lines of any format. Formats of public traces are in
`lab.public_traces`, which a clone of the repository has.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, ClassVar, NamedTuple
from zlib import crc32

from msgspec import Meta, Struct

from policies.request import NO_CLAIM, Claim, Flow

Tokens = Annotated[int, Meta(ge=0, le=1 << 24)]
Duration = Annotated[float, Meta(ge=0, le=1e12)]
Count = Annotated[int, Meta(ge=0, le=1_000_000_000)]
Weight = Annotated[float, Meta(gt=0, le=1000)]
Name = Annotated[str, Meta(max_length=1024)]
Id = Name | int | None
"""A person's name or number; None for nobody in particular."""

EVERYBODY = "all"
"""Tenant of a trace without tenants."""
REQUEST_S_MAX = 900.0
"""Longest request assumed in the access log, which has a line at each end. A longer one counts as begun this late."""
LOGGED_BLOCK_TOKENS = 16


class EngineStay(NamedTuple):
    """The stay of a request at an engine, and the obstacles that it waited for before."""

    backend: str
    dispatched_s: float
    ended_s: float
    waited_for: Collection[str]
    """Obstacles."""


class TracedRequest(NamedTuple):
    """A request read from a trace: arrival, lengths, flow and, if recorded, its stay at an engine."""

    time_s: float
    """Arrival by the trace's clock."""
    prompt_tokens: int
    """Tokens of the prompt; 0 for a request that never asked an engine for anything."""
    output_tokens: int | None
    """Tokens of the complete answer, or None without one."""
    flow: Flow = Flow(EVERYBODY)
    settled_s: float | None = None
    """Bound on the arrivals of later lines; None if lines are in order of arrival."""
    output_tokens_max: int | None = None
    """Limit set by the request, or None."""
    weight: float = 1.0
    """Weight of its tenant, set by the reader of the line."""
    streamed: bool = True
    claim: Claim = NO_CLAIM
    hash_ids: Sequence[int] = ()
    """Ids of blocks: equal ids at equal places, and before them, mean equal text."""
    block_tokens: int = 0
    """Tokens of each block."""
    model: str = ""
    """Requested model, or ""."""
    output_tokens_min: int = 0
    """Tokens of an incomplete answer when the client left."""
    served: EngineStay | None = None
    """Stay at an engine; None where the trace does not have it."""


class TraceLine(Struct, kw_only=True):
    """A line of a trace. Fields are its columns; fields with a default may be absent."""

    format: ClassVar[str]
    is_csv: ClassVar[bool] = False
    time_column: ClassVar[str] = "timestamp"
    is_log: ClassVar[bool] = False
    """True if lines of other writers may be among the lines, and the last line may be incomplete."""
    tenant: Id = None
    app: Id = None
    user: Id = None
    weight: Weight = 1.0

    def entry(self) -> TracedRequest:
        """Return the request of the line. Raise ValueError for an unreadable time."""
        raise NotImplementedError

    def flow(self, tenant: str = EVERYBODY, app: str = "", user: str = "") -> Flow:
        """Return the flow of the line; the arguments replace missing columns."""
        return Flow(_name_or(self.tenant, tenant), _name_or(self.app, app), _name_or(self.user, user))


def _name_or(name: Id, otherwise: str) -> str:
    """Return the name as text, or `otherwise` for an absent or empty name."""
    return otherwise if name is None or name == "" else str(name)


class PlainCsvLine(TraceLine):
    """A row of a plain CSV table of requests: time and token counts, and optionally the names of the flow."""

    format = "csv"
    is_csv = True
    time_column = "t_s"
    t_s: float
    input_tokens: Tokens
    output_tokens: Tokens
    client: Name = ""
    """Synonym of tenant."""

    def entry(self) -> TracedRequest:
        flow = self.flow(self.client or EVERYBODY)
        return TracedRequest(self.t_s, self.input_tokens, self.output_tokens, flow)


class AccessLogLine(TraceLine):
    """fairgate's own access log. Lines are written when requests end, and contain their durations."""

    format = "fairgate"
    is_log = True
    time_column = "ts"
    ts: float
    tenant: Name
    app: Name
    outcome: Name
    stream: bool
    total_ms: Duration
    tokens_in: Tokens
    tokens_out: Tokens
    tokens_cached: Tokens
    tokens_in_estimated: Tokens
    tokens_out_max: Tokens | None = None
    interaction: Name = ""
    stage: Count = 0
    model: Name = ""
    queue_ms: Duration = 0.0
    waited_ms: dict[Name, Duration] = {}
    backend: Name = ""

    def entry(self) -> TracedRequest:
        group = f"{self.tenant}\n{self.app}\n{self.interaction}"
        # The cached part of a prompt is taken as the common beginning of requests of this kind.
        shared = range(self.tokens_cached // LOGGED_BLOCK_TOKENS)
        base = crc32(group.encode()) << 32
        # A client that leaves a stream may have read enough; a client that leaves before an unstreamed answer has read
        # nothing.
        is_whole = self.outcome == "completed" or (self.tokens_out > 0 and self.stream)
        arrived_s = self.ts - min(self.total_ms / 1000, REQUEST_S_MAX)
        return TracedRequest(
            arrived_s,
            self.tokens_in or self.tokens_in_estimated,
            self.tokens_out if is_whole else None,
            self.flow(),
            settled_s=self.ts - REQUEST_S_MAX,
            output_tokens_max=self.tokens_out_max,
            streamed=self.stream,
            claim=Claim(self.interaction, self.stage, begins=self.stage == 1) if self.interaction else NO_CLAIM,
            hash_ids=range(base + shared.start, base + shared.stop),
            block_tokens=LOGGED_BLOCK_TOKENS,
            model=self.model,
            output_tokens_min=0 if is_whole else self.tokens_out,
            served=EngineStay(
                self.backend, min(arrived_s + self.queue_ms / 1000, self.ts), self.ts, self.waited_ms.keys()
            )
            if self.backend
            else None,
        )
