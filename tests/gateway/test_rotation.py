"""A key is replaced in one step: the new one has the old one's terms, and the old one ends at once or after a while."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gateway.config.sections.keys import KeyConfig, hash_key
from gateway.keys.in_database import DatabaseKeys
from gateway.keys.issuance import KeyRefused, moment, rotate, seconds_of
from gateway.keys.issued import entry, read_entry
from tests.commands import run
from tests.gateway.live import MODEL, Starter
from tests.kit.keys import MOMENT, NAMED, TENANTS, answers, database_at, issuing, listed, made, note_key, rotated
from tests.kit.served import config_file

pytestmark = pytest.mark.usefixtures("quick_keys")
NOW = 1_800_000_000.0


@pytest.mark.parametrize("grace", ["0s", "1h"])
async def test_a_rotated_key_keeps_its_terms_and_the_old_one_ends(start: Starter, grace: str) -> None:
    terms = {"tenant": "bob", "apps": ["chat"], "models": [MODEL], "expires": "9000-01-31", "weight": 4, "label": "x"}
    async with issuing(start) as (upstream, live):
        old = await made(live, **terms)
        await answers(live, old, 200)
        new = await rotated(live, old, grace=grace)
        await answers(live, new, 200)
        await answers(live, old, 200 if grace == "1h" else 401)
        known = {each["hash"]: each for each in await listed(live)}
        assert {name: known[hash_key(new)][name] for name in terms} == terms
        assert (hash_key(old) in known) == (grace == "1h")
        if grace == "1h":
            assert re.fullmatch(MOMENT, known[hash_key(old)]["expires"])
            assert known[hash_key(old)]["weight"] == 4

        config = config_file(start.directory, upstream.url, tenants=TENANTS, usage=str(start.directory / "usage.db"))
        code, out, said = await run("keys", "rotate", "-c", config, given=new.encode() + b"\n")
        assert (code, said) == (0, "the old key is revoked\n")
        await answers(live, out.split()[1], 200)
        await answers(live, new, 401)
        code, out, _ = await run("keys", "rotate", hash_key(NAMED), "-c", config)
        assert code == 0
        await answers(live, NAMED, 401)
        await answers(live, out.split()[1], 200)
        code, out, said = await run("keys", "rotate", hash_key(out.split()[1]), "--grace", "7d", "-c", config)
        assert (code, said) == (0, "the old key is taken for 7d more\n")


@pytest.mark.parametrize(
    ("noted", "options", "said"),
    [
        (None, {}, "no such key"),
        ("", {}, "this key is revoked"),
        ("{", {}, "its entry cannot be read"),
        (entry("bob", KeyConfig(hash=hash_key("k"), expires="2001-01-31")), {}, "expires: 2001-01-31 is past"),
        (entry("bob", KeyConfig(hash=hash_key("k"))), {"expires": "soon"}, "expires: should be a day such as"),
        (entry("bob", KeyConfig(hash=hash_key("k"), models=("gone",))), {}, "models: no pool serves 'gone'"),
    ],
)
async def test_what_cannot_be_rotated_stays_as_it_is(
    start: Starter, noted: str | None, options: dict[str, Any], said: str
) -> None:
    pools = [{"name": "pool", "models": [MODEL], "backends": [{"url": "http://127.0.0.1:1"}]}]
    config = start.config(tenants=TENANTS, pools=pools)
    async with database_at(str(start.directory / "usage.db")) as database:
        table = DatabaseKeys(database)
        await table.note({hash_key("k"): noted})
        with pytest.raises(KeyRefused, match=re.escape(said)):
            await rotate(
                table, config, hash_key("k"), hash_key("n"), unix_s=NOW, grace_s=0, **{"expires": None, **options}
            )
        assert await table.entry(hash_key("n")) is None
        assert await table.entry(hash_key("k")) == (None if noted is None else noted.encode())
        with pytest.raises(KeyRefused, match="the config names this key"):
            await rotate(table, config, hash_key(NAMED), hash_key("n"), unix_s=NOW, grace_s=1, expires=None)


@pytest.mark.parametrize(("expires", "ends"), [(None, NOW + 60), ("2027-01-15T08:00:10Z", NOW + 10)])
async def test_an_old_key_ends_after_its_grace_or_when_it_would_have(
    start: Starter, expires: str | None, ends: float
) -> None:
    config = start.config("http://127.0.0.1:1", tenants=TENANTS)
    async with database_at(str(start.directory / "usage.db")) as database:
        table = DatabaseKeys(database)
        await note_key(table, KeyConfig(hash=hash_key("k"), expires=expires, label="x"), "bob")
        tenant, new = await rotate(
            table, config, hash_key("k"), hash_key("n"), unix_s=NOW, grace_s=60, expires="9000-01-31"
        )
        assert (tenant, new.expires, new.label, new.created) == ("bob", "9000-01-31", "x", moment(NOW))
        assert read_entry(new.hash.encode(), await table.entry(new.hash) or b"") == ("bob", new)
        _, old = read_entry(hash_key("k").encode(), await table.entry(hash_key("k")) or b"")
        assert old.expires_s == ends


def test_a_grace_is_a_number_and_a_unit() -> None:
    assert [seconds_of(text) for text in ("0s", "30m", "24h", "7d")] == [0, 1800, 86_400, 604_800]
    for text in ("", "1", "h", "-1h", "1.5h", "999999d"):
        with pytest.raises(KeyRefused, match="is no time to go on"):
            seconds_of(text)
