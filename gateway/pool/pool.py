"""Which engines serve these models, and how are they? A pool: one queue in front of several backends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from urllib.parse import urlsplit

import aiohttp

from backends.base import Adapter, BackendSnapshot
from backends.errors import ConnectFailed, UpstreamError
from backends.health import HealthState, ModelCard, fetch_models, probe
from backends.metrics import Scraper
from backends.openai import OpenAiAdapter
from backends.upstream import UpstreamPool
from backends.vllm import VllmAdapter
from gateway.config.model import BackendConfig, Config, PoolConfig
from gateway.pool.dispatcher import Dispatcher
from gateway.pool.retries import RetryBudget
from gateway.pool.shared import Shared
from gateway.pool.waiting import WaitingStreams
from gateway.request.estimate import TokenEstimator, exact_counter
from gateway.request.payload import Payload
from gateway.request.prefixes import PromptPrefixes
from gateway.telemetry.record import Record
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.admission.policy import Policy
from policies.capacity.gauges import CapacitySettings, Gauges
from policies.orders.registry import POLICIES
from policies.placements.least_loaded import least_loaded
from policies.queue.bounds import QueueLimits

__all__ = ["Backend", "Pool", "admission_engine"]

logger = logging.getLogger("fairgate")

PROBE_INTERVAL_S = 2.0
MODELS_INTERVAL_S = 30.0
MODELS_MAX = 1000
ADAPTERS: dict[str, Callable[[], Adapter]] = {"vllm": VllmAdapter, "openai": OpenAiAdapter}


class Backend:
    """One engine: where it is, how to speak to it, how it is."""

    def __init__(self, config: BackendConfig, url: str, limits: Config) -> None:
        self.name = config.name or url
        self.url = url
        self.adapter: Adapter = ADAPTERS[config.engine]()
        self.api_key = config.api_key.get_secret_value() if config.api_key is not None else None
        self.health = HealthState()
        self.models: dict[str, ModelCard] = {}
        self.tls = config.tls.context() if config.tls is not None else None
        self.upstream = UpstreamPool(
            self.name,
            url,
            tls=self.tls,
            connect_timeout_s=limits.limits.upstream_connect_s,
            silence_s=limits.limits.upstream_silence_s,
        )
        authorization = f"authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        self._head_end = b"host: " + self.upstream.host_header + b"\r\n" + authorization.encode() + b"\r\n"
        self._path = urlsplit(url).path.encode()
        self.on_health: Callable[[Backend], None] | None = None
        self._asked_models_s = float("-inf")

    def head(self, begun: bytes) -> bytes:
        """The head of a request to this engine, of which the lines that are the same for every engine are there."""
        if self._path:
            begun = begun.replace(b" /", b" " + self._path + b"/", 1)
        return begun + self._head_end

    def broke(self, error: UpstreamError) -> None:
        """A request to it failed: passive health."""
        now = time.monotonic()
        with self._noticing():
            if isinstance(error, ConnectFailed):
                self.health.connect_failed(str(error), now)
            else:
                self.health.stream_broken(str(error), now)

    async def check(self, session: aiohttp.ClientSession) -> None:
        """Ask it whether it is well, and what it serves."""
        problem = await probe(session, self.url + self.adapter.health_path, api_key=self.api_key, tls=self.tls)
        now = time.monotonic()
        with self._noticing():
            self.health.probed(problem, now)
        if problem is None and now - self._asked_models_s >= MODELS_INTERVAL_S:
            try:
                cards = await fetch_models(session, self.url, self.api_key, tls=self.tls)
            except UpstreamError as error:
                logger.warning("backend %s did not say which models it serves: %s", self.name, error)
                return
            self.models = {card.id: card for card in cards[:MODELS_MAX]}
            self._asked_models_s = now

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """Tell the pool if its health turns."""
        before = self.health.healthy
        yield
        if self.health.healthy != before and self.on_health is not None:
            self.on_health(self)


class Pool:
    """One queue, one policy, several engines that serve the same models."""

    def __init__(
        self,
        config: PoolConfig,
        gateway: Config,
        backends: list[Backend],
        shared: Shared,
        settled: Callable[[Record, str], None],
    ):
        self.name = config.name
        self.policy_name = gateway.policy.name
        self.backends = {backend.name: backend for backend in backends}
        self.response_buffer_bytes_max = gateway.limits.response_buffer_bytes_max
        self.debug_headers = gateway.debug_headers
        self.claims = shared.claims
        self.quotas = shared.quotas
        self.fallback = config.fallback
        """A model of another pool, for while no backend here is in service."""
        self._configured_models = list(config.models)
        self._settled = settled
        self._scrape_interval_s = config.capacity.scrape_interval_s
        counter = exact_counter(config.tokenizer) if config.tokenizer else None
        self.estimator = TokenEstimator(bytes_per_token=config.bytes_per_token, counter=counter)
        self.dispatcher = Dispatcher(admission_engine(gateway, config, shared))
        self.retries = RetryBudget()
        comment_s = gateway.limits.waiting_comment_s
        self.waiting = None if comment_s is None else WaitingStreams(comment_s, self.dispatcher.clock)
        """Streams without a first byte. None: they are told nothing."""
        self.prefixes: PromptPrefixes | None = None
        """None: the policy does not ask how prompts begin."""
        if self.dispatcher.engine.policy.reads_prefixes:
            knows_salts = all(isinstance(backend.adapter, VllmAdapter) for backend in backends)
            self.prefixes = PromptPrefixes(per_tenant=knows_salts and not config.shared_cache)
        for backend, backend_config in zip(backends, config.backends, strict=True):
            backend.on_health = self._health_changed
            self.dispatcher.engine.add_backend(
                backend.name, max_num_seqs=backend_config.max_num_seqs, healthy=backend.health.healthy
            )

    def __repr__(self) -> str:
        return f"<Pool {self.name}: {self.dispatcher!r}>"

    def models(self) -> dict[str, ModelCard | None]:
        """The models served, with what the engines say of them (None: nothing yet)."""
        known: dict[str, ModelCard | None] = {}
        for backend in self.backends.values():
            known.update(backend.models)
        if self._configured_models:
            return {name: known.get(name) for name in self._configured_models}
        return known

    def context_tokens_max(self, model: str) -> int | None:
        """The longest context that any backend has for it, if they say."""
        most: int | None = None
        for backend in self.backends.values():
            card = backend.models.get(model)
            length = None if card is None else card.max_model_len
            if length is not None and (most is None or length > most):
                most = length
        return most

    def is_adapter(self, model: str) -> bool:
        """Does a backend say that it is an adapter of another model?"""
        cards = [backend.models.get(model) for backend in self.backends.values()]
        return any(card is not None and card.is_adapter for card in cards)

    def is_healthy(self) -> bool:
        return any(backend.health.healthy for backend in self.backends.values())

    def least_loaded(self) -> Backend | None:
        """Where a request goes that needs no admission; of equal engines the first by name."""
        ledgers = self.dispatcher.engine.backends
        healthy = [ledgers[name] for name in self.backends if ledgers[name].healthy]
        return self.backends[least_loaded(healthy)] if healthy else None

    def learn(self, payload: Payload, prompt_tokens: int) -> None:
        """The engine has counted the prompt."""
        self.estimator.learn(payload.prompt, prompt_tokens, is_text=payload.is_text)

    def ended(self, record: Record) -> None:
        record.pool = self.name
        self._settled(record, self.policy_name)

    # --- the control plane ---

    async def check(self, session: aiohttp.ClientSession) -> None:
        """Ask every backend once how it is."""
        await asyncio.gather(*(backend.check(session) for backend in self.backends.values()))

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Check and scrape every backend until cancelled."""
        async with asyncio.TaskGroup() as group:
            for backend in self.backends.values():
                group.create_task(self._watch_health(backend, session))
                if backend.adapter.metrics_paths:
                    scraper = Scraper(
                        backend.adapter,
                        backend.url,
                        session,
                        self._scrape_interval_s,
                        on_snapshot=partial(self._scraped, backend.name),
                        on_failure=lambda error: None,  # an old gauge ages out by itself; health has its own probe
                        tls=backend.tls,
                    )
                    group.create_task(scraper.run())

    async def _watch_health(self, backend: Backend, session: aiohttp.ClientSession) -> None:
        while True:
            await asyncio.sleep(PROBE_INTERVAL_S)
            await backend.check(session)

    def _scraped(self, name: str, snapshot: BackendSnapshot) -> None:
        gauges = Gauges(
            snapshot.taken_s,
            snapshot.running,
            snapshot.waiting,
            snapshot.kv_usage,
            snapshot.kv_capacity_tokens,
            snapshot.block_size,
            snapshot.preemptions_total,
            snapshot.prompt_tokens_total,
        )
        self.dispatcher.backend_changed(name, gauges)

    def _health_changed(self, backend: Backend) -> None:
        if backend.health.healthy:
            logger.info("pool %s: backend %s is in service", self.name, backend.name)
        else:
            logger.warning("pool %s: backend %s is out of service: %s", self.name, backend.name, backend.health.reason)
        self.dispatcher.backend_changed(backend.name, backend.health.healthy)


