"""The table of keys that every replica follows: its bound, its size, and what a keyring makes of it."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from gateway.config.model import TenantConfig
from gateway.config.sections.keys import KeyConfig, hash_key
from gateway.http.errors import ApiError
from gateway.keys.identity import Keyring
from gateway.keys.in_database import DatabaseKeys
from gateway.keys.in_redis import CHANGED, TABLE, RedisKeys
from gateway.keys.issued import Follower, KeyTable, TableFull, entry, read_entry
from gateway.telemetry.background import Background
from tests.gateway.live import until
from tests.kit.keys import database_at
from tests.kit.stores import opened
from tests.postgres_server import PostgresServer
from tests.redis_server import RedisServer

TENANTS = [TenantConfig.model_validate({"name": "alice", "keys": [hash_key("named")]}), TenantConfig(name="bob")]


def key_of(text: str, **terms: Any) -> KeyConfig:
    return KeyConfig.model_validate({"hash": hash_key(text), **terms})


def holder(keyring: Keyring, key: str) -> str | None:
    """Each from an address of its own: wrong keys are slowed by address."""
    try:
        return keyring.principal(key.encode(), key, 0.0).tenant
    except ApiError:
        return None


@pytest.fixture(params=["redis", "sqlite", "postgresql"])
async def table(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[KeyTable]:
    if request.param == "redis":
        async with RedisServer() as redis, opened(redis.url) as store:
            yield RedisKeys(store)
    elif request.param == "sqlite":
        async with database_at(str(tmp_path / "usage.db")) as database:
            yield DatabaseKeys(database)
    else:
        async with PostgresServer() as server, database_at(server.url) as database:
            yield DatabaseKeys(database)


async def test_the_table_takes_so_many_keys_and_no_more(table: KeyTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.keys.in_redis.KEYS_MAX", 3)
    monkeypatch.setattr("gateway.keys.in_database.KEYS_MAX", 3)
    assert await table.changed() is None
    for key in "abc":
        await table.issue(key_of(key), "alice")
    before = await table.changed()
    with pytest.raises(TableFull, match="holds 3 keys already"):
        await table.issue(key_of("d"), "alice")
    await table.revoke(hash_key("a"))  # is in it already
    assert await table.changed() not in (None, before)
    assert [await table.entry(hash_key(key)) for key in "abd"] == [b"", b'{"tenant":"alice"}', None]
    await table.forget(hash_key("b"))
    await table.issue(key_of("d"), "bob")
    assert {key async for key, _ in table.entries()} == {hash_key(key).encode() for key in "acd"}


async def test_entries_change_in_one_step_or_not_at_all(table: KeyTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.keys.in_redis.KEYS_MAX", 2)
    monkeypatch.setattr("gateway.keys.in_database.KEYS_MAX", 2)
    a, b, c = map(hash_key, "abc")
    await table.note({a: "x", b: "y"})
    with pytest.raises(TableFull):
        await table.note({c: "z", a: "changed"})
    assert [await table.entry(each) for each in (a, b, c)] == [b"x", b"y", None]
    await table.note({c: "z", a: None, b: ""})
    assert [await table.entry(each) for each in (a, b, c)] == [None, b"", b"z"]


async def test_a_keyring_follows_every_table(table: KeyTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.keys.issued.POLL_S", 0.01)
    monkeypatch.setattr("gateway.keys.in_database.PAGE", 2)
    keyring = Keyring(TENANTS, open_access=False, mints=False)
    following = Background().repeat(Follower(table, keyring).turn, "keys")
    for key in "abcde":
        await table.issue(key_of(key), "bob")
    await table.issue(key_of("new", weight=3.0, apps=["chat"], models=["m"]), "carol")
    await table.revoke(hash_key("named"))
    await until(lambda: holder(keyring, "named") is None)
    assert [holder(keyring, key) for key in "abcdef"] == ["bob"] * 5 + [None]
    carol = keyring.principal(b"new", "new", 0.0)
    assert (carol.tenant, carol.weight, carol.apps, carol.models) == ("carol", 3.0, ("chat",), frozenset({"m"}))
    await table.forget(hash_key("a"))
    await until(lambda: holder(keyring, "a") is None)
    following.cancel()


async def test_a_keyring_follows_a_large_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.keys.issued.POLL_S", 0.01)
    async with RedisServer() as redis:
        entries = {hash_key(str(number)): '{"tenant":"bob"}' for number in range(1000)}
        async with redis.client() as client:
            await client.hset(TABLE, mapping={**entries, CHANGED: "1"})
        keyring = Keyring(TENANTS, open_access=False, mints=False)
        async with opened(redis.url) as store:
            following = Background().repeat(Follower(RedisKeys(store), keyring).turn, "keys")
            await until(lambda: holder(keyring, "0") == "bob")
            assert all(holder(keyring, str(number)) == "bob" for number in range(1000))
            assert (holder(keyring, "1000"), holder(keyring, "named")) == (None, "alice")
            await RedisKeys(store).issue(key_of("1000"), "alice")
            await until(lambda: holder(keyring, "1000") == "alice")
            await RedisKeys(store).forget(hash_key("1000"))
            await until(lambda: holder(keyring, "1000") is None)
            following.cancel()


async def test_of_a_table_without_end_so_much_is_read_and_no_more(
    table: KeyTable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.keys.issued.POLL_S", 0.01)
    for module in ("keys.issued", "keys.in_redis", "keys.in_database"):
        monkeypatch.setattr(f"gateway.{module}.ENTRIES_READ_MAX", 30)
    monkeypatch.setattr("gateway.keys.in_database.PAGE", 20)
    monkeypatch.setattr("gateway.keys.in_redis.SCAN_COUNT", 20)
    alices = [f"alice{number}" for number in range(10)]
    named = TenantConfig.model_validate({"name": "alice", "keys": [hash_key(each) for each in [*alices, "stays"]]})
    others = 600 if isinstance(table, RedisKeys) else 60  # beyond what Redis keeps in one piece
    for number in range(others):
        await table.issue(key_of(str(number)), "bob")
    for each in alices:
        await table.revoke(hash_key(each))
    keyring = Keyring([named, TenantConfig(name="bob")], open_access=False, mints=False)
    following = Background().repeat(Follower(table, keyring).turn, "keys")
    await until(lambda: holder(keyring, alices[0]) is None)
    assert [holder(keyring, each) for each in [*alices, "stays"]] == [None] * 10 + ["alice"]
    assert 0 < [holder(keyring, str(number)) for number in range(others)].count("bob") <= 30
    await table.revoke(hash_key("stays"))  # it goes on following
    await until(lambda: holder(keyring, "stays") is None)
    assert caplog.text.count("is not read beyond 30 entries") == 1
    following.cancel()


def test_a_revoked_key_is_nobodys_wherever_it_is_from() -> None:
    def digest(key: str) -> bytes:
        return hashlib.sha256(key.encode()).digest()

    for open_access in (False, True):
        keyring = Keyring(TENANTS, open_access=open_access, mints=False)
        bob = keyring.holder("bob", key_of("issued"))
        assert bob is not None
        keyring.learn({digest("issued"): bob, digest("named"): bob}, {digest("gone")})
        assert [holder(keyring, key) for key in ("issued", "named", "gone")] == ["bob", "alice", None]
        keyring.learn({digest("issued"): bob}, {digest("named"), digest("issued")})
        assert [holder(keyring, key) for key in ("issued", "named")] == [None, None]
        keyring.learn({}, set())
        assert holder(keyring, "named") == "alice"


def test_with_redis_no_key_is_minted_that_only_one_replica_would_know() -> None:
    assert [each.tenant for each in Keyring(TENANTS, open_access=False).minted] == ["bob"]
    assert Keyring(TENANTS, open_access=False, mints=False).minted == []


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"expires": "2027-01-31"},
        {"models": ("-",)},
        {"models": ("a", "b:c"), "expires": "2027-01-31T12:00:00+01:00"},
        {"apps": ("chat", "batch"), "weight": 2.5},
        {"label": 'of "Ann", in words', "created": "2027-01-31T12:00:00Z"},
    ],
)
def test_what_is_noted_of_a_key_is_read_again(terms: dict[str, Any]) -> None:
    key = key_of("k", **terms)
    assert read_entry(key.hash.encode(), entry("alice", key).encode()) == ("alice", key)


@pytest.mark.parametrize(
    "noted",
    [
        *(b"bob", b"bob \xff", b'"bob"'),
        *(
            b"{",
            b"[]",
            b'{"expires":"2027-01-31"}',
            b'{"tenant":"bob","weight":-1.0}',
            b'{"tenant":"a b","weight":1.0}',
            b'{"tenant":""}',
            b'{"tenant":"bob","models":["' + b'","'.join(b"%d" % number for number in range(1001)) + b'"]}',
            b'{"tenant":"bob","x":' + b"[" * 100_000,
        ),
    ],
)
async def test_an_entry_that_cannot_be_read_lets_nobody_in(
    noted: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.keys.issued.POLL_S", 0.01)
    keyring = Keyring(TENANTS, open_access=False, mints=False)
    async with RedisServer() as redis, opened(redis.url) as store:
        async with redis.client() as client:
            await client.hset(TABLE, mapping={hash_key("x"): noted, hash_key("y"): '{"tenant":"bob"}', CHANGED: "1"})
        following = Background().repeat(Follower(RedisKeys(store), keyring).turn, "keys")
        await until(lambda: holder(keyring, "y") == "bob")
        assert holder(keyring, "x") is None
        assert "are ignored, 1 in all, such as" in caplog.text
        following.cancel()


def test_a_key_is_taken_until_it_expires() -> None:
    day = [{"hash": hash_key("day"), "expires": "2027-01-31"}]
    moment = [{"hash": hash_key("moment"), "expires": "2027-01-31 12:00:00+02:00"}]
    tenants = [TenantConfig.model_validate({"name": "t", "keys": [*day, *moment, hash_key("ever")]})]
    for open_access in (False, True):
        keyring = Keyring(tenants, open_access=open_access)
        for key, until_text in (("day", "2027-02-01T00:00:00+00:00"), ("moment", "2027-01-31T10:00:00+00:00")):
            until_s = datetime.fromisoformat(until_text).timestamp()
            assert keyring.principal(key.encode(), "a", until_s - 0.001).tenant == "t"
            with pytest.raises(ApiError, match="this API key expired at 2027-0") as caught:
                keyring.principal(key.encode(), "a", until_s)
            assert caught.value.status == 401
        assert keyring.principal(b"ever", "a", 1e12).tenant == "t"
