"""Bounds on queues, buffers and waits."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gateway.config.section import Section, settings_from
from policies.queue.bounds import QueueLimits

Seconds = Annotated[float, Field(gt=0, le=86_400)]


@settings_from(QueueLimits)
class Limits(Section):
    """Bounds of the whole gateway."""

    waiting_comment_s: Seconds | None = 15
    """Interval of `: waiting` comments to a stream without an answer yet, since load balancers close silent
    connections. A refusal is then an error event in a 200. null: never."""
    body_bytes_max: int | None = Field(default=None, ge=1024)
    """Largest request body; larger ones get 413. Default: 32 MiB, or as much as memory_max has room for."""
    json_bytes_max: int | None = Field(default=None, ge=1024)
    """Largest body of JSON; larger ones get 413. Reading one blocks all else: 30 ms for 8 MiB of text, 70 ms for the
    worst. Default: 8 MiB, or as much as memory_max has room for. Files (batches, audio) are no JSON."""
    header_bytes_max: int = Field(default=65_536, ge=1024, le=16_777_216)
    """Largest head of a request or a response, and the most of unfinished heads without a key from one address."""
    connections_max: int | None = Field(default=None, ge=1, le=1_000_000)
    """Client connections open at once. Beyond it, the longest idle ones are closed. Never more than the limit of open
    files has room for. Default: as many as memory_max has room for."""
    client_connections_max: int | None = Field(default=None, ge=1, le=1_000_000)
    """Connections of one tenant, and from one address (of IPv6: one /64), unless that is a trusted proxy. Default: half
    of connections_max."""
    client_head_s: Seconds = 10
    """Time for a client to send the whole head of a request."""
    client_body_s: Seconds = 300
    """Time for a client to send the whole body of a request."""
    client_body_bytes_per_s: float = Field(default=1000, gt=0, le=1e9)
    """Least average rate of a body that takes longer than 20 s."""
    unqueued_max: int = Field(default=16, ge=1, le=1_000_000)
    """Requests of one tenant at once that bypass the queue, such as /tokenize."""
    unqueued_per_s: float = Field(default=50, gt=0, le=1e6)
    """Requests of one tenant per second that bypass the queue, the list of models included; also the largest burst."""
    background: bool = False
    """Accept `background: true` of the Responses API. The engine works on after the answer, outside of the queue and of
    `concurrent`, so each is charged its maximum: max_output_tokens, or what the context has room for."""
    client_idle_s: Seconds = 75
    """Time after which an idle client connection is closed."""
    client_stall_s: Seconds = 60
    """Time after which a client that does not read its answer is aborted; it pays for what the engine has sent."""
    upstream_connect_s: Seconds = 5
    """Longest time to connect to a backend."""
    upstream_silence_s: Seconds = 600
    """Longest silence of a backend that owes an answer. A backend whose metrics show no step for a fifth of it, though
    it has requests, is out of service."""
    upstream_addresses_s: float = Field(default=10, ge=0.1, le=3600)
    """Time after which an address that its name no longer has is no engine; names are looked up twice within it. For
    backends with each_address."""
    upstream_addresses_max: int = Field(default=64, ge=1, le=1000)
    """Engines behind one name; more addresses are left out."""
    response_buffer_bytes_max: int = Field(default=8_388_608, ge=1024)
    """Bytes of an answer held for a slow client before the backend is no longer read."""
