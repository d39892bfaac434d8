"""All pools: those of the config, and those that left it and still end their requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import aiohttp

from backends.simulated.engine_profiles import profile
from backends.simulated.simulated_server import SimulatedServer
from gateway.config.model import Config, PoolConfig
from gateway.config.sections.backends import BackendConfig
from gateway.pool.backend import Backend, connection_key
from gateway.pool.engine_addresses import Addresses, Resolver
from gateway.pool.pool import RETIRE_LOOK_S, Pool, PoolPlan, Settled, estimator_of
from gateway.pool.shared import CrossPoolState
from gateway.storage.store import PoolIdentity
from gateway.telemetry.background import OperationalError, Tasks
from policies.admission.engine import AdmissionEngine
from policies.admission.takeover import Weights

EMBEDDED_MODELS = ("simulated",)
EMBEDDED_PROFILE = "demo"


def pool_identities_of(config: Config) -> list[PoolIdentity]:
    """Return the facts of all pools on which replicas must agree."""
    policy = config.policy.name
    return [PoolIdentity(pool.name, policy, tuple(backend.url for backend in pool.backends)) for pool in config.pools]


class CannotTakeOver(OperationalError):
    """A resource that the configuration names is not available; the message says which and why."""


class Pools:
    """The table of pools.

    `prepare` opens the resources of a configuration and may fail. `commit` then applies the configuration and cannot
    fail.
    """

    def __init__(self, settled: Settled, resolver: Resolver, background: Tasks) -> None:
        """Create an empty table.

        Args:
            settled: called at the end of every request.
            resolver: looks up the names of backends with `each_address`.
            background: collects the faults of tasks.
        """
        self.all: list[Pool] = []
        """Pools of the config, in its order."""
        self.leaving: list[Pool] = []
        """Pools that left the config and still end their requests."""
        self.engines: dict[str, AdmissionEngine] = {}
        self.addresses = Addresses(resolver, background)
        self._settled = settled
        self._background = Tasks(background)
        self._session: aiohttp.ClientSession | None = None

    def with_leaving(self) -> list[Pool]:
        """Return all pools that may have requests under way: those of the config, and those that left it."""
        return [*self.all, *self.leaving]

    async def prepare(self, config: Config) -> list[PoolPlan]:
        """Find or create the resources of this configuration. Raise CannotTakeOver without any change."""
        await self.addresses.learn(config)
        known = {pool.name: pool for pool in self.all}
        prepared: list[PoolPlan] = []
        try:
            for each in config.pools:
                pool = known.get(each.name)
                way = each.bytes_per_token, each.tokenizer
                if pool is not None and (pool.config.bytes_per_token, pool.config.tokenizer) == way:
                    one = PoolPlan(each, pool, pool.estimator)
                else:
                    one = PoolPlan(each, pool, await asyncio.to_thread(estimator_of, each))
                prepared.append(one)
                for backend in self.addresses.engines(each):
                    made = await self._backend(backend, each, config, {} if pool is None else pool.backends)
                    one.backends[made] = backend
        except (OSError, ValueError) as error:
            await self.discard(prepared)
            raise CannotTakeOver(str(error)) from error
        session = self._session
        if session is not None:
            try:
                fresh = [backend for one in prepared for backend in one.fresh()]
                await asyncio.gather(*[backend.check(backend.control_client(session)) for backend in fresh])
            except asyncio.CancelledError:
                await self.discard(prepared)
                raise
        return prepared

    async def discard(self, prepared: Sequence[PoolPlan]) -> None:
        """Discard prepared pools; close their new backends."""
        for backend in [backend for one in prepared for backend in one.fresh()]:
            await backend.close()

    def commit(
        self, config: Config, shared: CrossPoolState, prepared: Sequence[PoolPlan], weights: Weights | None = None
    ) -> None:
        """Apply the configuration with its prepared resources. `weights`: the changed weights of tenants."""
        before, self.all = self.all, []
        for one in prepared:
            pool = one.pool
            if pool is None:
                pool = Pool(one, config, shared, self._settled, self._background)
                if self._session is not None:
                    pool.watch(self._session)
            else:
                pool.take_over(one, config, shared, weights)
            self.all.append(pool)
        self.addresses.follow(config)
        self.engines.clear()
        self.engines.update({pool.name: pool.dispatcher.engine for pool in self.all})
        for pool in before:
            if pool not in self.all:
                self.leaving.append(pool)
                self._background.start(self._retire(pool))

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Probe every backend once before this call returns, and from then on repeatedly."""
        self._session = session
        await asyncio.gather(*[pool.check(session) for pool in self.all])
        for pool in self.all:
            pool.watch(session)

    async def close(self) -> None:
        """Close all pools after their requests have ended."""
        await self.addresses.close()
        await self._background.stop()
        for pool in self.with_leaving():
            await pool.close()

    async def _retire(self, pool: Pool) -> None:
        """Wait for a leaving pool's requests, then close it. A pool configured later under its name is separate."""
        while len(pool.dispatcher):  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(RETIRE_LOOK_S)
        self.leaving.remove(pool)
        await pool.close()

    async def _backend(
        self, config: BackendConfig, pool: PoolConfig, gateway: Config, known: Mapping[str, Backend]
    ) -> Backend:
        """Return the known backend if its connection settings are unchanged, otherwise a new one."""
        backend = known.get(config.name)
        if backend is not None and not backend.leaving and backend.connection_key == connection_key(config, gateway):
            return backend
        if not config.simulated:
            return Backend(config, config.url.rstrip("/"), gateway)
        server = SimulatedServer(profile(EMBEDDED_PROFILE), model_names=tuple(pool.models) or EMBEDDED_MODELS)
        return Backend(config, f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}", gateway, server)
