"""Redis at the edge: which one is refused and why, and what a command may meet. Every server is a real one."""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

import pytest

from gateway.keys.stored_responses import StoredResponses
from gateway.pool.dispatcher import Dispatcher
from gateway.pool.replication.prefix_broadcast import PrefixBroadcast
from gateway.storage.redis.redis_store import LAYOUT, RedisStore, Script, pool_key
from gateway.storage.store import PoolIdentity
from gateway.storage.store_errors import StoreRefused, StoreUnavailable
from gateway.telemetry.background import Tasks
from tests.gateway.live import WAIT_S, until
from tests.kit.standing_still import stood_still
from tests.kit.stores import POOL, opened, scripted, url
from tests.policies.making import pool_of
from tests.ports import free_port
from tests.redis_server import Proxy, RedisServer
from tests.waiting import eventually

KEY = pool_key("pool", "counter")
ACL = "~fairgate:* &fairgate:* +info +eval +evalsha +@read +@write +time +publish +subscribe"
"""What the manual says that a user needs."""


class _Text(Script):
    """A script that a test writes."""

    def __init__(self, source: str) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".lua") as file:
            file.write(source)
            file.flush()
            super().__init__(file.name)


ECHO = _Text("return ARGV[1]")
COUNT = _Text("return redis.call('INCR', KEYS[1])")


async def refused(url: str, pool: PoolIdentity = POOL) -> str:
    """Why this Redis may not be used."""
    store = RedisStore(url, (pool,))
    try:
        with pytest.raises(StoreRefused) as caught:
            await store.open()
        assert store.fault == str(caught.value)
        with pytest.raises(StoreUnavailable):
            await store.run(ECHO, [KEY], ["x"])
    finally:
        await store.close()
    return str(caught.value)


# --- opening ---


@pytest.mark.parametrize("options", [{}, {"requirepass": "secret"}, {"tls": True}, {"cluster": True}], ids=str)
async def test_it_opens_and_runs_scripts(options: dict[str, Any]) -> None:
    async with RedisServer(**options) as redis, opened(redis.url) as store:
        assert store.fault is None
        assert [await store.run(COUNT, [KEY]) for _ in range(3)] == [1, 2, 3]
        await redis.command("SCRIPT", "FLUSH")
        assert await store.run(COUNT, [KEY]) == 4  # sent again whole where it is not known
        assert await store.command("GET", KEY) == b"4"


