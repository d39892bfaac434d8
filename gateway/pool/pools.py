"""Which pools are there? The pools of the config, and the pools that left it and still end their requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import aiohttp

from backends.name_resolution import Resolver
from backends.simulated.engine_profiles import profile
from backends.simulated.simulated_server import SimulatedServer
from gateway.config.model import Config, PoolConfig
from gateway.config.sections.backends import BackendConfig
from gateway.pool.backend import Backend, terms_of
from gateway.pool.engine_addresses import Addresses
from gateway.pool.pool import RETIRE_LOOK_S, Pool, estimator_of
from gateway.pool.shared import Shared
from gateway.request.estimate import TokenEstimator
from gateway.storage.store import Deployment
from gateway.telemetry.background import Background, OperationalError
from gateway.telemetry.record import RequestRecord
from policies.admission.engine import AdmissionEngine

EMBEDDED_MODELS = ("simulated",)
EMBEDDED_PROFILE = "demo"
NO_OTHERS: Mapping[str, float] = MappingProxyType({})


def deployments_of(config: Config) -> list[Deployment]:
    """Of all pools: what its replicas must agree on."""
    policy = config.policy.name
    return [Deployment(pool.name, policy, tuple(backend.url for backend in pool.backends)) for pool in config.pools]


class CannotTakeOver(OperationalError):
    """Something that the configuration names cannot be had: which, and why."""


class Prepared:
    """All that one pool of a configuration needs; it is not used yet."""

    def __init__(self, config: PoolConfig, pool: Pool | None, estimator: TokenEstimator | None) -> None:
        """`pool`: the one that goes on under this configuration. `estimator`: None if that of the pool will do."""
        self.config = config
        self.pool = pool
        self.backends: dict[Backend, BackendConfig] = {}
        """In the order of the configuration, each with what that says of it."""
        self.estimator = estimator

    def fresh(self) -> list[Backend]:
        """The backends that the pool does not have."""
        known = {} if self.pool is None else self.pool.backends
        return [backend for backend in self.backends if known.get(backend.name) is not backend]


class Pools:
    """`prepare` what a configuration needs, which may fail, then `commit` to it, which may not."""

    def __init__(
        self,
        settled: Callable[[RequestRecord, str], None],
        on_gone: Callable[[str, str], None],
        resolver: Resolver,
        background: Background,
    ) -> None:
        """`settled` is called at the end of every request, `on_gone` with pool and name of each backend that is gone.
        `background` collects faults. `resolver` looks up the names of backends that have `each_address`."""
        self.all: list[Pool] = []
        """Those of the config, in its order."""
        self.leaving: list[Pool] = []
        """Pools that are no longer configured and still end their requests."""
        self.engines: dict[str, AdmissionEngine] = {}
        """Of those of the config, by name."""
        self.addresses = Addresses(resolver, background)
        self._settled = settled
        self._on_gone = on_gone
        self._embedded: dict[str, SimulatedServer] = {}
        """Engines simulated in this process, by url."""
        self._background = Background(background)
        self._session: aiohttp.ClientSession | None = None

    def with_leaving(self) -> list[Pool]:
        """All that may have requests under way."""
        return [*self.all, *self.leaving]

    async def prepare(self, config: Config) -> list[Prepared]:
        """Find or make what the pools of this configuration need. Raises CannotTakeOver; then nothing has changed."""
        await self.addresses.learn(config)
        known = {pool.name: pool for pool in self.all}
        prepared: list[Prepared] = []
        try:
            for each in config.pools:
                pool = known.get(each.name)
                alike = pool is not None and _counting(pool.config) == _counting(each)
                one = Prepared(each, pool, None if alike else await asyncio.to_thread(estimator_of, each))
                prepared.append(one)
                for backend in self.addresses.engines(each):
                    made = await self._backend(backend, each, config, {} if pool is None else pool.backends)
                    one.backends[made] = backend
        except (OSError, ValueError) as error:
            await self.let_go(prepared)
            raise CannotTakeOver(str(error)) from error
        session = self._session
        if session is not None:
            try:
                await asyncio.gather(*[backend.check(session) for one in prepared for backend in one.fresh()])
            except asyncio.CancelledError:
                await self.let_go(prepared)
                raise
        return prepared

    async def let_go(self, prepared: Sequence[Prepared]) -> None:
        """It is not to be used after all."""
        for backend in [backend for one in prepared for backend in one.fresh()]:
            await backend.close()
            self._stop_embedded(backend)

    def commit(
        self, config: Config, shared: Shared, prepared: Sequence[Prepared], weights: Mapping[str, float] = NO_OTHERS
    ) -> None:
        """Go on under this configuration. `weights`: of the tenants that have another one than before."""
        before, self.all = self.all, []
        for one in prepared:
            pool = one.pool
            if pool is None:
                pool = Pool(one.config, config, one.backends, shared, self._settled, one.estimator, self._background)
                pool.on_gone = self._gone_from(pool)
                if self._session is not None:
                    pool.watch(self._session)
            else:
                pool.take_over(one.config, config, shared, one.backends, one.estimator)
                pool.reweigh(weights)
            self.all.append(pool)
        self.addresses.follow(config)
        self.engines.clear()
        self.engines.update({pool.name: pool.dispatcher.engine for pool in self.all})
        for pool in before:
            if pool not in self.all:
                self.leaving.append(pool)
                self._background.start(self._retire(pool))

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Ask every backend how it is: once before this returns, and from then on."""
        self._session = session
        await asyncio.gather(*[pool.check(session) for pool in self.all])
        for pool in self.all:
            pool.watch(session)

    async def close(self) -> None:
        """What is under way has ended."""
        await self.addresses.close()
        await self._background.stop()
        for pool in self.with_leaving():
            await pool.close()

    async def stop_embedded(self) -> None:
        """The last of all: whatever still waits for an answer of theirs gets none."""
        for server in self._embedded.values():
            await server.stop()

    async def _retire(self, pool: Pool) -> None:
        """Let what it has end. If a pool of its name is configured again meanwhile, that is another one."""
        while len(pool.dispatcher):  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(RETIRE_LOOK_S)
        self.leaving.remove(pool)
        await pool.close()
        for backend in pool.backends.values():
            self._stop_embedded(backend)
            if pool.name not in self.engines:
                self._on_gone(pool.name, backend.name)

    def _gone_from(self, pool: Pool) -> Callable[[Backend], None]:
        def gone(backend: Backend) -> None:
            self._stop_embedded(backend)
            if backend.name not in pool.backends:
                self._on_gone(pool.name, backend.name)

        return gone

    def _stop_embedded(self, backend: Backend) -> None:
        server = self._embedded.pop(backend.url, None)
        if server is not None:
            self._background.start(server.stop())

    async def _backend(
        self, config: BackendConfig, pool: PoolConfig, gateway: Config, known: Mapping[str, Backend]
    ) -> Backend:
        """The one that is there, if it is spoken to on the same terms, and else a new one."""
        backend = known.get(config.name)
        if backend is not None and not backend.leaving and backend.terms == terms_of(config, gateway):
            return backend
        if not config.simulated:
            return Backend(config, config.url.rstrip("/"), gateway)
        server = SimulatedServer(profile(EMBEDDED_PROFILE), model_names=tuple(pool.models) or EMBEDDED_MODELS)
        url = f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}"
        self._embedded[url] = server
        return Backend(config, url, gateway)


def _counting(pool: PoolConfig) -> tuple[float | None, str | None]:
    """How are the tokens of a prompt counted before the engine has?"""
    return pool.bytes_per_token, pool.tokenizer
