"""Files that somebody replaces, removes or restores while the gateway runs: it goes on with what is there."""
# ruff: noqa: ASYNC240 (files are what these tests are about)

from __future__ import annotations

import os
import shutil
import sqlite3
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gateway.config.sections.keys import hash_key
from gateway.http.tls.certificates import Certificates
from gateway.keys.issuance import KeyRefused
from gateway.storage.store_errors import StoreUnavailable
from gateway.telemetry.log_writer import LogWriter
from gateway.usage.database import Database
from tests.certificates import Authority
from tests.commands import run
from tests.gateway.capture import Upstream, replies
from tests.gateway.live import CHAT, Live, Starter, chat, simulated, until
from tests.kit.keys import NAMED, TENANTS, admin, answers, issuing, made, revoked
from tests.kit.served import config_file
from tests.kit.usage import FAILURES, OK, counted, database_at, written
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("keys.issued.POLL_S", "usage.recorder.FLUSH_S", "telemetry.background.RETRY_S"):
        monkeypatch.setattr(f"gateway.{name}", 0.01)
    monkeypatch.setattr("gateway.http.tls.certificates.LOOK_S", 0.01)
    monkeypatch.setattr("gateway.pool.learned.INTERVAL_S", 0.01)


async def failures(live: Live, task: str) -> float:
    return (await live.metrics()).get((FAILURES, task), 0)


async def has_failed(live: Live, task: str, times: float) -> None:
    """Until it has, so often."""

    async def does() -> bool:
        return await failures(live, task) >= times

    await eventually(does)


async def requests_of(live: Live, count: int) -> None:
    """Of alice."""
    for _ in range(count):
        assert (await live.ask(CHAT, chat(), key=NAMED)).status == 200


# --- the database of usage and keys ---


def copied(path: Path, copy: Path) -> None:
    """As `.restore` of SQLite's command line does it: a process that read the file here would lose the locks that its
    connections have, as soon as it closed the file."""
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)


def moved(copy: Path, path: Path) -> None:
    """As restored by those who know."""
    shutil.copy(copy, copy.with_suffix(".new"))
    os.replace(copy.with_suffix(".new"), path)


def overwritten(copy: Path, path: Path) -> None:
    shutil.copyfile(copy, path)


def removed_and_copied(copy: Path, path: Path) -> None:
    path.unlink()
    shutil.copyfile(copy, path)


