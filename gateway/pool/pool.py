"""A pool: one queue in front of several engines that serve the same models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Set
from functools import partial
from math import inf
from typing import Final

import aiohttp

from backends.control_client import ControlClient
from backends.health import ModelCard
from backends.scraper import Scraper
from backends.step_feed import StepFeed
from backends.upstream_errors import ConnectFailed, UpstreamError
from gateway.config.model import Config, PoolConfig
from gateway.config.section import is_of_batch
from gateway.config.sections.backends import BackendConfig
from gateway.pool.backend import PROBE_INTERVAL_S, Backend, salt_of
from gateway.pool.breaks import Breaks
from gateway.pool.dispatcher import Dispatcher
from gateway.pool.shared import CrossPoolState, admission_engine, engine_settings, policy_terms
from gateway.pool.waiting import WaitingStreams
from gateway.request.body.payload import Payload
from gateway.request.prompt import TokenEstimator, exact_counter, prefix_hashes
from gateway.telemetry.background import Tasks
from gateway.telemetry.record import RequestRecord
from policies.admission.named import named_policy
from policies.admission.takeover import PoolSettings, Weights, remove_backend, take_over
from policies.capacity.gauges import EngineFacts
from policies.placements.least_loaded import least_loaded
from policies.request import Request, payer

logger = logging.getLogger("fairgate")

Settled = Callable[[RequestRecord, str], None]
"""Called at the end of every request, with the name of its policy."""
AGAIN_S_UNKNOWN = 5.0
"""Retry time where only an operator knows when an engine takes requests again."""
RETIRE_LOOK_S = 0.1
"""Interval of the checks whether a leaving backend has ended its requests."""
PER_REQUEST: Final = 0.1
AT_START: Final = 10.0
SAVED_MAX: Final = 100.0
"""Most saved retries: when an engine goes down, all of its requests go to others at once."""


def estimator_of(config: PoolConfig) -> TokenEstimator:
    """Return the token estimator. Raise ValueError for a tokenizer that cannot be loaded."""
    counter = exact_counter(config.tokenizer) if config.tokenizer else None
    return TokenEstimator(bytes_per_token=config.bytes_per_token, counter=counter)


class RetryBudget:
    """The retry budget of a pool: a tenth of its requests, and a few at the start."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = AT_START

    def sent(self) -> None:
        """Count the first dispatch of a request."""
        if self._left < SAVED_MAX:
            self._left += PER_REQUEST

    def take(self) -> bool:
        """Spend one retry. Return False if the budget is empty."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class PoolPlan:
    """The config, the backends and the estimator that one pool will have, found or created before they are used."""

    def __init__(self, config: PoolConfig, pool: Pool | None, estimator: TokenEstimator) -> None:
        """Collect for `pool`, which goes on, or for a new pool (None)."""
        self.config = config
        self.pool = pool
        self.backends: dict[Backend, BackendConfig] = {}
        """Backends in the order of the configuration, each with its section."""
        self.estimator = estimator

    def fresh(self) -> list[Backend]:
        """Return the backends that are new to the pool."""
        known = {} if self.pool is None else self.pool.backends
        return [backend for backend in self.backends if known.get(backend.name) is not backend]


class Pool:
    """A queue and one policy in front of several engines that serve the same models."""

    def __init__(self, plan: PoolPlan, gateway: Config, shared: CrossPoolState, settled: Settled, background: Tasks):
        """Create a pool. `background` collects the faults of its tasks."""
        self.name = plan.config.name
        self.backends: dict[str, Backend] = {}
        """Backends by name, including those that leave and still have running requests."""
        self.healthy_fallback: Callable[[], Pool | None] = lambda: None
        """Return the pool that serves requests while no backend here can, or None."""
        self.retries = RetryBudget()
        self.breaks = Breaks()
        self.answers_bytes = 0
        self._settled = settled
        self._terms = policy_terms(gateway, plan.config)
        self.dispatcher = Dispatcher(admission_engine(gateway, plan.config, shared))
        self.waiting: WaitingStreams | None = None
        """Streams before their first byte. None where no `: waiting` comments are configured."""
        self._session: aiohttp.ClientSession | None = None
        self._background = Tasks(background)
        self._watchers: dict[Backend, list[asyncio.Task[None]]] = {}
        self._readers: dict[Backend, list[asyncio.Task[None]]] = {}
        self._left: set[Backend] = set()
        """Backends that have left the config and end their running requests."""
        self._configure(plan, gateway, shared)

    def _configure(self, plan: PoolPlan, gateway: Config, shared: CrossPoolState) -> None:
        """Apply the settings that a reload may change."""
        engine = self.dispatcher.engine
        config = self.config = plan.config
        self.estimator = plan.estimator
        self.policy_name = gateway.policy.name
        self.batch_apps = frozenset([app.name for app in gateway.apps if is_of_batch(app)])
        self.response_buffer_bytes_max = gateway.limits.response_buffer_bytes_max
        self.answers_bytes_max = gateway.bounds.answers_bytes // len(gateway.pools)
        self.takes_background = gateway.limits.background
        self.claims = shared.claims
        self.quotas = shared.quotas
        engine.has_fallback = config.fallback is not None
        engine.requests.cold_start.s_max = config.start_s_max
        comment_s = gateway.limits.waiting_comment_s
        if comment_s != (None if self.waiting is None else self.waiting.interval_s):
            # Streams that already wait keep their comment interval.
            self.waiting = None if comment_s is None else WaitingStreams(comment_s, self.dispatcher.clock)
        for backend, backend_config in plan.backends.items():
            backend.on_health = self._health_changed
            backend.on_recognised = self._recognised
            backend.isolates = config.isolate_caches
            self.backends[backend.name] = backend
            if backend.name not in engine.backends:
                engine.add_backend(backend.name, max_num_seqs=backend_config.max_num_seqs, healthy=backend.in_service)

    def take_over(self, plan: PoolPlan, gateway: Config, shared: CrossPoolState, weights: Weights | None) -> None:
        """Go on under another configuration, with changed `weights` of tenants.

        A new backend of the plan has never left this pool. Backends outside the plan end their requests.
        """
        config, backends = plan.config, plan.backends
        engine, before = self.dispatcher.engine, self.backends.copy()
        is_scraped_otherwise = self.config.capacity.scrape_interval_s != config.capacity.scrape_interval_s
        for backend in backends:
            known = before.get(backend.name)
            if known is backend:
                continue
            self._log_health(backend)
            if known is not None:
                backend.drained = known.drained
                if known.url != backend.url and engine.policy.prefixes is not None:
                    engine.policy.prefixes.forget_engine(backend.name)
        self._configure(plan, gateway, shared)
        for backend in before.values():
            if backend in backends or backend.leaving:
                continue
            backend.leaving = True
            self._unwatch(backend)
            self._background.start(self._retire(backend))
        for name, backend in self.backends.items():
            engine.backends[name].healthy = backend.in_service
        terms = policy_terms(gateway, config)
        policy = None if terms == self._terms else named_policy(**terms, prefixes=engine.policy.prefixes)
        self._terms = terms
        slots = {backend.name: each.max_num_seqs for backend, each in backends.items()}
        settings = engine_settings(gateway, config, shared)
        setup = PoolSettings(policy=policy, weights=weights, slots=slots, **settings)
        self.dispatcher.carry_out(take_over(engine, setup, self.dispatcher.clock()))
        for backend in backends:
            if is_scraped_otherwise:
                self._unwatch(backend)
            self._watch(backend)

    def drain(self, backend: Backend, drained: bool) -> None:
        """Drain a backend, or end its drain. Running requests end there; waiting requests go elsewhere."""
        if backend.drained != drained:
            backend.drained = drained
            logger.info("pool %s: backend %s is %s", self.name, backend.name, "drained" if drained else "resumed")
            self.dispatcher.backend_changed(backend.name, backend.in_service)

    def runs_at(self, backend: Backend) -> bool:
        """Return whether the backend has running requests of this pool."""
        is_known = self.backends.get(backend.name) is backend
        return backend.upstream.is_busy or (is_known and bool(self.dispatcher.engine.backends[backend.name].leases))

    async def close(self) -> None:
        """Close the pool after its requests have ended."""
        await self._background.stop()
        self.dispatcher.close()
        for backend in [*self.backends.values(), *self._left]:
            await backend.close()

    def models(self) -> dict[str, ModelCard | None]:
        """Return the served models with the engines' cards, or None before any card. Adapters need not be
        configured."""
        known: dict[str, ModelCard | None] = {}
        for backend in self.backends.values():
            if not backend.leaving:
                known.update(backend.models)
        if not self.config.models:
            return known
        adapters = {name: card for name, card in known.items() if card is not None and card.parent}
        return adapters | {name: known.get(name) for name in self.config.models}

    def context_tokens_max(self, model: str) -> int | None:
        """Return the longest context that any backend has for a model, if known."""
        most: int | None = None
        for backend in self.backends.values():
            card = backend.models.get(model)
            length = None if card is None else card.max_model_len or backend.adapter.context_tokens
            if length is not None and (most is None or length > most):
                most = length
        return most

    def is_adapter(self, model: str) -> bool:
        """Return whether a backend lists this model as an adapter of another model."""
        for backend in self.backends.values():
            card = backend.models.get(model)
            if card is not None and card.parent:
                return True
        return False

    def is_healthy(self) -> bool:
        return any([backend.in_service for backend in self.backends.values()])

    def has_other(self, backend: Backend) -> bool:
        """Return whether another engine is in service besides this one."""
        return any(each is not backend and each.in_service for each in self.backends.values())

    def takes(self, request: Request) -> bool:
        """Return whether an engine is in service that may run the request, now or later."""
        ledgers = self.dispatcher.engine.backends.values()
        return any(each.healthy and each.closed_until_s(request) < inf for each in ledgers)

    def awaits_start(self, request: Request) -> bool:
        """Return whether the request may wait for an engine to start: not if it rests, or an engine died of it."""
        closed = request.progress.closed or {}
        return self.config.start_s_max > 0 and not request.progress.rests and inf not in closed.values()

    def again_s(self) -> float:
        """Return the least seconds, at least one, until an engine can take requests again."""
        there = [backend.again_s for backend in self.backends.values() if not (backend.drained or backend.leaving)]
        return min(there, default=AGAIN_S_UNKNOWN)

    def least_loaded(self, besides: Set[str]) -> Backend | None:
        """Return the engine for a request without admission: the least loaded, then the first by name."""
        ledgers = self.dispatcher.engine.backends
        healthy = [ledgers[name] for name in self.backends if ledgers[name].healthy and name not in besides]
        return self.backends[least_loaded(healthy)] if healthy else None

    def hash_prefix(self, payload: Payload, tenant: str) -> tuple[int, ...]:
        """Return a prompt's block hashes, if the policy uses prefixes. Tenants have separate hashes where engines
        separate their cached blocks."""
        if self.dispatcher.engine.policy.prefixes is None:
            return ()
        seed = payload.model
        if any([backend.keeps_tenants_apart for backend in self.backends.values()]):
            seed = f"{salt_of(tenant)} {seed}"
        return prefix_hashes(payload.prompt.head, seed.encode())

    def ended(self, record: RequestRecord) -> None:
        """Record the end of a request, and how many of its cached tokens were expected, if the engine reports them."""
        record.pool = self.name
        backend, cached = self.backends.get(record.backend), record.service.cached
        if backend is not None and cached is not None:
            expected = 0 if record.request is None else record.request.progress.cached_tokens
            counts = backend.prompt_tokens
            counts["input"] += record.service.prompt
            counts["cached"] += cached
            counts["expected"] += expected
            counts["wrong"] += abs(expected - cached)
        self._settled(record, self.policy_name)

    # --- the control plane ---

    async def check(self, session: aiohttp.ClientSession) -> None:
        """Probe every backend once."""
        await asyncio.gather(*[each.check(each.control_client(session)) for each in self.backends.values()])

    def watch(self, session: aiohttp.ClientSession) -> None:
        """Probe and scrape every backend, later ones included, until `close`."""
        self._session = session
        for backend in self.backends.values():
            self._watch(backend)

    def _watch(self, backend: Backend) -> None:
        if self._session is None or backend in self._watchers:
            return
        client, of = backend.control_client(self._session), f"{self.name}/{backend.name}"
        self._watchers[backend] = [self._background.repeat(partial(self._check, backend, client), "health", of)]
        self._read(backend)

    def _read(self, backend: Backend) -> None:
        """Start reading the gauges of a watched engine in the way of its kind."""
        if self._session is None or backend not in self._watchers:
            return
        client, of = backend.control_client(self._session), f"{self.name}/{backend.name}"
        self._stop_readers(backend)
        readers = self._readers[backend] = []
        observe = partial(self.dispatcher.backend_changed, backend.name)
        if backend.reads_steps and backend.adapter.steps_path is not None:
            backend.feed = StepFeed(client, backend.adapter.steps_path, observe, partial(self._log_feed, backend))
            readers.append(self._background.repeat(backend.feed.run_once, "steps", of))
        if backend.adapter.metrics_paths:
            interval_s, standstill = self.config.capacity.scrape_interval_s, backend.standstill
            scraper = Scraper(backend.adapter, client, interval_s, observe, feed=backend.feed, standstill=standstill)
            readers.append(self._background.repeat(scraper.run_once, "metrics", of))

    def _unwatch(self, backend: Backend) -> None:
        for task in self._watchers.pop(backend, ()):
            task.cancel()
        self._stop_readers(backend)

    def _stop_readers(self, backend: Backend) -> None:
        for task in self._readers.pop(backend, ()):
            task.cancel()
        backend.feed = None

    def _recognised(self, backend: Backend, is_other_kind: bool) -> None:
        """Apply the facts of an engine that comes into service."""
        if self.backends.get(backend.name) is not backend:
            return
        logger.info("pool %s: backend %s is %s", self.name, backend.name, backend.adapter.description())
        self.dispatcher.backend_changed(backend.name, EngineFacts(backend.adapter.slots, is_other_kind))
        self._read(backend)

    async def _retire(self, backend: Backend) -> None:
        """Wait for a leaving backend's requests, then close it. A backend configured later under its name is
        separate."""
        self._left.add(backend)
        while self.runs_at(backend):  # noqa: ASYNC110 (an answer has no event for its end)
            await asyncio.sleep(RETIRE_LOOK_S)
        self._left.discard(backend)
        if self.backends.get(backend.name) is backend:
            del self.backends[backend.name]
            self.breaks.forget(backend.name)
            self.dispatcher.carry_out(remove_backend(self.dispatcher.engine, backend.name, self.dispatcher.clock()))
            logger.info("pool %s: backend %s has ended its last request, and is removed", self.name, backend.name)
        await backend.close()

    async def _check(self, backend: Backend, client: ControlClient) -> None:
        await asyncio.sleep(PROBE_INTERVAL_S)
        leases = self.dispatcher.engine.backends[backend.name].leases.values()
        await backend.check(client, min([lease.dispatched_s for lease in leases], default=inf))

    def _log_health(self, backend: Backend) -> None:
        if backend.health.healthy:
            logger.info("pool %s: backend %s is in service", self.name, backend.name)
        else:
            logger.warning("pool %s: backend %s is out of service: %s", self.name, backend.name, backend.health.reason)

    def _log_feed(self, backend: Backend, is_read: bool, why: str) -> None:
        if is_read:
            logger.info("pool %s: backend %s is read by its plug-in's report of each step", self.name, backend.name)
        else:
            logger.info("pool %s: backend %s is read by its metrics: %s", self.name, backend.name, why)

    def _health_changed(self, backend: Backend) -> None:
        if self.backends.get(backend.name) is not backend:
            return  # another backend has its name
        self._log_health(backend)
        if not backend.health.healthy:
            self.breaks.forget(backend.name)
        self.dispatcher.backend_changed(backend.name, backend.in_service)

    def answered(self, backend: Backend, tenant: str, error: UpstreamError | None = None, began_s: float = inf) -> None:
        """Record an answer or a failure for passive health. An engine at fault goes out of service, unless it is the
        last one."""
        if isinstance(error, ConnectFailed):
            backend.connect_failed(error)
            return
        if self.backends.get(backend.name) is not backend:
            return
        now = self.dispatcher.clock()
        self.breaks.answered(backend.name, tenant, now, broke=error is not None, began_s=began_s)
        if error is None:
            backend.health.failures = 0  # an answer ends the row
            return
        leases = self.dispatcher.engine.backends[backend.name].leases.values()
        is_shared = any([payer(lease.request.flow.tenant) != tenant for lease in leases])
        if self.has_other(backend) and self.breaks.is_engine_at_fault(backend.name, now, is_shared=is_shared):
            backend.mark_unhealthy(f"its answers break, the last one: {error}")
