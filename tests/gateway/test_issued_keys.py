"""The table of keys that every replica follows: its bound, its size, and what a keyring makes of it."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
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
from gateway.keys.issued import REVOKED, KeyReader, KeyTable, entry, read_entry
from gateway.storage.store_errors import StoreRefused
from gateway.telemetry.background import Tasks
from tests.gateway.live import until
from tests.kit.keys import database_at, note_key
from tests.kit.stores import opened
from tests.postgres_server import Databases
from tests.redis_server import RedisServer

pytestmark = pytest.mark.usefixtures("quick_keys")
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
async def table(request: pytest.FixtureRequest, tmp_path: Path, databases: Databases) -> AsyncIterator[KeyTable]:
    if request.param == "redis":
        async with RedisServer() as redis, opened(redis.url) as store:
            yield RedisKeys(store)
    else:
        url = await databases.another() if request.param == "postgresql" else str(tmp_path / "usage.db")
        async with database_at(url) as database:
            yield DatabaseKeys(database)


@contextmanager
def following(table: KeyTable, tenants: Sequence[TenantConfig] = TENANTS) -> Iterator[Keyring]:
    """A keyring that hears of the table's changes."""
    keyring = Keyring(tenants, open_access=False, mints=False)
    task = Tasks().repeat(KeyReader(table, keyring).run_once, "keys")
    yield keyring
    task.cancel()


async def test_the_table_takes_so_many_keys_and_changes_in_one_step_or_not_at_all(
    table: KeyTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.keys.in_redis.KEYS_MAX", 3)
    monkeypatch.setattr("gateway.keys.in_database.KEYS_MAX", 3)
    assert await table.change_mark() is None
    for key in "abc":
        await note_key(table, key_of(key), "alice")
    before = await table.change_mark()
    with pytest.raises(StoreRefused, match="holds 3 keys already"):
        await table.note({hash_key("d"): "x", hash_key("a"): "changed"})
    assert [await table.entry(hash_key(key)) for key in "ad"] == [b'{"tenant":"alice"}', None]
    await table.note({hash_key("a"): REVOKED})  # is in it already
    assert await table.change_mark() not in (None, before)
    await table.note({hash_key("d"): "x", hash_key("b"): None})
    assert [await table.entry(hash_key(key)) for key in "abcd"] == [b"", None, b'{"tenant":"alice"}', b"x"]
    assert {key async for key, _ in table.entries()} == {hash_key(key).encode() for key in "acd"}


async def test_a_keyring_follows_every_table(table: KeyTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.keys.in_database.PAGE", 200)
    await table.note(
        {hash_key(str(number)): '{"tenant":"bob"}' for number in range(600)}
    )  # more than Redis gives at once
    with following(table) as keyring:
        await until(lambda: holder(keyring, "0") == "bob")
        assert {holder(keyring, str(number)) for number in range(600)} == {"bob"}
        assert (holder(keyring, "600"), holder(keyring, "named")) == (None, "alice")
        await note_key(table, key_of("new", weight=3.0, apps=["chat"], models=["m"]), "carol")
        await table.note({hash_key("named"): REVOKED})
        await until(lambda: holder(keyring, "named") is None)
        carol = keyring.principal(b"new", "new", 0.0)
        assert (carol.tenant, carol.weight, carol.apps, carol.models) == ("carol", 3.0, ("chat",), frozenset({"m"}))
        await table.note({hash_key("0"): None})
        await until(lambda: holder(keyring, "0") is None)


async def test_a_table_without_end_is_not_read_and_what_is_known_holds(
    table: KeyTable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.keys.issued.ENTRIES_READ_MAX", 30)
    await table.note({hash_key("first"): '{"tenant":"bob"}'})
    with following(table) as keyring:
        await until(lambda: holder(keyring, "first") == "bob")
        await table.note({hash_key(str(number)): '{"tenant":"bob"}' for number in range(600)})
        await until(lambda: f"the table of keys ({table.place}) has more than 30 entries" in caplog.text)
        assert [holder(keyring, each) for each in ("first", "named", "0")] == ["bob", "alice", None]
        await table.note({hash_key(str(number)): None for number in range(600)} | {hash_key("named"): REVOKED})
        await until(lambda: holder(keyring, "named") is None)
        assert holder(keyring, "first") == "bob"


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


def test_an_issued_key_of_a_tenant_that_the_file_never_had_survives_the_removal_of_another() -> None:
    keyring = Keyring(TENANTS, open_access=False, mints=False)
    alien = keyring.holder("carol", key_of("issued", weight=3.0))
    bobs = keyring.holder("bob", key_of("of bob"))
    assert alien is not None
    assert bobs is not None
    keyring.learn({hashlib.sha256(b"issued").digest(): alien, hashlib.sha256(b"of bob").digest(): bobs}, set())
    keyring.take_over(keyring.read(TENANTS[:1], ()), open_access=False)
    assert [holder(keyring, key) for key in ("issued", "of bob")] == ["carol", None]


def test_with_redis_no_key_is_minted_that_only_one_replica_would_know() -> None:
    assert [*Keyring(TENANTS, open_access=False).held.minted] == ["bob"]
    assert Keyring(TENANTS, open_access=False, mints=False).held.minted == {}


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


UNREADABLE = [
    *(b"bob", b"bob \xff", b'"bob"', b"{", b"[]", b'{"expires":"2027-01-31"}', b'{"tenant":""}'),
    *(b'{"tenant":"bob","weight":-1.0}', b'{"tenant":"a b","weight":1.0}', b'{"tenant":"bob","x":' + b"[" * 100_000),
    b'{"tenant":"bob","models":["' + b'","'.join(b"%d" % number for number in range(1001)) + b'"]}',
]


async def test_entries_that_cannot_be_read_let_nobody_in(caplog: pytest.LogCaptureFixture) -> None:
    entries = {hash_key(f"bad {number}").encode(): noted for number, noted in enumerate(UNREADABLE)}
    entries |= {
        b"\xff": b'{"tenant":"bob"}',
        b"sha256:12": b'{"tenant":"bob"}',
        hash_key("of eve").encode(): b'{"tenant":"eve"}',
    }
    async with RedisServer() as redis, opened(redis.url) as store:
        async with redis.client() as client:
            await client.hset(TABLE, mapping={**entries, hash_key("good"): '{"tenant":"bob"}', CHANGED: "1"})
        with following(RedisKeys(store)) as keyring:
            await until(lambda: holder(keyring, "good") == "bob")
            assert {holder(keyring, f"bad {number}") for number in range(len(UNREADABLE))} == {None}
            assert holder(keyring, "of eve") is None
            assert f"{len(entries)} entries of the table of keys (redis) are ignored" in caplog.text


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
