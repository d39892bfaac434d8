"""Bounds on queues and waits; overload and refusals during overload; limits that always hold."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gateway.config.checks import Name
from gateway.config.section import Section, settings_from
from policies.capacity.overload import OverloadSettings
from policies.limits.quotas import Quota
from policies.limits.throttle import Ceilings, ThrottleSettings
from policies.queue.bounds import QueueLimits

Seconds = Annotated[float, Field(gt=0, le=86_400)]


@settings_from(QueueLimits)
class Limits(Section):
    """Bounds on bodies, connections, time-outs and buffers. Quotas of tenants are `quota`."""

    waiting_comment_s: Seconds | None = 15
    """Interval of `: waiting` comments in a stream whose answer has not begun. A later refusal is an error event in a
    200. null: never."""
    body_bytes_max: int | None = Field(default=None, ge=1024)
    """Largest request body. Default: 32 MiB, or what memory_max allows."""
    json_bytes_max: int | None = Field(default=None, ge=1024)
    """Largest JSON body; files (batches, audio) are not JSON. Reading 8 MiB blocks all else for 30 ms, 70 ms at worst.
    Default: 8 MiB, or what memory_max allows."""
    header_bytes_max: int = Field(default=65_536, ge=1024, le=16_777_216)
    """Largest head of a request, and of all unfinished heads without a key from one address."""
    connections_max: int | None = Field(default=None, ge=1, le=1_000_000)
    """Open client connections; beyond this the longest idle are closed. Bounded by the limit of open files. Default:
    what memory_max allows."""
    client_connections_max: int | None = Field(default=None, ge=1, le=1_000_000)
    """Connections of one tenant, and of one address (IPv6: one /64) that is no trusted proxy. Default: half of
    connections_max."""
    client_head_s: Seconds = 10
    """Time for a client to send a request's head."""
    client_body_s: Seconds = 300
    """Time for a client to send a request's body."""
    client_body_bytes_per_s: float = Field(default=1000, gt=0, le=1e9)
    """Lowest average rate of a body that takes more than 20 s."""
    unqueued_max: int = Field(default=16, ge=1, le=1_000_000)
    """Concurrent requests of one tenant that bypass the queue, such as /tokenize."""
    unqueued_per_s: float = Field(default=50, gt=0, le=1e6)
    """Rate and largest burst of a tenant's requests that bypass the queue, /v1/models included."""
    background: bool = False
    """Accept `background: true` of the Responses API (docs/apis.md). The engine works on after the answer, outside the
    queue and `concurrent`, so a request is charged its maximum."""
    client_idle_s: Seconds = 75
    """Time until an idle client connection is closed."""
    client_stall_s: Seconds = 60
    """Time until a client that does not read its answer is aborted, and charged for what the engine has sent."""
    upstream_connect_s: Seconds = 5
    """Longest time to connect to a backend."""
    upstream_silence_s: Seconds = 600
    """Longest silence of a backend that owes an answer. A backend with requests that makes no step for a fifth of this
    time is out of service."""
    upstream_addresses_s: float = Field(default=10, ge=0.1, le=3600)
    """Time until an address that has left DNS is no engine, for backends with each_address."""
    upstream_addresses_max: int = Field(default=64, ge=1, le=1000)
    """Engines behind one name."""
    response_buffer_bytes_max: int = Field(default=8_388_608, ge=1024)
    """Bytes of an answer in one piece that are held until the answer is seen to be whole; a longer one is passed on."""


@settings_from(OverloadSettings)
class OverloadConfig(Section):
    """When a pool counts as overloaded: a state of its KV caches, never a rate of requests. fairserve only."""


@settings_from(Ceilings)
class CeilingsConfig(Section):
    """Allowance of each user or app within the window while a pool is overloaded: numbers, or auto."""


@settings_from(ThrottleSettings)
class ThrottleConfig(Section):
    """Refusals while a pool is overloaded: new interactions of a user or app beyond a limit. fairserve only."""

    user: CeilingsConfig = CeilingsConfig()
    """Each user of a tenant, over all apps."""
    app_user: CeilingsConfig = CeilingsConfig()
    """Each user of a tenant in one app. At most the user's total."""
    app: CeilingsConfig = CeilingsConfig()
    """Each app of a tenant, over all users. At least the limit of one user in it."""


@settings_from(Quota)
class QuotaConfig(Section):
    """Limits of one tenant, group, key, user or model that hold at any time, under any policy. None by default."""


class UserConfig(Section):
    """A user of a tenant, by the name that its requests give (`user`, `x-fairgate-user`) or its token."""

    name: Name
    """Name of the user; * for each user without an entry."""
    blocked: bool = False
    """Refuse the user's requests for generation."""
    quota: QuotaConfig | None = None
    """Limits of the user, beside the limits of the tenant."""


class ModelQuotasConfig(QuotaConfig):
    """Limits of a tenant, and its limits on single models."""

    per_model: dict[Name, QuotaConfig] = Field(default_factory=dict)
    """Limits on one model, by the engines' name of the model."""
