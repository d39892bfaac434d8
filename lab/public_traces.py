"""Formats of public traces for `fairgate replay`, in a clone of the repository.

The columns, with their bounds, are as the publishers document them: Mooncake (kvcache-ai/Mooncake, FAST25-release),
BurstGPT (HPMLL/BurstGPT, releases 1.1 and 2.0), Qwen-Bailian (alibaba-edu/qwen-bailian-usagetraces-anon), Azure
(Azure/AzurePublicDataset, LLM inference 2023 and 2024), agent sessions (LMCache/lmcache-agent-trace).
"""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
from msgspec import field

from policies.request import Claim
from simulation.traces.lines import TraceError, csv_cells, read_lines, required_columns
from simulation.traces.rows import Count, Name, Tokens, TracedRequest, TraceLine

TOKEN_BYTES = 4
"""Bytes per token of text that no tokenizer has counted."""
TEXT_BLOCK_TOKENS = 64


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
    """BurstGPT. A response of 0 tokens failed. Sessions are known since release 2.0."""

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
    """Qwen-Bailian: Mooncake's columns and more, in seconds, with the hashes of blocks of 16 tokens."""

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
    """LMCache's agent sessions as published: microseconds and full text, in no order.

    An answer without text asked for a tool; its length is unknown.
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
    """LMCache's agent sessions with lengths in place of text. Each session counts its time from its first call, so all
    sessions begin at once."""

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


PUBLIC_ROWS: tuple[type[TraceLine], ...] = (LmCache, AgentCall, Qwen, Mooncake, Azure, BurstGpt)


def row_of(*paths: Path) -> type[TraceLine] | None:
    """Return the format whose columns the first line has, the one with most columns. None for no public trace."""
    first = next(((path, number, line) for path in paths for number, line in read_lines(path)), None)
    if first is None:
        return None
    is_csv = not first[2].startswith("{")
    try:
        columns = set(csv_cells(*first) if is_csv else msgspec.json.decode(first[2], type=dict[str, Any]))
    except (TraceError, ValueError, RecursionError):
        return None
    fitting = [row for row in PUBLIC_ROWS if row.is_csv == is_csv and columns.issuperset(required_columns(row))]
    return max(fitting, key=lambda row: len(required_columns(row)), default=None)
