"""Frozen models of a gateway's configuration, each field with its unit, bounds and default.

Values are strict: text is never read as a number, nor a number as text. Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator

from gateway.config.checks import (
    Name,
    NotEmpty,
    accept_bare_text,
    checked_address,
    checked_addresses,
    checked_api_key,
    checked_tokenizer,
    checked_zone,
    is_loopback,
    split_address,
    unique,
)
from gateway.config.machine import WORKERS_MAX, NumberOrAuto, auto_by_default, or_auto, with_auto
from gateway.config.memory_bounds import MEMORY_MAX, MEMORY_MAX_LEAST, MemoryBounds
from gateway.config.section import Section, settings_from
from gateway.config.sections.apps import AppConfig, InteractionsConfig
from gateway.config.sections.backends import BackendConfig, Isolation
from gateway.config.sections.groups import GroupConfig, TreeNodeConfig, groups_around, tree_of
from gateway.config.sections.keys import IssuerConfig, KeyConfig
from gateway.config.sections.limits import Limits, ModelQuotasConfig, OverloadConfig, ThrottleConfig, UserConfig
from gateway.config.sections.listener import NetworkName, Origin, RouteConfig
from gateway.config.sections.policy_choice import PolicyConfig, PolicyName
from gateway.config.sections.services import BatchesConfig, StateConfig, TracingConfig, UsageConfig
from gateway.config.sections.tls import ListenerTlsConfig
from policies.capacity.gauges import CapacitySettings
from policies.tree.terms import GroupSettings, Tree

LISTEN: Final = "127.0.0.1:8080"
ADMIN: Final = "127.0.0.1:8190"
Address = Annotated[str, AfterValidator(checked_address)]


@settings_from(CapacitySettings)
class CapacityConfig(Section):
    """How full a pool's engines are kept, and how often their metrics are read."""

    scrape_interval_s: float = Field(default=0.1, ge=0.01, le=60)
    """Interval of reads of an engine's metrics."""


class PoolConfig(Section):
    """Engines that serve the same models."""

    name: Name
    """Name in metrics and logs; unique."""
    models: tuple[Name, ...] = Field(default=(), strict=False)
    """Models that clients may ask for. Empty: those of the backends' /v1/models."""
    backends: Annotated[tuple[BackendConfig, ...], NotEmpty] = Field(strict=False, json_schema_extra={"minItems": 1})
    """The engines, at least one; no url twice."""
    fallback: Name | None = None
    """A model of another pool that answers while no backend here is in service. Default: requests are refused."""
    start_s_max: float = Field(default=0, ge=0, le=86_400)
    """Longest start of an engine. While no engine is in service, requests wait longer by this time. 0: requests are
    refused at once."""
    bytes_per_token: float | None = Field(default=None, gt=0, le=64)
    """Initial prompt bytes per token; the true ratio is learned from usage reports."""
    tokenizer: Annotated[str, AfterValidator(checked_tokenizer)] | None = None
    """Exact prompt counts by a tokenizer.json, or tiktoken:ENCODING. Default: the learned ratio."""
    isolate_caches: Isolation = "where_possible"
    """Separate tenants in prefix caches by a cache_salt, so that times to first tokens tell nobody what others have
    asked. where_possible: engines that ignore salts serve, with shared caches; require: such engines get no requests;
    never: tenants share all caches."""
    capacity: CapacityConfig = CapacityConfig()
    """How full the engines are kept."""

    def engines_max(self, limits: Limits) -> int:
        """Return the most engines that the pool may have at once."""
        return sum([limits.upstream_addresses_max if backend.each_address else 1 for backend in self.backends])


@settings_from(GroupSettings)
class TenantConfig(TreeNodeConfig):
    """A party that shares the engines with others."""

    name: Name
    """Name in metrics and logs; unique."""
    keys: tuple[Annotated[KeyConfig, accept_bare_text("hash", str | KeyConfig)], ...] = Field(default=(), strict=False)
    """Hashes of the tenant's keys. Empty: a key is created and printed at every start, unless keys can be created at
    run time (`usage`, or `state` in Redis)."""
    quota: ModelQuotasConfig | None = None
    """The tenant's limits at any time, in place of the common ones."""
    users: tuple[UserConfig, ...] = Field(default=(), strict=False, max_length=1000)
    """Users of the tenant that are blocked or limited."""


