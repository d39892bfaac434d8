"""The hub: a process beside the workers of one gateway, with their sync rounds and the admin listener.

The hub starts before the workers and ends after them. If the hub dies, workers go on as replicas do without their
Redis, each with the average of its recent grants, until the hub is back.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from math import ceil
from typing import Final

from aiohttp import web

from gateway.config.model import Config
from gateway.operator.admin_listener import admin_runner
from gateway.operator.of_workers import WorkersClient, workers_app
from gateway.process.supervisor import Child, reloaded
from gateway.storage.hub.exchange_server import ExchangeServer
from gateway.storage.store_errors import StoreError
from gateway.telemetry.background import Tasks
from policies.limits.quotas import WINDOWS
from policies.limits.sliding_counts import NOTHING
from policies.replicas.messages import CountDelta

logger = logging.getLogger("fairgate")

LINGER_S: Final = 15.0
"""Wait beyond the time to drain, for workers whose supervisor has died."""
USAGE_S: Final = 2.0
"""Wait of a restarted hub for today's stored usage, which workers report as well."""
RETRY_S: Final = 1.0


async def serve_hub(config: Config, load: Callable[[], Config] | None, child: Child) -> None:
    """Run the hub process: sync rounds for the workers, and the admin listener.

    After the supervisor's death, wait for the workers for at most `drain_s + LINGER_S`, then exit the process.

    `load`: reads the config again.
    """
    run_directory = child.worker_slot.run_directory
    loop = asyncio.get_running_loop()
    supervisor = os.getppid()
    orphaned = asyncio.Event()
    loop.add_reader(child.liveness_pipe, orphaned.set)
    loop.add_signal_handler(signal.SIGTERM, lambda: None)  # the hub ends after the workers
    server = ExchangeServer(run_directory)
    exchange, admin = child.listeners
    continuing = Tasks().start(continue_quotas(config, server, is_first=child.lives == 1))
    await asyncio.wait({continuing}, timeout=USAGE_S)
    await server.listen(exchange)
    workers = WorkersClient(config, [run_directory.worker(index) for index in range(run_directory.workers)])

    def reload() -> None:
        workers.config = reloaded(workers.config, load)

    loop.add_signal_handler(signal.SIGHUP, lambda: loop.run_in_executor(None, reload))
    async with AsyncExitStack() as stack:
        await workers.open(stack)
        runner = admin_runner(workers_app(workers, lambda: os.kill(supervisor, signal.SIGHUP)))
        await runner.setup()
        await web.SockSite(runner, admin).start()
        await orphaned.wait()
        loop.remove_reader(child.liveness_pipe)
        until_s = loop.time() + config.drain_s + LINGER_S
        while server.connections and loop.time() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        continuing.cancel()
        run_directory.end()
        os._exit(0)  # no need to wait for open pages


async def continue_quotas(config: Config, server: ExchangeServer, *, is_first: bool) -> None:
    """Continue the quotas of a day and a month from stored usage.

    After a restart of the hub the workers report the totals as well, so a database fault is not retried.
    """
    if config.usage is None or config.state.redis_url is not None:
        return
    from gateway.pool.shared import quotas_of
    from gateway.usage.thread import CLOSE_S, DatabaseThread
    from gateway.usage.written import used_before

    quotas = quotas_of(config)
    database = DatabaseThread(config.usage)
    try:
        while True:
            try:
                found = await used_before(database, quotas, time.time())
                break
            except StoreError as error:
                if not is_first:
                    return
                logger.debug("stored usage cannot be read yet: %s", error)
            await asyncio.sleep(RETRY_S)
    finally:
        await database.close(CLOSE_S)
    quotas.at(time.time() - quotas.day.epoch_s)
    server.count([
        CountDelta(
            f"{name}:{member}", bucket, ceil(2 * quotas.windows[window].window.longest_s), amounts, NOTHING, bucket
        )
        for window, member, bucket, amounts in quotas.of_past(found)
        for name in [[*WINDOWS][window]]
    ])  # fmt: skip