def as_earlier(copy: Path, path: Path) -> None:
    """A copy in SQLite's other form, which an earlier version wrote."""
    with closing(sqlite3.connect(copy)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    moved(copy, path)


RESTORED = [copied, moved, overwritten, removed_and_copied, as_earlier]


@pytest.mark.parametrize("restore", RESTORED)
async def test_a_restored_database_has_the_keys_and_gets_the_usage(
    start: Starter, restore: Callable[[Path, Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path, copy = start.directory / "usage.db", start.directory / "copy.db"
    async with issuing(start) as (upstream, live):
        config = config_file(start.directory, upstream.url, tenants=TENANTS, usage=str(path))
        old = await made(live)
        await answers(live, old, 200)
        await written(live)
        copied(path, copy)
        young = await made(live)
        await answers(live, young, 200)
        await requests_of(live, 5)
        await written(live)
        restore(copy, path)
        await answers(live, young, 401)
        assert (await live.ask(CHAT, chat(), key=old)).status == 200
        await requests_of(live, 3)
        code, out, said = await run("keys", "revoke", hash_key(old), "-c", config)
        assert (code, out, said) == (0, "revoked\n", "")
        await answers(live, old, 401)
        code, _, said = await run("keys", "revoke", hash_key(young), "-c", config)
        assert (code, "nothing is revoked" in said) == (2, True)
        await written(live)
        assert counted(str(path), "tenant")["alice",][0] == 3, "what came after the copy is in it, and nothing else"
        assert (await live.metrics())["fairgate_usage_requests_dropped_total",] >= 5, "what is lost is counted"
        assert f"is gone from {path}: an older copy took its place" in caplog.text
        await eventually(lambda: _is_well(live))
        with closing(sqlite3.connect(path)) as other:
            assert other.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert {each.name for each in start.directory.glob("usage.db*")} == {"usage.db"}


async def _is_well(live: Live) -> bool:
    return "faults" not in (await admin(live, "GET", "/ready")).json


async def test_a_database_that_is_removed_is_made_anew_and_keys_can_be_revoked(
    start: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    path = start.directory / "usage.db"
    async with issuing(start) as (upstream, live):
        config = config_file(start.directory, upstream.url, tenants=TENANTS, usage=str(path))
        key, other = [await made(live) for _ in range(2)]
        await answers(live, other, 200)
        path.unlink()
        await until(path.exists)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (await live.ask(CHAT, chat(), key=key)).status == 200
        await requests_of(live, 4)
        await written(live)
        assert counted(str(path), "tenant")["alice",][0] == 4
        vanished = "the table of keys has vanished from the database"
        await until(lambda: any(vanished in fault for fault in live.gateway.faults()))
        assert vanished in str((await admin(live, "GET", "/ready")).json["faults"])
        assert await failures(live, "keys") >= 1
        with pytest.raises(KeyRefused):
            await revoked(live, "nonsense")
        code, out, _ = await run("keys", "revoke", hash_key(key), "-c", config)
        assert (code, out.startswith("revoked; the table of keys was empty")) == (0, True)
        await answers(live, key, 401)
        await answers(live, other, 401)
        assert (await live.ask(CHAT, chat(), key=NAMED)).status == 200
        with pytest.raises(KeyRefused):
            await revoked(live, hash_key(other))
        await eventually(lambda: _is_well(live))


@pytest.mark.parametrize("content", [b"", b"no database, but a text that is longer than its head" * 20])
async def test_what_comes_into_the_place_of_a_database_loses_no_usage(
    start: Starter, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = start.directory / "usage.db"
    async with Upstream(replies(OK)) as upstream, start(upstream.url, tenants=TENANTS, usage=str(path)) as live:
        await written(live)
        _becomes(path, content)
        await requests_of(live, 3)
        if content:
            await until(lambda: "usage is not written, and kept in memory until it can be" in caplog.text)
            await until(lambda: any("is not a database" in one for one in live.gateway.faults()))
            path.unlink()
        await written(live)
        assert counted(str(path), "tenant")["alice",][0] == 3


def _becomes(path: Path, content: bytes) -> None:
    """Its head first, then its end: the gateway would take an empty file for a database, and fill it."""
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


def _note(database: Database, value: str) -> None:
    with database.transaction() as step:
        step.do(
            "INSERT INTO fairgate_notes VALUES ('x', %s) ON CONFLICT (name) DO UPDATE SET value = %s", (value, value)
        )


def _noted(database: Database) -> list[tuple[Any, ...]]:
    with database.transaction(writes=False) as step:
        return step.ask("SELECT value FROM fairgate_notes WHERE name = 'x'")


def test_what_is_written_to_a_file_that_is_replaced_meanwhile_is_no_success(tmp_path: Path) -> None:
    path, copy = tmp_path / "usage.db", tmp_path / "copy.db"
    with closing(database_at(str(path))) as database:
        _note(database, "1")
        shutil.copy(path, copy)
        with pytest.raises(StoreUnavailable, match="replaced or removed meanwhile"), database.transaction() as step:
            step.do("UPDATE fairgate_notes SET value = '2' WHERE name = 'x'")
            moved(copy, path)
        assert _noted(database) == [("1",)]
        _note(database, "3")
    with closing(database_at(str(path))) as again:
        assert _noted(again) == [("3",)]


def test_to_open_a_database_ends_no_lock_of_another_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.usage.database.BUSY_S", 0.01)
    path = tmp_path / "usage.db"
    one, two = database_at(str(path)), database_at(str(path))
    _note(one, "1")
    script = (
        f"import sqlite3; other = sqlite3.connect({str(path)!r}, timeout=0, isolation_level=None)\n"
        "other.execute('BEGIN IMMEDIATE'); other.execute('DELETE FROM fairgate_notes')\n"
        "print('begun', flush=True); input(); other.execute('COMMIT')"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, stderr=-1, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "begun\n"
        with one.transaction(writes=False) as step:
            step.ask("SELECT 1 FROM fairgate_notes")
            with pytest.raises(StoreUnavailable, match="is locked"), two.transaction():
                pass
            _, said = other.communicate("\n")
        assert "database is locked" in said, "what is read now is not written by others"
    one.close()
    two.close()


# --- the file of what was learned ---


async def test_a_state_file_that_cannot_be_written_is_said_where_an_operator_looks_and_stops_nothing(
    start: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    folder, in_the_way, linked = (start.directory / name for name in ("folder", "file", "linked"))
    folder.mkdir()
    in_the_way.touch()

    def leads_to(target: Path) -> None:
        fresh = linked.with_suffix(".new")
        fresh.symlink_to(target)
        fresh.replace(linked)

    def levels() -> list[str]:
        return [record.levelname for record in caplog.records if "cannot be saved" in record.getMessage()]

    leads_to(folder)
    async with simulated(time_scale=0) as sim, start(sim.url, state_file=str(linked / "learned.json")) as live:
        await until((folder / "learned.json").exists)
        leads_to(in_the_way)
        await until(live.gateway.faults)
        assert "the learned state cannot be saved to" in live.gateway.faults()[0]
        await has_failed(live, "state_file", times=2)
        assert levels() == ["ERROR"], "once, however often it is tried"
        assert (await live.ask(CHAT, chat(max_tokens=2))).status == 200
        leads_to(folder)
        await until(lambda: not live.gateway.faults())
        leads_to(in_the_way)
    assert levels()[-1] == "WARNING", "at the end, after which nothing is tried"


# --- the access log ---


async def test_an_access_log_goes_on_in_a_new_file_once_its_own_is_removed_or_another_took_its_place(
    start: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url, tenants=TENANTS) as live:
        await requests_of(live, 2)
        await live.lines(2)
        live.log.unlink()
        await requests_of(live, 3)
        await until(live.log.exists)
        assert len(await live.lines(3)) == 3
        assert f"the access log was removed while it was open: it goes on in a new {live.log}" in caplog.text
        assert stat.S_IMODE(live.log.stat().st_mode) == 0o600
        old = live.log.rename(live.log.with_suffix(".1"))
        await requests_of(live, 1)
        await until(lambda: old.read_bytes().count(b"\n") == 4)  # until somebody says so, it is where it went
        assert not live.log.exists()
        live.log.touch()
        await requests_of(live, 2)
        assert len(await live.lines(2)) == 2
        assert old.read_bytes().count(b"\n") == 4


def test_a_log_in_whose_place_there_is_no_file_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    writer = LogWriter("access log", str(path))
    moved_to = path.rename(tmp_path / "access.log.1")
    os.mkfifo(path)
    writer.write(b"a\n", 1)
    writer.close()
    assert moved_to.read_bytes() == b"a\n"
    assert writer.lines_lost == 0


# --- the config and the certificates ---


def test_a_log_is_closed_while_another_thread_begins_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LogWriter("access log", str(tmp_path / "access.log"))
    begins, goes_on = threading.Event(), threading.Event()
    start = threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        if thread.name == "access log":
            begins.set()
            assert goes_on.wait(10)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    with ThreadPoolExecutor() as pool:
        written = pool.submit(log.write, b"a line\n", 1)
        assert begins.wait(10)
        closed = pool.submit(log.close)
        assert not wait([closed], timeout=0.05).done, "the line is still to be written"
        goes_on.set()
        written.result(10)
        closed.result(10)
    assert (tmp_path / "access.log").read_bytes() == b"a line\n"


async def test_certificates_that_cannot_be_read_are_said_until_they_can_be(start: Starter, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.sign("listener")
    tls = {"cert_file": certificate, "key_file": key}
    async with simulated() as sim, start(sim.url, tls=tls, trusting=authority.client()) as live:
        for break_it in (os.remove, lambda file: Path(file).write_text("no key")):
            content = Path(key).read_bytes()
            break_it(key)
            await until(live.gateway.faults)
            before = await failures(live, "certificates")
            await has_failed(live, "certificates", times=before + 1)
            [fault] = live.gateway.faults()
            assert "certificates: the TLS certificate cannot be loaded, and the previous one stays in use" in fault
            assert (await live.ask(CHAT, chat())).status == 200
            Path(key).write_bytes(content)
            await until(lambda: not live.gateway.faults())


async def test_certificates_whose_rights_are_mended_are_read() -> None:
    tries: list[int] = []

    def fails_once() -> ssl.SSLContext:
        """Like a file whose rights are mended: nothing of it is seen to change."""
        tries.append(1)
        if len(tries) == 2:
            raise ValueError("the key cannot be read: Permission denied")
        return ssl.create_default_context()

    certificates = Certificates(fails_once, [])
    assert not certificates.reload()
    await certificates.run_once()
    assert len(tries) == 3
    await certificates.run_once()
    assert len(tries) == 3
