"""What does a line of each format say? One class for each format: its columns, and the request that a line describes.

The columns, with their bounds, are as the publishers document them: Mooncake (kvcache-ai/Mooncake, FAST25-release),
BurstGPT (HPMLL/BurstGPT, releases 1.1 and 2.0), Qwen-Bailian (alibaba-edu/qwen-bailian-usagetraces-anon), Azure
(Azure/AzurePublicDataset, LLM inference 2023 and 2024), agent sessions (LMCache/lmcache-agent-trace). Columns that no
publisher has may be added to the lines of any format: tenant, app, user and weight.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Annotated, ClassVar, NamedTuple
from zlib import crc32

from msgspec import Meta, Struct, field

from policies.request import NO_CLAIM, Claim, Flow

Tokens = Annotated[int, Meta(ge=0, le=1 << 24)]
Duration = Annotated[float, Meta(ge=0, le=1e12)]
Count = Annotated[int, Meta(ge=0, le=1_000_000_000)]
Weight = Annotated[float, Meta(gt=0, le=1000)]
Name = Annotated[str, Meta(max_length=1024)]
Id = Name | int | None
"""Of somebody, as people write it down. None: nobody in particular."""

EVERYBODY = "all"
"""The tenant of a trace that names none."""
REQUEST_S_MAX = 900.0
"""The access log has a line when a request ends. One that took longer counts as begun so long before its end."""
LOGGED_BLOCK_TOKENS = 16
TOKEN_BYTES = 4
"""Of text whose tokens nobody has counted."""
TEXT_BLOCK_TOKENS = 64


class EngineStay(NamedTuple):
    """When did which engine have a request, and what had it waited for before?"""

    backend: str
    dispatched_s: float
    ended_s: float
    waited_for: Collection[str]
    """Obstacles."""


class TracedRequest(NamedTuple):
    """One request as a trace has it."""

    time_s: float
    """When it arrived, from wherever the trace begins to count."""
    prompt_tokens: int
    """0: it never asked an engine for anything."""
    output_tokens: int | None
    """None: it had no whole answer, so nobody knows how long that would have been."""
    flow: Flow = Flow(EVERYBODY)
    settled_s: float | None = None
    """No later line has an arrival before this. None: lines are in order of arrival."""
    output_tokens_max: int | None = None
    """The limit that the request set; None: not said."""
    weight: float = 1.0
    """Its tenant's; set by who reads the line."""
    streamed: bool = True
    claim: Claim = NO_CLAIM
    hash_ids: Sequence[int] = ()
    """Equal ids at equal places, and before them: equal text."""
    block_tokens: int = 0
    """Tokens that each of them stands for."""
    model: str = ""
    """Which was asked; empty: not said."""
    output_tokens_min: int = 0
    """Without a whole answer: so many tokens the engine had made when the client left."""
    served: EngineStay | None = None
    """None: the trace does not say it."""


class TraceLine(Struct, kw_only=True):
    """A line of a trace. Fields are its columns; those with a default may be absent."""

    format: ClassVar[str]
    is_csv: ClassVar[bool] = False
    time_column: ClassVar[str] = "timestamp"
    is_log: ClassVar[bool] = False
    """Others may write between its lines, and it may break off amid one."""
    tenant: Id = None
    app: Id = None
    user: Id = None
    weight: Weight = 1.0

    def entry(self) -> TracedRequest:
        """Raises ValueError if the time cannot be read."""
        raise NotImplementedError

    def flow(self, tenant: str = EVERYBODY, app: str = "", user: str = "") -> Flow:
        """Who asked, as the line says; and if it does not, as these do."""
        return Flow(_named(self.tenant, tenant), _named(self.app, app), _named(self.user, user))


def _named(name: Id, otherwise: str) -> str:
    return otherwise if name is None or name == "" else str(name)


class Plain(TraceLine):
    """A table of one's own."""

    format = "csv"
    is_csv = True
    time_column = "t_s"
    t_s: float
    input_tokens: Tokens
    output_tokens: Tokens
    client: Name = ""
    """Another word for tenant."""

    def entry(self) -> TracedRequest:
        flow = self.flow(self.client or EVERYBODY)
        return TracedRequest(self.t_s, self.input_tokens, self.output_tokens, flow)


