"""What can be configured? Frozen models of one gateway's configuration, each field with its unit, bounds and default.

Values are strict: text is never read as a number, nor a number as text. Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

import json
from itertools import islice
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from gateway.config.checks import (
    Name,
    bare_text_is,
    checked_address,
    checked_addresses,
    checked_api_key,
    checked_tokenizer,
    checked_zone,
    fault,
    is_loopback,
    not_empty,
    split_address,
    unique,
)
from gateway.config.contradictions import ADMIN, LISTEN, contradictions
from gateway.config.machine import WORKERS_MAX, auto_by_default, no_text, or_auto, with_auto
from gateway.config.memory_bounds import MEMORY_MAX, MEMORY_MAX_LEAST, Bounds, bounds_of
from gateway.config.provenance import UNKNOWN, Provenances
from gateway.config.section import Section, settings_from
from gateway.config.sections.apps import AppConfig, InteractionsConfig
from gateway.config.sections.backends import BackendConfig, Isolation
from gateway.config.sections.groups import GroupConfig, Grouped, groups_around, tree_of
from gateway.config.sections.keys import IssuerConfig, KeyConfig
from gateway.config.sections.limits import Limits
from gateway.config.sections.listener import NetworkName, Origin, RouteConfig
from gateway.config.sections.policy_choice import PolicyConfig, PolicyName
from gateway.config.sections.state import StateConfig
from gateway.config.sections.throttling import ModelQuotasConfig, OverloadConfig, ThrottleConfig, UserConfig
from gateway.config.sections.tls import ListenerTlsConfig
from gateway.config.sections.tracing import TracingConfig
from gateway.config.sections.usage import BatchesConfig, UsageConfig
from policies.capacity.gauges import CapacitySettings
from policies.tree.terms import GroupSettings, Tree

FAULTS_FOUND_MAX: Final = 1000
"""Faults that are looked for in one config: an operator with that many faults mends some of them first."""
Address = Annotated[str, AfterValidator(checked_address)]


@settings_from(CapacitySettings)
class CapacityConfig(Section):
    """How full the engines of a pool are kept."""

    scrape_interval_s: float = Field(default=0.1, ge=0.01, le=60)
    """Time between two reads of an engine's metrics."""


class PoolConfig(Section):
    """Engines that serve the same models."""

    name: Name
    """What metrics and logs call the pool; unique."""
    models: tuple[Name, ...] = Field(default=(), strict=False)
    """Model names and aliases that clients may ask for. Empty: learned from the backends' /v1/models."""
    backends: Annotated[tuple[BackendConfig, ...], AfterValidator(not_empty)] = Field(
        strict=False, json_schema_extra={"minItems": 1}
    )
    """The engines, at least one; no url twice."""
    fallback: Name | None = None
    """A model of another pool that answers in the place of any of these while no backend here is in service, also what
    waits already. Clients go on to read the name that they asked for. Default: they are refused."""
    start_s_max: float = Field(default=0, ge=0, le=86_400)
    """The longest time in which an engine starts. While no engine is in service, requests wait for so much longer, and
    are told how long starts usually take. 0: they are refused at once."""
    bytes_per_token: float | None = Field(default=None, gt=0, le=64)
    """Bytes of a prompt per token to begin with; the true ratio is learned from the engines' usage reports."""
    tokenizer: Annotated[str, AfterValidator(checked_tokenizer)] | None = None
    """Exact prompt counts: the path of a tokenizer.json, or tiktoken:ENCODING. Default: the learned ratio."""
    isolate_caches: Isolation = "where_possible"
    """Keep tenants apart in the prefix caches of engines, by a cache_salt, so that no tenant can see by the time to a
    first token what others have asked. where_possible: engines that ignore salts serve, and tenants share their caches;
    require: nothing is sent to such engines; never: tenants find each other's prompts."""
    capacity: CapacityConfig = CapacityConfig()
    """How full the engines are kept."""

    def engines_max(self, limits: Limits) -> int:
        """How many may there be at once?"""
        return sum([limits.upstream_addresses_max if backend.each_address else 1 for backend in self.backends])


@settings_from(GroupSettings)
class TenantConfig(Grouped):
    """Who shares the engines."""

    name: Name
    """What metrics and logs call the tenant; unique."""
    keys: tuple[Annotated[KeyConfig, bare_text_is("hash", str | KeyConfig)], ...] = Field(default=(), strict=False)
    """Hashes of its keys. Empty: a key is minted and printed at every start, unless keys can be made while the gateway
    runs (`usage`, or `state` in Redis)."""
    quota: ModelQuotasConfig | None = None
    """Its limits at any time, instead of the common ones."""
    users: tuple[UserConfig, ...] = Field(default=(), strict=False, max_length=1000)
    """Users of it that are blocked or limited."""