async def test_a_user_that_may_not_listen_is_told_of_once_and_nothing_fails(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.storage.store.RETRY_S", 0.0)
    async with RedisServer() as redis:
        await redis.command("ACL", "SETUSER", "gate", "on", ">pw", *ACL.replace(" +subscribe", "").split())
        async with opened(url(redis, "gate:pw@")) as store:
            broadcast = PrefixBroadcast(store, "pool", Dispatcher(pool_of("b")))
            responses = StoredResponses(10, store)
            for each in (broadcast, broadcast, responses):
                await each.listen()
    [warning] = [one.getMessage() for one in caplog.records if "cannot tell each other" in one.getMessage()]
    assert "its user needs" in warning


async def test_a_socket_in_the_file_system_and_a_user_with_few_rights_will_do() -> None:
    async with RedisServer() as redis:
        async with opened(f"unix://{redis.directory}/socket?db=1") as store:
            assert await store.run(COUNT, [KEY]) == 1
        await redis.command("ACL", "SETUSER", "gate", "on", ">pw", *ACL.split())
        async with opened(url(redis, "gate:pw@")) as store:
            assert await store.run(COUNT, [KEY]) == 1  # of another database


async def test_a_wrong_password_or_too_few_rights_are_refused_and_not_repeated() -> None:
    async with RedisServer(requirepass="secret") as redis:
        where = f"redis://127.0.0.1:{redis.port}/0: "
        assert (await refused(url(redis))).startswith(where + "answers NOAUTH")
        said = await refused(url(redis, ":hunter2@"))
        assert said.startswith(where + "answers WRONGPASS")
        assert "redis://USER:${REDIS_PASSWORD}@HOST:PORT" in said
        assert "hunter2" not in said
        await redis.command("ACL", "SETUSER", "gate", "on", ">pw", "~fairgate:*", "+info", "+get")
        said = await refused(url(redis, "gate:pw@"))
        assert said.startswith(where + "answers NOPERM")
        assert ACL in said
        await redis.command("ACL", "SETUSER", "gate", "+eval", "+evalsha", "-hset")
        assert ACL in await refused(url(redis, "gate:pw@"))


async def test_tls_must_be_spoken_by_both_or_neither() -> None:
    async with RedisServer(tls=True) as redis, RedisServer() as plain:
        assert "its certificate is not trusted: self-signed" in await refused(url(redis, scheme="rediss"))
        assert "expects TLS; write rediss://" in await refused(url(redis))
        assert "does not speak TLS; write redis://" in await refused(url(plain, scheme="rediss"))
        missing = await refused(url(redis, scheme="rediss") + "?ssl_ca_certs=/nowhere/ca.pem")
        assert "cannot use the files of its url (/nowhere/ca.pem): [Errno 2] No such file" in missing


async def test_a_replica_and_what_is_no_redis_are_refused() -> None:
    async with RedisServer() as primary, RedisServer(replicaof=f"127.0.0.1 {primary.port}") as redis:
        assert "READONLY" in await refused(redis.url)
        assert "DB index is out of range" in await refused(f"redis://127.0.0.1:{primary.port}/99")

    async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(web, "127.0.0.1", 0)
    said = await refused(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert "answers something that is not Redis's protocol; is it the right port?" in said
    server.close()


async def test_an_old_redis_is_refused() -> None:
    for version, message in (
        ("5.0.14", "is Redis 5.0; 6.2 or later is needed, or any Valkey"),
        ("6.0.20", "is Redis 6.0; 6.2 or later"),
        ("", "does not say which version"),
    ):
        async with scripted(version) as where:
            assert message in await refused(where)


async def test_a_redis_that_is_away_or_full_or_a_cluster_that_is_not_whole_passes() -> None:
    async with (
        RedisServer(maxmemory=1, maxmemory_policy="noeviction") as full,
        RedisServer(cluster=True, slots=(0, 0)) as part,
    ):
        for where, why in (
            (f"redis://127.0.0.1:{free_port()}/0", "Connection refused"),
            ("unix:///nowhere/redis.sock", "No such file"),
            (full.url, "OOM"),
            (part.url, "CLUSTERDOWN"),
        ):
            with pytest.raises(StoreUnavailable, match=why):
                async with opened(where):
                    pass


# --- deployments ---


async def test_replicas_of_one_deployment_agree_on_a_backend_and_the_policy() -> None:
    async with RedisServer() as redis, opened(redis.url) as first:
        moved = PoolIdentity("pool", "fairserve", ("http://b:1", "http://c:1"))
        async with opened(redis.url, moved), opened(redis.url, PoolIdentity("pool", "fairserve", ("http://c:1",))):
            pass  # backends are changed in steps
        said = await refused(redis.url, PoolIdentity("pool", "fairserve", ("http://c:1",)))
        assert "pool pool is served by other backends (http://a:1 http://b:1)" in said
        said = await refused(redis.url, PoolIdentity("pool", "vtc", POOL.backends))
        assert "is served with policy fairserve, and this gateway has vtc" in said
        async with opened(redis.url, PoolIdentity("other", "vtc", ("http://x:1",))):
            pass  # pools are apart
        await first.close()
        async with opened(redis.url, PoolIdentity("pool", "vtc", ("http://x:1",))):
            pass  # nobody is left to disagree


async def test_a_replica_that_is_gone_is_forgotten() -> None:
    async with RedisServer() as redis, opened(redis.url):
        members = pool_key("pool", "members")
        [(replica, member)] = (await _hash(redis, members)).items()
        late = member.replace(b'"expires_ms":1', b'"expires_ms":0.1')
        await redis.command("HSET", members, replica, late, "corrupt", "{", "alien", '{"expires_ms": 9e15}')
        async with opened(redis.url, PoolIdentity("pool", "vtc", ("http://x:1",))) as store:
            assert list(await _hash(redis, members)) == [store.replica.encode()]


async def _hash(redis: RedisServer, key: str) -> dict[bytes, bytes]:
    async with redis.client() as client:
        found: dict[bytes, bytes] = await client.hgetall(key)
        return found


async def test_keys_of_another_layout_are_refused() -> None:
    async with RedisServer() as redis:
        async with opened(redis.url):
            assert await redis.command("GET", "fairgate:{pool}:layout") == str(LAYOUT).encode()
        await redis.command("SET", "fairgate:{pool}:layout", LAYOUT + 1)
        said = await refused(redis.url)
        assert f"pool pool has keys of layout {LAYOUT + 1}, this gateway writes layout {LAYOUT}" in said
        assert "delete the key fairgate:{pool}:layout" in said
        await redis.command("DEL", "fairgate:{pool}:layout")
        await redis.command("LPUSH", "fairgate:{pool}:layout", "x")
        assert "something else has written keys that begin with fairgate:" in await refused(redis.url)


def test_any_name_of_a_pool_has_one_tag_of_its_own() -> None:
    assert pool_key("pool", "x") == "fairgate:4:{pool}:x"
    assert pool_key("}a{b%7D", "x") == "fairgate:4:{%7Da%7Bb%257D}:x"


# --- commands ---


async def test_a_command_that_is_not_answered_fails_and_its_answer_is_never_taken_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.storage.redis.redis_connection.DEADLINE_S", 0.05)
    async with RedisServer() as redis, opened(redis.url) as store:
        assert await store.run(ECHO, [KEY], ["before"]) == b"before"
        redis.pause()
        with pytest.raises(StoreUnavailable, match=r"no answer within 0\.05 s"):
            await store.run(ECHO, [KEY], ["lost"])
        assert store.fault is not None
        redis.resume()
        assert await answered(store, "after") == b"after"
        assert store.fault is None


async def test_an_answer_that_came_while_this_process_stood_still_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.storage.redis.redis_connection.CONNECT_S", 0.2)
    monkeypatch.setattr("gateway.storage.redis.redis_connection.DEADLINE_S", 0.2)
    async with RedisServer() as redis, opened(redis.url) as store:
        assert await stood_still(store.run(ECHO, [KEY], ["x"]), 0.3) == b"x"
        other = pool_key("other", "counter")
        assert (
            await stood_still(store.run(ECHO, [other], ["on a new connection"]), 0.3, steps=3) == b"on a new connection"
        )


async def answered(store: RedisStore, word: str) -> Any:
    """What comes once Redis is back."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await store.run(ECHO, [KEY], [word])
            except StoreUnavailable:
                await asyncio.sleep(0.01)


async def test_after_a_failure_nothing_is_tried_for_a_while() -> None:
    async with RedisServer() as redis, Proxy(redis.port) as proxy:
        async with opened(f"redis://127.0.0.1:{proxy.port}") as store:
            proxy.to_port = free_port()
            proxy.cut()
            accepted = proxy.accepted
            for _ in range(100):
                with pytest.raises(StoreUnavailable):
                    await store.run(ECHO, [KEY], ["x"])
            assert proxy.accepted <= accepted + 2
            proxy.to_port = redis.port
            assert await answered(store, "x") == b"x"


async def test_a_caller_that_gives_up_leaves_the_connection_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.storage.redis.redis_connection.DEADLINE_S", 5)
    async with RedisServer() as redis, Proxy(redis.port) as proxy:
        async with opened(f"redis://127.0.0.1:{proxy.port}") as store:
            proxy.delay_s = 0.05
            accepted = proxy.accepted
            for count in range(5):
                sent = proxy.requests
                asking = asyncio.create_task(store.run(ECHO, [KEY], [f"given up {count}"]))
                await until(lambda sent=sent: proxy.requests > sent)
                asking.cancel()
            proxy.delay_s = 0.0
            assert await store.run(ECHO, [KEY], ["mine"]) == b"mine"
            assert proxy.accepted == accepted  # the connection that there was


async def test_a_connection_that_the_server_ended_while_idle_is_replaced_unnoticed() -> None:
    async with RedisServer() as redis, opened(redis.url) as store:
        async with redis.client() as client:
            await client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            while len(await client.client_list()) > 1:
                pass
        assert await store.run(ECHO, [KEY], ["x"]) == b"x"


async def test_what_redis_answers_instead_is_never_a_crash() -> None:
    async with RedisServer(maxmemory="100mb", maxmemory_policy="noeviction") as redis, opened(redis.url) as store:
        await redis.command("CONFIG", "SET", "maxmemory", 1)
        with pytest.raises(StoreUnavailable, match="OOM"):
            await store.run(COUNT, [KEY])
        await redis.command("CONFIG", "SET", "maxmemory", 0)
        assert await answered(store, "x") == b"x"
        await redis.command("SET", KEY, "not a number")
        with pytest.raises(StoreUnavailable, match="not an integer"):
            await store.run(COUNT, [KEY])
        assert await answered(store, "x") == b"x"
        async with RedisServer() as other:
            await redis.command("REPLICAOF", "127.0.0.1", other.port)
            async with redis.client() as client, asyncio.timeout(WAIT_S):
                while (await client.info("replication"))["master_link_status"] != "up":  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            with pytest.raises(StoreUnavailable, match="READONLY"):
                await store.run(COUNT, [KEY])
            await redis.command("REPLICAOF", "NO", "ONE")
        assert await answered(store, "x") == b"x"


@pytest.mark.parametrize("garbage", ["HTTP/1.1", "-MOVED x y", "-MOVED 1", ":abc", "$9\r\nab", "*-7", "-", "\0"])
async def test_an_answer_that_is_none_is_never_a_crash(garbage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.storage.redis.redis_connection.DEADLINE_S", 0.05)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            writer.write(garbage.encode() + b"\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    store = RedisStore(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", (POOL,))
    store._not_open = None  # it went mad later
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await store.run(ECHO, [KEY], ["x"])
    await store.close()
    server.close()


async def test_keys_are_followed_to_the_node_of_a_cluster_that_has_them() -> None:
    async with (
        RedisServer(cluster=True, slots=(0, 8191)) as low,
        RedisServer(cluster=True, slots=(8192, 16383)) as high,
    ):
        await low.meet(high)
        pools = [PoolIdentity(name, "vtc", ("http://a:1",)) for name in "abcdefgh"]
        for seed in (low, high):
            async with opened(seed.url, *pools) as store:
                for pool in pools:
                    assert await store.run(ECHO, [pool_key(pool.pool, "x")], [pool.pool]) == pool.pool.encode()
        assert {await low.command("DBSIZE"), await high.command("DBSIZE")} & {0} == set()


# --- staying ---


async def test_a_member_stays_one_and_one_that_is_no_longer_welcome_shares_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.storage.redis.redis_store.RENEW_S", 0.01)
    monkeypatch.setattr("gateway.storage.redis.redis_store.RETRY_S", 0.01)
    async with RedisServer() as redis, opened(redis.url) as store:
        keeping = Tasks().repeat(store.run_once, "store")
        await redis.command("FLUSHALL")
        async with redis.client() as client:
            await eventually(lambda: client.hexists(pool_key("pool", "members"), store.replica))
        await redis.command("SET", "fairgate:{pool}:layout", LAYOUT + 1)
        await until(lambda: store.fault is not None and "layout" in store.fault)
        with pytest.raises(StoreUnavailable, match="layout"):
            await store.run(COUNT, [KEY])
        await redis.command("DEL", "fairgate:{pool}:layout")
        await until(lambda: store.fault is None)
        keeping.cancel()