class Azure(TraceLine):
    """Azure LLM inference, 2023 (local times, 7 decimals) and 2024 (with an offset)."""

    format = "azure"
    is_csv = True
    time_column = "TIMESTAMP"
    timestamp: str = field(name="TIMESTAMP")
    context_tokens: Tokens = field(name="ContextTokens")
    generated_tokens: Tokens = field(name="GeneratedTokens")

    def entry(self) -> TracedRequest:
        time = datetime.fromisoformat(self.timestamp)
        time_s = (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()
        return TracedRequest(time_s, self.context_tokens, self.generated_tokens, self.flow())


class BurstGpt(TraceLine):
    """BurstGPT; a response of 0 tokens is one that failed. Sessions are known since release 2.0."""

    format = "burstgpt"
    is_csv = True
    time_column = "Timestamp"
    timestamp: float = field(name="Timestamp")
    request_tokens: Tokens = field(name="Request tokens")
    response_tokens: Tokens = field(name="Response tokens")
    session: Name = field(name="Session ID", default="")
    log_type: Name = field(name="Log Type", default="")

    def entry(self) -> TracedRequest:
        flow = self.flow(app=self.log_type, user=self.session)
        return TracedRequest(self.timestamp, self.request_tokens, self.response_tokens or None, flow)


class Mooncake(TraceLine):
    """Mooncake: milliseconds, and the chained hashes of blocks of 512 tokens."""

    format = "mooncake"
    timestamp: float
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[int]

    def entry(self) -> TracedRequest:
        return TracedRequest(
            self.timestamp / 1000, self.input_length, self.output_length, self.flow(),
            hash_ids=self.hash_ids, block_tokens=512,
        )  # fmt: skip


class Qwen(Mooncake):
    """Qwen-Bailian: the same columns and more, in seconds, and the hashes of blocks of 16 tokens."""

    format = "qwen"
    chat_id: int
    parent_chat_id: int
    type: Name = ""

    def entry(self) -> TracedRequest:
        return TracedRequest(
            self.timestamp, self.input_length, self.output_length, self.flow(app=self.type),
            hash_ids=self.hash_ids, block_tokens=16,
        )  # fmt: skip


class LmCache(TraceLine):
    """LMCache's agent sessions as they are published: microseconds, and the text itself, in no order.

    An answer without text asked for a tool, and the trace does not say how long that answer was.
    """

    format = "lmcache"
    timestamp: float
    input: str
    output: str
    session_id: Name

    def entry(self) -> TracedRequest:
        text, answer = self.input.encode("utf-8", "replace"), self.output.encode("utf-8", "replace")
        block_bytes = TEXT_BLOCK_TOKENS * TOKEN_BYTES
        blocks = (text[end - block_bytes : end] for end in range(block_bytes, len(text) + 1, block_bytes))
        return TracedRequest(
            self.timestamp / 1e6, -(-len(text) // TOKEN_BYTES), -(-len(answer) // TOKEN_BYTES) or None,
            self.flow(user=self.session_id), settled_s=float("-inf"),
            claim=Claim(self.session_id, explicit=True), hash_ids=[_hash(block) for block in blocks],
            block_tokens=TEXT_BLOCK_TOKENS,
        )  # fmt: skip


def _hash(text: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")


class AgentCall(TraceLine):
    """The same with lengths in the place of text. Each session counts its time from its own first call, so all of them
    begin at once here."""

    format = "agents"
    time_column = "t_s"
    app: Name
    session: Name
    call: Count
    t_s: float
    est_input_tokens: Tokens
    est_output_tokens: Tokens
    hash_ids: list[int]

    def entry(self) -> TracedRequest:
        return TracedRequest(
            self.t_s, self.est_input_tokens, self.est_output_tokens, self.flow(self.app, user=self.session),
            settled_s=float("-inf"),
            claim=Claim(self.session, self.call + 1, begins=self.call == 0),
            hash_ids=self.hash_ids, block_tokens=64,
        )  # fmt: skip


class AccessLogLine(TraceLine):
    """fairgate's own access log. A line is written when a request ends, so it says when that began, too."""

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
        # What the engine found in its cache is taken to be the beginning that requests of this kind have in common.
        shared = range(self.tokens_cached // LOGGED_BLOCK_TOKENS)
        base = crc32(group.encode()) << 32
        # Who leaves a stream may have read enough of it; who leaves before an answer in one piece has read nothing.
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


ROWS: tuple[type[TraceLine], ...] = (AccessLogLine, LmCache, AgentCall, Qwen, Mooncake, Azure, BurstGpt, Plain)