def admission_engine(gateway: Config, pool: PoolConfig, shared: Shared) -> AdmissionEngine:
    """What decides for a pool, by its configuration; it has no backends yet."""
    limits, capacity = gateway.limits, pool.capacity
    return AdmissionEngine(
        _policy(gateway, len(pool.backends)),
        limits=QueueLimits(
            limits.queue_requests_max,
            limits.queue_bytes_max,
            limits.queue_wait_s_max,
            limits.attempts_max,
            limits.queue_wait_s_max_inside,
        ),
        capacity=CapacitySettings(
            waiting_target=capacity.waiting_target,
            kv_ceiling=capacity.kv_ceiling,
            headroom=capacity.headroom,
            concurrency_max=capacity.max_concurrency,
            part=1.0 if gateway.state.redis_url is not None else 1 / gateway.workers,
        ),
        overload=gateway.overload.settings(),
        interactions=shared.interactions,
        quotas=shared.quotas,
    )


def _policy(gateway: Config, engines: int) -> Policy:
    """The configured policy, with what other sections of the config say for it."""
    settings = gateway.policy.settings()
    known = {one.name for one in fields(POLICIES[gateway.policy.name].params)}
    if "weights" in known:
        settings["weights"] = {app.name: app.normal_service for app in gateway.apps if app.normal_service is not None}
    if "throttle" in known:
        settings["throttle"] = gateway.throttle.settings()
    return named_policy(gateway.policy.name, engines=engines, placement=gateway.policy.placement, **settings)