class Config(Section):
    """The configuration of one fairgate gateway."""

    listen: Annotated[str | tuple[str, ...], BeforeValidator(checked_addresses)] = LISTEN
    """host:port for clients, or a list of them; port 0: a free one. [::]:8080 listens to IPv6 and IPv4."""
    tls: ListenerTlsConfig | None = None
    """TLS for clients, in place of plain HTTP. Default: none, for loopback or behind a proxy that speaks TLS."""
    trusted_proxies: tuple[NetworkName, ...] = Field(default=(), strict=False)
    """Load balancers, such as 10.0.0.0/8, whose `forwarded`, else `x-forwarded-for`, names the client's address."""
    cors_origins: Annotated[tuple[Origin, ...], AfterValidator(unique)] = Field(default=(), strict=False)
    """Origins of web pages that may call, such as https://chat.example.com; * for any."""
    routes: tuple[RouteConfig, ...] = Field(default=(), strict=False)
    """Paths for clients beyond the known inference routes."""
    admin: Address = ADMIN
    """host:port for /health, /ready, /metrics, /explain, /state and /usage. Not for clients."""
    admin_token: Annotated[SecretStr, AfterValidator(checked_api_key)] | None = None
    """Bearer token for `admin`, except for /health and /ready; ${NAME}: from the environment. Default: none, for
    loopback only."""
    open_access: bool = False
    """Accept any key: each distinct key is its own tenant of weight 1."""
    policy: Annotated[PolicyConfig, accept_bare_text("name", PolicyName | PolicyConfig)] = Field(
        default=PolicyConfig(), json_schema_extra={"default": {"name": "fairserve"}}
    )
    """The order of requests: a policy's name, or a name with parameters."""
    pools: Annotated[tuple[PoolConfig, ...], NotEmpty] = Field(strict=False, json_schema_extra={"minItems": 1})
    """Engines by the models they serve. A model belongs to one pool."""
    aliases: dict[Name, Name] = Field(default={})
    """Names for clients, each with the engines' name of the model. Answers carry the client's name."""
    groups: tuple[GroupConfig, ...] = Field(default=(), strict=False)
    """Groups of tenants, or of groups, that share a part of each pool."""
    tenants: tuple[TenantConfig, ...] = Field(default=(), strict=False)
    """Parties that share the engines; needed unless open_access is set."""
    jwt: tuple[IssuerConfig, ...] = Field(default=(), strict=False, max_length=100)
    """Issuers whose signed tokens are accepted beside keys."""
    interactions: InteractionsConfig = InteractionsConfig()
    """How the calls of one answer are recognised, and how long they are exempt from refusal."""
    apps: tuple[AppConfig, ...] = Field(default=(), strict=False)
    """Exceptions for some apps."""
    overload: OverloadConfig = OverloadConfig()
    """When throttling begins and ends."""
    throttle: ThrottleConfig = ThrottleConfig()
    """Limits while throttling is on."""
    quota: ModelQuotasConfig = ModelQuotasConfig()
    """Limits of every tenant at any time; none by default."""
    calendar: Annotated[str, AfterValidator(checked_zone)] | None = None
    """Time zone, such as Europe/Berlin, whose calendar days and months limits follow. Default: any 24 hours, any 30
    days."""
    workers: NumberOrAuto = Field(default=1, ge=1, le=WORKERS_MAX, json_schema_extra=or_auto)
    """Processes that serve as one gateway, with shared engines and limits. auto: one for each usable core."""
    state: Annotated[StateConfig, accept_bare_text("url", str | StateConfig)] = Field(
        default=StateConfig(), json_schema_extra={"default": "memory"}
    )
    """Store that replicas share: memory (none), or the url of a Redis."""
    state_file: str | None = Field(default=None, min_length=1)
    """File that keeps what is learned of apps and starts over restarts."""
    usage: Annotated[UsageConfig, accept_bare_text("url", str | UsageConfig)] | None = None
    """Database of usage and keys: the path of a SQLite file, or postgresql://..."""
    batches: BatchesConfig = BatchesConfig()
    """Bounds on a tenant's files and batches. Batches need `usage`."""
    memory_max: NumberOrAuto = Field(
        default=MEMORY_MAX, ge=MEMORY_MAX_LEAST, le=1 << 50, json_schema_extra=auto_by_default
    )
    """Memory of each worker, whatever clients send (docs/reference/memory.md). auto: the container's limit less an
    eighth for the kernel, divided among the workers; without a container 2 GiB each, at most half of the machine."""
    limits: Limits = Limits()
    """Bounds on queues, buffers and waits."""
    drain_s: float = Field(default=30, ge=0, le=86_400)
    """Time after SIGTERM in which running and waiting requests are served to their end."""
    access_log: str = Field(default="stdout", min_length=1)
    """Destination of the access log: stdout, off, or the path of a file."""
    tracing: Annotated[TracingConfig, accept_bare_text("endpoint", str | TracingConfig)] | None = None
    """Destination of OpenTelemetry spans. Default: none; `traceparent` passes unchanged."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of messages on standard error."""

    @property
    def tree(self) -> Tree:
        """Entitlements of groups and tenants."""
        return tree_of(self.groups, self.tenants)

    @property
    def around(self) -> dict[str, tuple[str, ...]]:
        """Groups around each tenant, innermost first."""
        return groups_around(self.groups, self.tenants)

    @property
    def bounds(self) -> MemoryBounds:
        """Bounds on memory of each part of a process."""
        return MemoryBounds(self.memory_max, len(self.pools))

    @property
    def json_bytes_max(self) -> int:
        """Largest body of JSON."""
        return self.limits.json_bytes_max or self.bounds.json_bytes

    @property
    def listen_addresses(self) -> list[tuple[str, int]]:
        """Host, without brackets, and port of each listener."""
        return [split_address(each) for each in ([self.listen] if isinstance(self.listen, str) else self.listen)]

    @property
    def admin_address(self) -> tuple[str, int]:
        """Host, without brackets, and port of the admin listener."""
        return split_address(self.admin)

    @property
    def issues_keys(self) -> bool:
        """Return whether there is a store for keys created at run time."""
        return self.state.redis_url is not None or self.usage is not None

    @property
    def has_replicas(self) -> bool:
        """Return whether several gateways share engines and limits, as workers or through Redis."""
        return self.state.redis_url is not None or self.workers > 1

    @property
    def admin_warning(self) -> str:
        """Warning of an `admin` that is probably a mistake; "" for none."""
        if self.admin_token is not None or is_loopback(self.admin_address[0]):
            return ""
        return (
            f"is open to other machines: each client that reaches {self.admin} reads /metrics and /explain. "
            "Set admin_token, or listen on loopback (127.0.0.1:8190)"
        )

    @model_validator(mode="before")
    @classmethod
    def _expand_auto(cls, data: Any) -> Any:
        return with_auto(data)


def json_schema() -> str:
    """Return the JSON schema of the file, for editors that complete and check YAML."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}
    return json.dumps(schema, indent=2) + "\n"
