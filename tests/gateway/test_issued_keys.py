"""The table of keys that every replica follows: its bound, its size, and what a keyring makes of it."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from gateway.config.model import TenantConfig, hash_key
from gateway.http.errors import ApiError
from gateway.redis.issued_keys import CHANGED, TABLE, KeyTable, TableFull, follow
from gateway.request.identity import Keyring
from tests.gateway.live import until
from tests.gateway.test_store import opened
from tests.redis_server import RedisServer

TENANTS = [TenantConfig.model_validate({"name": "alice", "keys": [hash_key("named")]}), TenantConfig(name="bob")]


def holder(keyring: Keyring, key: str) -> str | None:
    """Each from an address of its own: wrong keys are slowed by address."""
    try:
        return keyring.principal(key.encode(), address=key).tenant
    except ApiError:
        return None


async def test_the_table_takes_so_many_keys_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.redis.issued_keys.KEYS_MAX", 3)
    async with RedisServer() as redis, opened(redis.url) as store:
        table = KeyTable(store)
        for key in "abc":
            await table.issue(hash_key(key), "alice")
        with pytest.raises(TableFull, match="holds 3 keys already"):
            await table.issue(hash_key("d"), "alice")
        await table.revoke(hash_key("a"))  # is in it already
        assert [await table.tenant(hash_key(key)) for key in "abd"] == ["", "alice", None]
        await table.forget(hash_key("b"))
        await table.issue(hash_key("d"), "bob")
        assert {key async for key, _ in table.entries()} == {hash_key(key).encode() for key in "acd"}


async def test_a_keyring_follows_a_large_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.redis.issued_keys.POLL_S", 0.01)
    async with RedisServer() as redis:
        entries = {hash_key(str(number)): "bob" for number in range(5000)}
        async with redis.client() as client:
            await client.hset(TABLE, mapping={**entries, CHANGED: "1"})
        keyring = Keyring(TENANTS, open_access=False, mints=False)
        async with opened(redis.url) as store:
            following = asyncio.create_task(follow(KeyTable(store), keyring))
            await until(lambda: holder(keyring, "0") == "bob")
            assert all(holder(keyring, str(number)) == "bob" for number in range(5000))
            assert (holder(keyring, "5000"), holder(keyring, "named")) == (None, "alice")
            await KeyTable(store).issue(hash_key("5000"), "alice")
            await until(lambda: holder(keyring, "5000") == "alice")
            await KeyTable(store).forget(hash_key("5000"))
            await until(lambda: holder(keyring, "5000") is None)
            following.cancel()


def test_a_revoked_key_is_nobodys_wherever_it_is_from() -> None:
    def digest(key: str) -> bytes:
        return hashlib.sha256(key.encode()).digest()

    for open_access in (False, True):
        keyring = Keyring(TENANTS, open_access=open_access, mints=False)
        bob = keyring.tenant("bob")
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
