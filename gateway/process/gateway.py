"""The composition root: a gateway created from its config, in production and in tests alike.

`start` opens what requests need, and then listens. While the gateway serves, `take_over` changes its config. `stop`
drains, and then closes. Receivers of ended requests are in `_subscribers`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from gateway.config.changes import weights_that_differ
from gateway.config.model import Config
from gateway.http.addresses import TrustedProxies
from gateway.http.connection import Connection
from gateway.http.errors import ApiError, Reason
from gateway.http.server import HttpServer
from gateway.http.sockets import listener_of_all_families, listening
from gateway.http.tls.certificates import Certificates
from gateway.http.tls.protocol import TlsProtocol
from gateway.keys.identity import Keyring
from gateway.keys.issued import KeyReader
from gateway.keys.stored_responses import StoredResponses
from gateway.operator.admin_listener import admin_app, admin_runner, worker_app
from gateway.operator.operated import Reloader
from gateway.operator.self_service.self_service import SelfService
from gateway.operator.snapshots.snapshot import GatewaySnapshot, snapshot_of
from gateway.pool.engine_addresses import Resolver, resolve
from gateway.pool.learned import LearnedFile
from gateway.pool.pool import Pool
from gateway.pool.pools import CannotTakeOver, Pools, pool_identities_of
from gateway.pool.shared import CrossPoolState
from gateway.process.listener_limits import server_limits
from gateway.process.sharing import replicate, store_of
from gateway.proxy.batches.batch_lane import BatchLane
from gateway.proxy.pipeline import Pipeline
from gateway.proxy.request_context import RequestContext
from gateway.request.bypass_limiter import BypassLimiter
from gateway.request.cors import Cors
from gateway.request.routes import Routes
from gateway.storage.store_errors import StoreRefused, StoreUnavailable
from gateway.telemetry.access_log import AccessLog
from gateway.telemetry.background import Tasks
from gateway.telemetry.metrics import RequestMetrics
from gateway.telemetry.recent_requests import RecentRequests
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.trace import TraceSampler

if TYPE_CHECKING:
    from gateway.config.sections.limits import ModelQuotasConfig
    from gateway.config.sections.services import TracingConfig, UsageConfig
    from gateway.operator.snapshots.of_replicas import Replicas
    from gateway.pool.replication.ticker import SyncRounds
    from gateway.storage.hub.run_directory import WorkerSlot
    from gateway.telemetry.span_export import SpanExport
    from gateway.usage.recorder import UsageRecorder

logger = logging.getLogger("fairgate")

ARRIVAL_S = 1.0
"""Time for connected clients to begin a request after the gateway began to stop."""


class Gateway:
    """Listeners, pools and telemetry of one process. Call `start`, then `stop`."""

    def __init__(
        self,
        config: Config,
        listeners: Sequence[socket.socket] = (),
        *,
        admin_listener: socket.socket | None = None,
        load: Callable[[], Config] | None = None,
        worker_slot: WorkerSlot | None = None,
        resolver: Resolver = resolve,
    ) -> None:
        """Create a gateway. `listeners` and `admin_listener`, if given, listen already. `load` reads the config
        again."""
        self.config = config
        self._listeners = listeners
        self._admin_listener = admin_listener
        self._worker_slot = worker_slot
        self.metrics = RequestMetrics()
        self.recent = RecentRequests(config.bounds.size("ends"))
        self.shared = CrossPoolState.from_config(config)
        self._background = Tasks()
        self.metrics.registry.register(self._background)
        self._pools = Pools(self._settled, resolver, self._background)
        self.metrics.registry.register(self._pools.addresses)
        self._changing = asyncio.Lock()
        """Held during a change of the pools."""
        self.port = 0
        self.admin_port = 0
        self._access_log = AccessLog(config.access_log)
        self.metrics.registry.register(self._access_log)
        self._subscribers: list[Callable[[RequestRecord], None]] = [
            self.metrics.settled, self.recent.ended, self._access_log.write,
        ]  # fmt: skip
        callers_max, mints = config.bounds.size("rates") // 2, not config.issues_keys
        self._keyring = Keyring(
            config.tenants, config.groups, open_access=config.open_access, mints=mints, guessers_max=callers_max
        )
        self._keyring.on_learned = self._learn
        self.usage: UsageRecorder | None = None
        self.spans: SpanExport | None = None
        self._follower: KeyReader | None = None
        self._lane: BatchLane | None = None
        self._self_service: SelfService | None = None
        self.store, self.keys = store_of(config, worker_slot)
        self.sync_rounds: Sequence[SyncRounds] = ()
        self.replicas: Replicas | None = None
        self._learned: LearnedFile | None = None
        self._certificates = Certificates(config.tls.make_context, config.tls.files) if config.tls is not None else None
        self._bypass_limiter = BypassLimiter(config.limits.unqueued_max, config.limits.unqueued_per_s, callers_max)
        self.responses = StoredResponses(config.bounds.size("responses"), self.store)
        sampler = None if config.tracing is None else TraceSampler(config.tracing.sample_ratio)
        pipeline = self._pipeline = Pipeline(
            self._keyring, self._settled, self._bypass_limiter, self.responses, sampler
        )
        certificates = self._certificates
        self._server = HttpServer(
            Connection if certificates is None else partial(TlsProtocol, certificates=certificates),
            pipeline.handle, server_limits(config), on_head=pipeline.authorize, on_refused=pipeline.refused,
            proxies=TrustedProxies(config.trusted_proxies), kind=RequestContext,
        )  # fmt: skip
        self._session: aiohttp.ClientSession | None = None
        self._admin: web.AppRunner | None = None
        self._is_stopping = False
        self.reloading = Reloader(self, load)

    @property
    def pools(self) -> list[Pool]:
        """Pools of the config."""
        return self._pools.all

    @property
    def is_running(self) -> bool:
        """Return whether the gateway serves, and is not about to stop."""
        return self._admin is not None and not self._is_stopping

    @property
    def minted_keys(self) -> dict[str, str]:
        """Keys minted for this run, by tenants without keys in the config."""
        return self._keyring.held.minted

    def not_ready(self) -> list[str]:
        """Reasons why no traffic should come here; empty for a ready gateway."""
        faults = [] if self.is_running else ["shutting down" if self._is_stopping else "starting"]
        for pool in self.pools:
            if not pool.is_healthy() and not pool.config.start_s_max:
                reasons = [f"{backend.name}: {backend.why_not}" for backend in pool.backends.values()]
                reasons += self._pools.addresses.faults(pool.config)
                faults.append(f"pool {pool.name} has no backend in service ({'; '.join(reasons)})")
        return faults

    def faults(self) -> list[str]:
        """Faults that do not stop traffic."""
        faults = [f"{name}: {why}" for name, why in sorted(self._background.faults.items())]
        if self.usage is not None and self.usage.fault is not None:
            faults.append(f"usage is not written: {self.usage.fault}")
        return faults

    def store_state(self) -> str | None:
        """State of the shared store, or None where the config has none."""
        if self.store is None:
            return None
        return "shared" if self.store.fault is None else f"not shared: {self.store.fault}"

    async def snapshot(self) -> GatewaySnapshot:
        return snapshot_of(self)

    def reload_certificates(self) -> bool:
        """Load the listener's certificate again. Log an unusable one, keep the old one, and return False."""
        return self._certificates is None or self._certificates.reload()

    # --- the start ---

    async def start(self) -> None:
        """Listen. Raise OSError for a taken address, or StoreRefused for an unusable Redis; one that is down does not
        matter."""
        await self._open_store()
        await self._open_pools()
        self._direct()
        self._open_services()
        await self._listen()
        await self._open_admin()

    async def _open_store(self) -> None:
        """Join the other gateways, if any: now, or once their store is reachable."""
        if self.store is None:
            return
        self.metrics.registry.register(self.store)
        try:
            await self.store.open()
        except StoreUnavailable:
            pass  # the store logs the error and keeps trying
        self._background.repeat(self.store.run_once, "store")

    async def _open_pools(self) -> None:
        """Open the pools, and what their requests are counted, checked and recorded by."""
        config = self.config
        self._pools.commit(config, self.shared, await self._pools.prepare(config))
        if self.store is not None:
            self.sync_rounds, self.replicas = replicate(
                self, self.responses, self.store, self._background, self._worker_slot
            )
        if config.usage is not None:
            await self._count_usage(config.usage)
        if self.keys is not None:
            self._follower = KeyReader(self.keys, self._keyring)
            self._background.repeat(self._follower.run_once, "keys")
        if config.tracing is not None:
            self._follow_traces(config.tracing)
        if config.state_file is not None:
            self._learned = LearnedFile(Path(config.state_file), self._pools.engines)
            self._learned.restore()
            self._background.repeat(self._learned.run_once, "state_file")
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3))
        if config.jwt:
            from gateway.keys.issuers import Issuers  # cryptography is loaded only where tokens are checked

            self._keyring.tokens = Issuers(config.jwt, self._session, self._background)
        await self._pools.watch(self._session)
        if self._certificates is not None:
            self._background.repeat(self._certificates.run_once, "certificates")
        self._background.repeat(self._follow_addresses, "engines")

    async def _count_usage(self, usage: UsageConfig) -> None:
        """Store usage, and keys where no Redis has them. Limits of a day continue from stored usage, unless replicas
        count them together: then their store continues them."""
        from gateway.keys.in_database import DatabaseKeys
        from gateway.usage.recorder import UsageRecorder

        self.usage = UsageRecorder(usage, None if self.store is not None else self.shared.quotas, self.config.bounds)
        self.metrics.registry.register(self.usage)
        self._subscribers.append(self.usage.settled)
        await self.usage.open()
        self._background.repeat(self.usage.run_once, "usage")
        if self.keys is None:
            self.keys = DatabaseKeys(self.usage.database)

    def _follow_traces(self, tracing: TracingConfig) -> None:
        """Export the spans of traced requests. Raise StoreRefused if OpenTelemetry is not installed."""
        try:
            from gateway.telemetry.span_export import SpanExport  # the SDK is loaded only where spans are sent
        except ModuleNotFoundError as error:
            raise StoreRefused("tracing: needs OpenTelemetry: pip install 'fairgate[opentelemetry]'") from error
        self.spans = SpanExport(tracing.endpoint)
        self.metrics.registry.register(self.spans)
        self._subscribers.append(self.spans.ended)

    def _direct(self) -> None:
        """Give the pipeline the pools and routes of the config."""
        config = self.config
        self._pipeline.take_over(
            self.pools, routes=Routes(config.routes), cors=Cors(config.cors_origins), aliases=config.aliases,
            json_bytes_max=config.json_bytes_max,
        )  # fmt: skip

    def _open_services(self) -> None:
        """Open what answers requests without an engine: batches, and what tenants see of themselves."""
        if self.config.usage is not None:
            self._lane = BatchLane(self.config.usage, self.config, self._pipeline, self._follower, self._background)
            self.metrics.registry.register(self._lane)
        self._self_service = SelfService(self, self._pipeline)

    async def _listen(self) -> None:
        for address, sock in zip(self.config.listen_addresses, self._listeners or repeat(None), strict=False):
            with listening("the listener for clients", address, "listen", "--port"):
                port = await self._server.listen(*address, sock=sock)
            self.port = self.port or port

    async def _open_admin(self) -> None:
        """Listen for the operator, or as a worker for the hub."""
        slot, address = self._worker_slot, self.config.admin_address
        self._admin = admin_runner(admin_app(self) if slot is None else worker_app(self))
        await self._admin.setup()
        if slot is not None:
            await web.UnixSite(self._admin, slot.run_directory.worker(slot.index)).start()
            return
        with listening("the admin listener", address, "admin", "--admin-port"):
            sock = self._admin_listener or listener_of_all_families(*address)
            await (web.SockSite(self._admin, sock) if sock else web.TCPSite(self._admin, *address)).start()
        self.admin_port = int(self._admin.addresses[0][1])

    # --- change, while it serves ---

    async def take_over(self, config: Config) -> None:
        """Go on under another configuration, without losing requests, counts or learned state.

        Raise CannotTakeOver, with nothing changed, if a named resource is missing.
        """
        async with self._changing:
            await self._take_over(config)

    async def _take_over(self, config: Config) -> None:
        keys = await asyncio.to_thread(self._keyring.read, config.tenants, config.groups)
        shared = await asyncio.to_thread(self.shared.read, self.config, config)
        weights = await asyncio.to_thread(weights_that_differ, self.config, config)
        prepared = await self._pools.prepare(config)
        if config.access_log != self.config.access_log:
            try:
                self.reopen_log(config.access_log)
            except OSError as error:
                await self._pools.discard(prepared)
                raise CannotTakeOver(f"access_log: {error}") from error
        # From here to the end in one step: no request sees half of the change.
        before, self.config = self.config, config
        counted, self.shared = self.shared.quotas, self.shared.taken_over(shared, config)
        first = self.shared.quotas if counted is not self.shared.quotas and self.store is None else None
        if self.usage is not None and first is not None:
            self.usage.go_on_with(first)  # before requests under way are counted
        self._keyring.take_over(keys, open_access=config.open_access)
        self._pools.commit(config, self.shared, prepared, weights)
        logger.setLevel(config.log_level.upper())
        self._bypass_limiter.set(config.limits.unqueued_max, config.limits.unqueued_per_s)
        self._direct()
        self._server.set(server_limits(config), TrustedProxies(config.trusted_proxies))
        if self._certificates is not None and config.tls is not None and config.tls != before.tls:
            self._certificates.set(config.tls.make_context, config.tls.files)
        self._reject_revoked()
        if self.store is not None:
            self.store.pools = pool_identities_of(config)
        if self.usage is not None and first is not None:
            await self.usage.flush()

    async def _follow_addresses(self) -> None:
        """Replace the engines whenever names have other addresses."""
        changed = self._pools.addresses.changed
        await changed.wait()
        changed.clear()
        try:
            async with self._changing:
                self._pools.commit(self.config, self.shared, await self._pools.prepare(self.config))
        except Exception:
            changed.set()  # the present engines stay, and the change is tried again
            raise

    def _learn(self, quotas: Mapping[str, ModelQuotasConfig]) -> None:
        self.shared.set_issued_quotas(quotas)
        self._reject_revoked()

    def _reject_revoked(self) -> None:
        waiting = [each for pool in self._pools.with_leaving() for each in pool.dispatcher.exchanges()]
        self._pipeline.reject_revoked(waiting)

    def reopen_log(self, target: str) -> None:
        """Open the access log anew, at this target or at a new file of the same name. Raise OSError."""
        close = self._access_log.reopen(target)
        if close is not None:
            self._background.start(asyncio.to_thread(close))

    def _settled(self, record: RequestRecord, policy: str) -> None:
        """Tell all subscribers of an ended request."""
        record.policy = policy
        for subscriber in self._subscribers:
            subscriber(record)

    # --- the end ---

    async def stop(self, drain_s: float) -> None:
        """Take no new connections, serve requests on open ones for up to `drain_s`, abort the rest, and close."""
        self._is_stopping, server = True, self._server
        server.stop_accepting()
        await asyncio.sleep(0)  # a connection accepted in this turn of the loop is known to the server in the next
        server.close_idle()
        if self._lane is not None:
            await self._lane.stop()
        loop = asyncio.get_running_loop()
        began_s = now = loop.time()
        while now < began_s + drain_s and (
            self._is_busy() or server.awaits_requests(has_begun=now >= began_s + ARRIVAL_S)
        ):
            await asyncio.sleep(0.05)
            now = loop.time()
        self._pipeline.draining = True
        self._stop_rest()
        if self._lane is not None:
            await self._lane.close()
        await server.close(1.0)
        await self._close()

    def _is_busy(self) -> bool:
        return any(len(pool.dispatcher) for pool in self._pools.with_leaving())

    def _stop_rest(self) -> None:
        """End the exchanges that are still under way with an error."""
        message = "this gateway is shutting down and could not wait any longer for the answer"
        for pool in self._pools.with_leaving():
            for exchange in sorted(pool.dispatcher.exchanges(), key=attrgetter("phase")):  # what waits is not sent
                exchange.stop(ApiError(Reason.DRAINING, message, retry_after_s=1.0))

    async def _close(self) -> None:
        """Close all parts. Parts that other parts use are closed last."""
        await self._background.stop()
        for each in (self._self_service, self._learned, self._pools, self._session):
            if each is not None:
                await each.close()
        if self._admin is not None:
            await self._admin.cleanup()
        if self.store is not None:
            await asyncio.gather(*(rounds.leave() for rounds in self.sync_rounds))
            await self.store.close()
        if self.usage is not None:
            await self.usage.close()
        if self.spans is not None:
            await asyncio.to_thread(self.spans.close)
        await asyncio.to_thread(self._access_log.close)