class Config(Section):
    """The configuration of one fairgate gateway."""

    listen: Annotated[str | tuple[str, ...], BeforeValidator(checked_addresses)] = LISTEN
    """host:port for clients, or a list of them; port 0 takes a free one. [::]:8080 listens to IPv6 and IPv4."""
    tls: ListenerTlsConfig | None = None
    """TLS for clients, in the place of plain HTTP. Default: none, for loopback or behind a proxy that speaks TLS."""
    trusted_proxies: tuple[NetworkName, ...] = Field(default=(), strict=False)
    """Addresses or networks of load balancers whose word on their clients' addresses is taken (`forwarded`, or else
    `x-forwarded-for`), such as 10.0.0.0/8."""
    cors_origins: Annotated[tuple[Origin, ...], AfterValidator(unique)] = Field(default=(), strict=False)
    """Pages in browsers that may call, such as https://chat.example.com; * for any. None by default."""
    routes: tuple[RouteConfig, ...] = Field(default=(), strict=False)
    """What else clients may ask, beyond the inference routes that are known."""
    admin: Address = ADMIN
    """host:port for /health, /ready, /metrics, /explain, /state, /config, /usage and /keys. Not for clients."""
    admin_token: Annotated[SecretStr, AfterValidator(checked_api_key)] | None = None
    """What `admin` asks for as a bearer token, except for /health and /ready. Write ${NAME} to take it from the
    environment. Default: nothing is asked, for loopback only."""
    open_access: bool = False
    """Accept any key: each distinct key is its own tenant of weight 1."""
    policy: Annotated[PolicyConfig, bare_text_is("name", PolicyName | PolicyConfig)] = PolicyConfig()
    """Which request goes next: a name, or a name with its parameters."""
    pools: Annotated[tuple[PoolConfig, ...], AfterValidator(not_empty)] = Field(
        strict=False, json_schema_extra={"minItems": 1}
    )
    """Engines by the models they serve; a model belongs to one pool."""
    aliases: dict[Name, Name] = Field(default={})
    """Other names of models: what clients ask for, and what the engines are asked for. Answers have the former."""
    groups: tuple[GroupConfig, ...] = Field(default=(), strict=False)
    """Tenants that share a part of each pool, and groups of such groups; none by default."""
    tenants: tuple[TenantConfig, ...] = Field(default=(), strict=False)
    """Who shares the engines; may be empty with open_access only."""
    jwt: tuple[IssuerConfig, ...] = Field(default=(), strict=False, max_length=100)
    """Issuers whose signed tokens are taken beside keys. Default: none."""
    interactions: InteractionsConfig = InteractionsConfig()
    """How the calls of one answer are recognised, and how long they are kept from refusal."""
    apps: tuple[AppConfig, ...] = Field(default=(), strict=False)
    """What is different for some apps; those not listed follow the common rules."""
    overload: OverloadConfig = OverloadConfig()
    """When throttling begins and ends."""
    throttle: ThrottleConfig = ThrottleConfig()
    """Who is throttled then."""
    quota: ModelQuotasConfig = ModelQuotasConfig()
    """Limits of every tenant at any time; none by default."""
    calendar: Annotated[str, AfterValidator(checked_zone)] | None = None
    """A time zone, such as Europe/Berlin: limits per day and month hold in its days and months, and begin anew with
    them. Default: they hold in any 24 hours and any 30 days."""
    workers: Annotated[int, BeforeValidator(no_text)] = Field(
        default=1, ge=1, le=WORKERS_MAX, json_schema_extra=or_auto
    )
    """Processes that serve the address, as one gateway: they use every engine and every limit together. auto: one for
    each core that this process may use."""
    state: Annotated[StateConfig, bare_text_is("url", str | StateConfig)] = Field(
        default=StateConfig(), json_schema_extra={"default": "memory"}
    )
    """Where replicas share their state: memory (nowhere), or the url of a Redis."""
    state_file: str | None = Field(default=None, min_length=1)
    """A file that keeps what was learned of the apps over restarts. Default: it is learned anew each time."""
    usage: Annotated[UsageConfig, bare_text_is("url", str | UsageConfig)] | None = None
    """Where usage is counted and keys are kept: the path of a file for SQLite, or postgresql://... Default: nowhere."""
    batches: BatchesConfig = BatchesConfig()
    """Files and batches of requests that can wait: what a tenant may keep of them. They need `usage`."""
    memory_max: Annotated[int, BeforeValidator(no_text)] = Field(
        default=MEMORY_MAX, ge=MEMORY_MAX_LEAST, le=1 << 50, json_schema_extra=auto_by_default
    )
    """Memory of a process, whatever clients send and invent: all bounds follow from it (docs/reference/memory.md).
    Each worker has as much. auto: the limit of the container but an eighth, which is the kernel's, divided among the
    workers; without a container 2 GiB each, and at most half of the machine."""
    limits: Limits = Limits()
    """Bounds on what is queued, buffered and waited for."""
    drain_s: float = Field(default=30, ge=0, le=86_400)
    """Time that running requests have to end after SIGTERM."""
    access_log: str = Field(default="stdout", min_length=1)
    """Where the one line per request goes: stdout, off, or the path of a file."""
    tracing: Annotated[TracingConfig, bare_text_is("endpoint", str | TracingConfig)] | None = None
    """Where spans of requests are sent, by OpenTelemetry. Default: nowhere, and `traceparent` is passed on as it is."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """From which level on messages about the gateway itself are written to standard error."""
    debug_headers: bool = False
    """Answer with x-fairgate-* headers that say how the request was scheduled."""
    _provenance: Provenances = PrivateAttr(default=UNKNOWN)

    @property
    def provenance(self) -> Provenances:
        """Where its values come from."""
        return self._provenance

    def that_came_from(self, provenance: Provenances) -> Self:
        """The same, with where its values come from."""
        copy = self.model_copy()
        copy._provenance = provenance
        return copy

    @property
    def tree(self) -> Tree:
        """What each group and tenant is entitled to."""
        return tree_of(self.groups, self.tenants)

    @property
    def around(self) -> dict[str, tuple[str, ...]]:
        """The groups that each tenant is in, the innermost first."""
        return groups_around(self.groups, self.tenants)

    @property
    def bounds(self) -> Bounds:
        """What each part of a process may hold."""
        return bounds_of(self.memory_max, len(self.pools))

    @property
    def json_bytes_max(self) -> int:
        """The largest body of JSON."""
        return self.limits.json_bytes_max or self.bounds.json_bytes

    @property
    def listen_addresses(self) -> list[tuple[str, int]]:
        """Hosts, without brackets, and ports."""
        return [split_address(each) for each in ([self.listen] if isinstance(self.listen, str) else self.listen)]

    @property
    def admin_address(self) -> tuple[str, int]:
        """Host, without brackets, and port."""
        return split_address(self.admin)

    @property
    def issues_keys(self) -> bool:
        """Is there a place for keys that are made while the gateway runs?"""
        return self.state.redis_url is not None or self.usage is not None

    @property
    def has_replicas(self) -> bool:
        """Do several gateways use its engines and limits together: processes with one Redis, or workers?"""
        return self.state.redis_url is not None or self.workers > 1

    @property
    def warnings(self) -> tuple[tuple[str, str], ...]:
        """What is no fault and most likely not meant, each with its field and what to do."""
        if self.admin_token is None and not is_loopback(self.admin_address[0]):
            return (
                (
                    "admin",
                    f"is open to other machines: each client that reaches {self.admin} reads /metrics and /explain. "
                    "Set admin_token, or listen on loopback (127.0.0.1:8190)",
                ),
            )
        return ()

    @model_validator(mode="wrap")
    @classmethod
    def _consistent(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Report what contradicts itself together with what is wrong by itself, not after it is mended."""
        data = with_auto(data)
        found = islice(contradictions(data), FAULTS_FOUND_MAX)
        faults = [InitErrorDetails(type=fault(text), loc=loc, input=None) for loc, text in found]
        try:
            config = handler(data)
        except ValidationError as error:
            faults += [
                InitErrorDetails(type=_as_found(found), loc=found["loc"], input=found["input"])
                for found in error.errors(include_url=False)[:FAULTS_FOUND_MAX]
            ]
        if faults:
            raise ValidationError.from_exception_data("Config", faults, hide_input=True)
        return config


def _as_found(error: ErrorDetails) -> PydanticCustomError:
    return PydanticCustomError(error["type"], "{message}", {**error.get("ctx", {}), "message": error["msg"]})


def json_schema() -> str:
    """The JSON schema of the file, for editors that complete and check YAML."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}
    return json.dumps(schema, indent=2) + "\n"
