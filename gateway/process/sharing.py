"""What does a gateway share with the others in front of the same engines? Its store, and what it reports there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gateway.config.model import Config
from gateway.operator.operated import OperatedGateway
from gateway.operator.snapshots.of_replicas import Replicas
from gateway.pool.learned import LearnedSync
from gateway.pool.pools import pool_identities_of
from gateway.pool.replication.prefix_broadcast import PrefixBroadcast
from gateway.pool.replication.ticker import SyncRounds
from gateway.telemetry.background import Tasks

if TYPE_CHECKING:
    from gateway.keys.issued import KeyTable
    from gateway.keys.stored_responses import StoredResponses
    from gateway.storage.hub.run_directory import WorkerSlot
    from gateway.storage.store import Store


def store_of(config: Config, worker_slot: WorkerSlot | None) -> tuple[Store | None, KeyTable | None]:
    """Return the store that the gateway shares with others, and the table of keys in it; None without them."""
    identities = pool_identities_of(config)
    if (url := config.state.redis_url) is not None:
        from gateway.keys.in_redis import RedisKeys  # redis-py is loaded only with a Redis
        from gateway.storage.redis.redis_store import RedisStore

        redis = RedisStore(url, identities)
        return redis, RedisKeys(redis)
    if worker_slot is not None:
        from gateway.storage.hub.hub_store import HubStore

        return HubStore(worker_slot.run_directory, identities), None
    return None, None


def replicate(
    gateway: OperatedGateway, responses: StoredResponses, store: Store, background: Tasks, slot: WorkerSlot | None
) -> tuple[Sequence[SyncRounds], Replicas]:
    """Start the sync rounds, the prefix broadcasts and the answers to questions of other gateways, and return them."""
    config, shared, pools = gateway.config, gateway.shared, gateway.pools
    dispatchers = [pool.dispatcher for pool in pools]
    rounds = [SyncRounds.of_pool(store, pool.name, pool.dispatcher) for pool in pools]
    if shared.quotas is not None or shared.interactions is not None:
        rounds.append(
            SyncRounds.of_tenants(
                store, shared.quotas, shared.interactions, dispatchers,
                refuses_alone=config.state.limits_without_redis == "refuse",
                workers=1 if slot is None else slot.run_directory.workers,
            )
        )  # fmt: skip
    replicas = Replicas(gateway, store, background, "" if slot is None else f"worker {slot.index}")
    background.repeat(replicas.listen, "fleet")
    background.repeat(responses.report, "responses sent")
    background.repeat(responses.listen, "responses received")
    for each in rounds:
        background.repeat(each.run_once, "exchange", each.about)
    for pool in pools:
        background.repeat(LearnedSync(store, pool.name, pool.dispatcher.engine).sync_once, "lessons", pool.name)
        if pool.dispatcher.engine.policy.prefixes is not None:
            broadcast = PrefixBroadcast(store, pool.name, pool.dispatcher)
            background.repeat(broadcast.report, "news sent", pool.name)
            background.repeat(broadcast.listen, "news received", pool.name)
    return rounds, replicas
