"""The store of replicas in one Redis, Valkey or Redis Cluster, used by scripts alone."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from prometheus_client.metrics_core import Metric
from redis.exceptions import ResponseError

from gateway.storage.redis.redis_connection import Argument, RedisConnection
from gateway.storage.store import PoolIdentity
from gateway.storage.store_errors import StoreError, StoreRefused, StoreUnavailable
from gateway.telemetry.metric_families import family, single

logger = logging.getLogger("fairgate")

LAYOUT = 4
"""Version of the layout of the keys. Replicas of another version use other keys, which separates the two."""
VERSION_MIN = (6, 2)
MEMBER_S = 30.0
"""Membership of a replica after its last report."""
RENEW_S = 10.0
RETRY_S = 1.0
LEARNED_KEPT_S = 7 * 86_400


class Script:
    """A script that Redis runs as one step: a file of this package."""

    def __init__(self, file: str) -> None:
        self.source = (Path(__file__).parent / file).read_text(encoding="utf-8")
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


def _tag(pool: str) -> str:
    return "{" + pool.replace("%", "%25").replace("{", "%7B").replace("}", "%7D") + "}"


def pool_key(pool: str, name: str) -> str:
    """Return a pool's key. All keys of one pool are in one slot of a Cluster."""
    return f"fairgate:{LAYOUT}:{_tag(pool)}:{name}"


