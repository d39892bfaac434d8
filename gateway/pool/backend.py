"""An engine: its address, its connections and its health."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b
from math import inf
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from backends.client.upstream import Receiver, UpstreamCall, UpstreamConnections
from backends.control_client import ControlClient
from backends.engines.adapter import UNREADABLE, Adapter
from backends.engines.by_metrics import OpenAiAdapter
from backends.engines.kinds import KINDS, RECOGNISED_PATH, recognise
from backends.health import HealthState, ModelCard, StandstillDetector, fetch_models, fetch_text, probe
from backends.simulated.simulated_server import SimulatedServer
from backends.step_feed import StepFeed
from backends.upstream_errors import UpstreamError
from gateway.config.model import Config
from gateway.config.sections.backends import BackendConfig, Isolation
from gateway.request.body.payload import JsonPayload, Payload

logger = logging.getLogger("fairgate")

PROBE_INTERVAL_S = 2.0
AGAIN_S_MIN = 1.0
STANDSTILLS = 5
"""Fraction of `upstream_silence_s` after which an engine without a step goes out of service: two minutes by default.
The longest steps, of prompts computed on CPUs, take less."""
MODELS_MAX = 1000
TENANTS_MAX: Final = 1024
"""Tenants whose salts are cached: each request needs one."""
TAKING_BODIES: Final = (b"POST ", b"PUT ", b"PATCH ")
"""Beginnings of heads that state a length, even if there is no body."""


class Backend:
    """An engine. Changing a backend's URL or credentials creates a new `Backend`."""

    def __init__(
        self, config: BackendConfig, url: str, gateway: Config, embedded: SimulatedServer | None = None
    ) -> None:
        """Create a backend at `url`. `embedded`: the simulated engine in this process, which ends with the backend."""
        self.name = config.name or url
        self.url = url
        self.connection_key = connection_key(config, gateway)
        self._embedded = embedded
        self.drained = False
        self.leaving = False
        """True if the engine has left the config, so that it only ends its running requests."""
        self._kind = KINDS.get(config.engine)
        """Configured kind of engine. None detects the kind whenever the engine comes into service."""
        self.adapter: Adapter = OpenAiAdapter() if self._kind is None else self._kind()
        self.reads_steps = config.steps
        self.api_key = config.api_key.get_secret_value() if config.api_key is not None else None
        self.health = HealthState()
        connect_s, silence_s = gateway.limits.upstream_connect_s, gateway.limits.upstream_silence_s
        self.standstill = StandstillDetector(silence_s / STANDSTILLS)
        self.models: dict[str, ModelCard] = {}
        self.prompt_tokens = dict.fromkeys(("input", "cached", "expected", "wrong"), 0)
        """Prompt tokens, how many were cached and expected to be, and the sum of the absolute errors of the latter."""
        self.tls = config.tls.make_context() if config.tls is not None else None
        self._address = config.address
        self.upstream = UpstreamConnections(
            self.name, url, tls=self.tls, address=config.address, connect_timeout_s=connect_s, silence_s=silence_s
        )
        authorization = f"authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        self._head_end = b"host: " + self.upstream.host_header + b"\r\n" + authorization.encode() + b"\r\n"
        self._path = urlsplit(url).path.encode()
        self.isolates: Isolation = "where_possible"
        self.on_health: Callable[[Backend], None] | None = None
        self.feed: StepFeed | None = None
        """Feed of the engine's steps; None where it is not read."""
        self.on_recognised: Callable[[Backend, bool], None] | None = None

    @property
    def keeps_tenants_apart(self) -> bool:
        """Return whether each request to this engine carries a salt that separates the cached blocks of tenants."""
        return self.isolates != "never" and self.adapter.takes_cache_salt

    @property
    def mixes_tenants(self) -> bool:
        """Return whether tenants would share the cache of this engine, although the pool forbids that."""
        return self.isolates == "require" and not self.adapter.takes_cache_salt

    @property
    def in_service(self) -> bool:
        """Return whether requests may go to the engine."""
        return self.health.healthy and not self.drained and not self.leaving and not self.mixes_tenants

    @property
    def again_s(self) -> float:
        """Return the least seconds, at least one, until probes can bring the engine into service."""
        return max(AGAIN_S_MIN, self.health.probes_missing * PROBE_INTERVAL_S)

    @property
    def why_not(self) -> str:
        """Return why no request may go to the engine."""
        if self.leaving:
            return "no longer in the config; it ends what it runs"
        if self.health.healthy and self.mixes_tenants:
            return f"{self.adapter.title} ignores cache_salt, and isolate_caches is `require`"
        return "drained" if self.drained else self.health.reason

    @property
    def read_by(self) -> str:
        """Return how the engine's load is read: by steps, metrics or answers."""
        if self.feed is not None and not self.feed.why:
            return "steps"
        return "metrics" if self.adapter.metrics_paths else "answers"

    def send(
        self, head: bytes, payload: Payload | None, tenant: str, receiver: Receiver, *, is_fresh: bool = False
    ) -> UpstreamCall:
        """Send a tenant's request. `head` is the part that all engines share; `is_fresh` asks for a new connection."""
        if self._path:
            head = head.replace(b" /", b" " + self._path + b"/", 1)
        begun = b""
        body: bytes | memoryview = b"" if payload is None else payload.body
        if self.keeps_tenants_apart and isinstance(payload, JsonPayload):
            begun, body = payload.salted(salt_of(tenant))
        if payload is not None or head.startswith(TAKING_BODIES):
            head = b"%bcontent-length: %d\r\n" % (head, len(begun) + len(body))
        return self.upstream.send(b"%b%b%b" % (head, self._head_end, begun), body, receiver, is_fresh=is_fresh)

    def control_client(self, session: aiohttp.ClientSession) -> ControlClient:
        """Return the client for probes and scrapes, on this session."""
        return ControlClient(self.url, session, api_key=self.api_key, tls=self.tls, address=self._address)

    async def close(self) -> None:
        """Close the connections, and end an embedded engine."""
        await self.upstream.close()
        if self._embedded is not None:
            await self._embedded.stop()

    def connect_failed(self, error: UpstreamError) -> None:
        """Count a failed connection against the engine's health."""
        with self._noticing():
            self.health.connect_failed(str(error))

    def mark_unhealthy(self, reason: str) -> None:
        """Take the engine out of service until its next good probes."""
        with self._noticing():
            self.health.mark_unhealthy(reason)

    async def check(self, client: ControlClient, oldest_s: float = inf) -> None:
        """Probe the engine and fetch its models. `oldest_s`: start of the oldest of our requests that it runs."""
        is_new = not self.health.healthy
        # While the engine is out of service, another kind may take its place.
        path = OpenAiAdapter.health_path if is_new and self._kind is None else self.adapter.health_path
        problem = await probe(client, path)
        problem = problem or self.standstill.fault(oldest_s)
        if problem is None:  # engines load adapters while they run
            try:
                cards = await fetch_models(client)
                self.models = {card.id: card for card in cards[:MODELS_MAX]}
            except UpstreamError as error:
                logger.warning("backend %s did not list its models: %s", self.name, error)
            if is_new:
                await self._recognise(client)
        with self._noticing():
            self.health.probed(problem)

    async def _recognise(self, client: ControlClient) -> None:
        """Detect the kind of engine, unless configured, and read the facts that no gauge reports."""
        if self._kind is None:
            owners = {card.owned_by for card in self.models.values() if card.parent is None}
            found = recognise(owners, await fetch_text(client, RECOGNISED_PATH))
        else:
            found = self._kind()
        if found.facts_path is not None:
            text = await fetch_text(client, found.facts_path)
            try:
                found.read_facts(text)
            except UNREADABLE as error:
                logger.warning("backend %s: %s is no answer of %s: %r", self.name, found.facts_path, found.title, error)
        before, self.adapter = self.adapter, found
        if self.on_recognised is not None:
            self.on_recognised(self, type(found) is not type(before))

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """Notify the pool if the block changes the engine's health."""
        before = self.health.healthy
        yield
        if self.health.healthy != before and self.on_health is not None:
            self.on_health(self)


def connection_key(config: BackendConfig, gateway: Config) -> tuple[object, ...]:
    """Return the settings whose change requires new connections."""
    limits = gateway.limits
    where = (config.url, config.address, config.engine, config.api_key, config.tls, config.steps)
    return (*where, limits.upstream_connect_s, limits.upstream_silence_s)


@lru_cache(maxsize=TENANTS_MAX)
def salt_of(tenant: str) -> str:
    """Return the salt by which engines separate a tenant's cached blocks. The salt hides the tenant's name."""
    return blake2b(tenant.encode(), digest_size=12).hexdigest()