def without_password(url: str) -> str:
    """Return the URL without its password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


_JOIN = Script("join.lua")
_EXCHANGE = Script("exchange.lua")


class RedisStore:
    """A `Store`, and further requests to Redis: `run` and `command`."""

    def __init__(self, url: str, pools: Sequence[PoolIdentity] = ()) -> None:
        self.replica = secrets.token_hex(8)
        """Unique name of this process among the replicas."""
        self.epoch_s = time.time() - time.monotonic()
        """Seconds by which Redis's clock is ahead of this process's monotonic clock, measured by `open`."""
        self._url = url
        self._where = without_password(url)
        self.pools = pools
        """Pools of this gateway; the next renewal reports a new value."""
        self._connections: dict[str, RedisConnection] = {}
        """Connections by tag. Tags are as many as pools and kinds of keys."""
        self._of_news: dict[str, RedisConnection] = {}
        """Connections for messages, by pool. Losing them is no fault of the shared state."""
        self._commands: set[asyncio.Task[Any]] = set()
        self._not_open: str | None = f"{self._where}: not asked yet"
        self._logged_fault: str | None = None

    @property
    def fault(self) -> str | None:
        """Return why nothing is shared at present, or None."""
        return self._not_open or next((one.fault for one in list(self._connections.values()) if one.fault), None)

    def collect(self) -> Iterator[Metric]:
        yield single("fairgate_state_shared", self.fault is None)
        connections = list(self._connections.values())
        commands = {outcome: sum(getattr(one, outcome) for one in connections) for outcome in ("answered", "failed")}
        yield family("fairgate_redis_commands_total", [([outcome], count) for outcome, count in commands.items()])

    async def open(self) -> None:
        """Check that this Redis may be used, and join it. Raise StoreRefused or StoreUnavailable."""
        try:
            await self._check_server()
            await self._join_all()
        except StoreError as error:
            self._not_open = str(error)
            raise
        self._not_open = None

    async def run_once(self) -> None:
        self._log_fault()
        await asyncio.sleep(RENEW_S if self.fault is None else RETRY_S)
        try:
            if self._not_open is not None:
                await self.open()
            else:
                await self._join_all()
        except StoreUnavailable:
            pass  # `fault` reports it
        except StoreRefused as error:
            self._not_open = str(error)

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument] = ()) -> Any:
        """Run a script and return its answer. All keys have the tag of the first. Raise StoreUnavailable; never send
        twice."""
        return await self._passing(lambda: self._run(script, keys, args))

    async def command(self, name: str, key: str, *args: Argument) -> Any:
        """Run one command on one key and return its answer. Raise StoreUnavailable."""
        return await self._passing(lambda: self._shielded(self._connection(key).ask(name, key, *args)))

    def shaped(self, kind: Any, answer: object) -> Any:
        """Convert an answer to a type; digits become a number. Raise StoreUnavailable for an answer that Redis would
        not give."""
        try:
            return msgspec.convert(answer, kind, strict=False)
        except msgspec.ValidationError as error:
            raise StoreUnavailable(f"{self._where}: answers what makes no sense here ({error})") from error

    # --- as a `Store` ---

    async def exchange(self, about: str, number: int, report: bytes) -> bytes:
        keys = (pool_key(about, "replicas"), pool_key(about, ""))
        reply: bytes = self.shaped(bytes, await self.run(_EXCHANGE, keys, (self.replica, number, report)))
        return reply

    async def leave(self, about: str) -> None:
        """Delete this replica's report about a pool, so that its grants are free at once."""
        await self.command("HDEL", pool_key(about, "replicas"), self.replica)

    async def learned_state(self, pool: str) -> bytes | None:
        found: bytes | None = self.shaped(bytes | None, await self.command("GET", pool_key(pool, "learned")))
        return found

    async def learn(self, pool: str, content: bytes) -> None:
        await self.command("SET", pool_key(pool, "learned"), content, "EX", LEARNED_KEPT_S)

    async def publish(self, pool: str, content: bytes) -> int:
        connection = self._of(self._of_news, pool)
        receivers: int = self.shaped(int, await connection.ask("PUBLISH", _channel(pool, connection), content))
        return receivers

    async def subscribe(self, pool: str, received: Callable[[bytes], None]) -> None:
        connection = self._of(self._of_news, pool)
        await connection.subscribe(_channel(pool, connection), received)

    async def close(self) -> None:
        """Leave, so that others need not wait for this replica's expiry, and disconnect."""
        leaving = [self.command("HDEL", _join_keys(pool)[1], self.replica) for pool in self.pools]
        await asyncio.gather(*leaving, return_exceptions=True)  # otherwise membership expires
        await asyncio.gather(*self._commands, return_exceptions=True)
        for connection in (*self._connections.values(), *self._of_news.values()):
            await connection.close()

    # --- joining ---

    async def _check_server(self) -> None:
        connection = self._connection(_join_keys(self.pools[0])[0] if self.pools else "")
        connection.check_files()
        try:
            info = self.shaped(bytes, await self._shielded(connection.ask("INFO", "server"))).decode("utf-8", "replace")
        except StoreUnavailable as error:
            # A server that answers with an error speaks the protocol; a silent one may expect another.
            mismatch = None if isinstance(error.__cause__, ResponseError) else await connection.tls_mismatch()
            if mismatch is None:
                raise
            raise StoreRefused(f"{self._where}: {mismatch}") from error
        found = re.search(r"^redis_version:(\d+)\.(\d+)", info, re.M)
        if found is None:
            raise StoreRefused(f"{self._where}: does not say which version of Redis it is; is it the right port?")
        if (int(found[1]), int(found[2])) < VERSION_MIN:
            needed = f"{'.'.join(map(str, VERSION_MIN))} or later is needed, or any Valkey"
            raise StoreRefused(f"{self._where}: is Redis {found[1]}.{found[2]}; {needed}")
        moment = self.shaped(tuple[bytes, bytes], await self._shielded(connection.ask("TIME")))
        seconds, microseconds = self.shaped(tuple[int, int], [part.decode("latin-1") for part in moment])
        self.epoch_s = seconds + microseconds / 1e6 - time.monotonic()

    async def _join_all(self) -> None:
        await asyncio.gather(*map(self._join_pool, self.pools))

    async def _join_pool(self, pool: PoolIdentity) -> None:
        args: list[Argument] = [LAYOUT, self.replica, int(MEMBER_S * 1000), pool.policy, *pool.backends]
        answer, what = self.shaped(tuple[bytes, bytes | int | None], await self._run(_JOIN, _join_keys(pool), args))
        theirs = what.decode("utf-8", "replace") if isinstance(what, bytes) else ""
        if answer == b"layout":
            raise StoreRefused(
                f"{self._where}: pool {pool.pool} has keys of layout {theirs}, this gateway writes layout {LAYOUT}. "
                f"End the gateways of the other version, then delete the key {_join_keys(pool)[0]}, or give each "
                "version a database of its own"
            )
        if answer in (b"policy", b"backends"):
            have = (
                f"with policy {theirs}, and this gateway has {pool.policy}"
                if answer == b"policy"
                else f"by other backends ({theirs}), of which this gateway has none"
            )
            raise StoreRefused(
                f"{self._where}: pool {pool.pool} is served {have}. If that is another deployment, give it a database "
                f"of its own. If it is this one: its backends are changed in steps that keep one, its policy once all "
                f"its replicas have ended; they are forgotten {MEMBER_S:g} s after they were last heard of"
            )

    # --- asking ---

    def _connection(self, key: str) -> RedisConnection:
        found = re.search(r"\{([^}]+)\}", key)
        return self._of(self._connections, found[1] if found is not None else key)

    def _of(self, connections: dict[str, RedisConnection], name: str) -> RedisConnection:
        if name not in connections:
            connections[name] = RedisConnection(self._url, self._where)
        return connections[name]

    async def _run(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        rest = (len(keys), *keys, *args)
        ask = self._connection(keys[0]).ask("EVALSHA", script.sha, *rest, otherwise=("EVAL", script.source, *rest))
        return await self._shielded(ask)

    async def _shielded(self, ask: Coroutine[Any, Any, Any]) -> Any:
        """Run in a task of the store, so that a cancelled caller leaves no half-finished command on the connection."""
        task = asyncio.get_running_loop().create_task(ask)
        self._commands.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._commands.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may be gone

    async def _passing(self, ask: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Ask if the store is open, and return the answer. Raise StoreUnavailable, also for a refusal."""
        if self._not_open is not None:
            raise StoreUnavailable(self._not_open)
        try:
            return await ask()
        except StoreRefused as error:
            raise StoreUnavailable(str(error)) from error
        finally:
            self._log_fault()

    def _log_fault(self) -> None:
        """Log when sharing ends and begins."""
        fault = self.fault
        if (fault is None) == (self._logged_fault is None):
            return
        self._logged_fault = fault
        if fault is None:
            logger.info("state is shared: %s", self._where)
        else:
            logger.warning("state is not shared, this replica goes on with what it knows: %s", fault)


def _join_keys(pool: PoolIdentity) -> tuple[str, str]:
    return f"fairgate:{_tag(pool.pool)}:layout", pool_key(pool.pool, "members")


def _channel(pool: str, connection: RedisConnection) -> str:
    """Return a channel's name with the database, since channels are common to all databases of a server."""
    return pool_key(pool, f"news:{connection.database}")
