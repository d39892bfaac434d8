"""Where are files and batches kept? In the database of usage, so that a result and its usage are one transaction.

A file is its lines. What came of line n of the input is line n of the file of results, or of that of errors: a line
without either is still to be asked. A batch is driven by the gateway whose claim (`owner`) has not run out, and what it
writes is written only as long as the claim is its own.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from gateway.config.sections.usage import BatchesConfig
from gateway.proxy.batches.batch_objects import BLANK_BYTES_MAX, DAY_S, WINDOW_S, Result, StoredFile, files_of, id_of
from gateway.usage.counts import UsageCounts
from gateway.usage.database import Database, Transaction
from gateway.usage.written import add_sums

LEASE_S: Final = 10
"""A claim runs out so long after it was renewed."""
DRIVEN_MAX: Final = 4
"""Batches of one tenant at once; the rest wait, the oldest first."""
PAGE_BYTES: Final = 1 << 20
ARRIVES_S: Final = 3600
"""A file that is not whole by then is forgotten."""
FORGOTTEN_AT_ONCE: Final = 10

_LIVE = "status IN ('validating', 'in_progress', 'cancelling')"
_ADD_FILE = "INSERT INTO fairgate_files VALUES (%s, %s, %s, %s, %s, %s, %s) ON CONFLICT (id) DO NOTHING"
_ADD_LINE = "INSERT INTO fairgate_lines VALUES (%s, %s, %s) ON CONFLICT (file, n) DO NOTHING"
_SIZE = "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM fairgate_files WHERE tenant = %s"
_BATCH = "SELECT entry, completed, failed, caller, tenant FROM fairgate_batches WHERE"
_OPEN = (
    f" AND length(line) > {BLANK_BYTES_MAX} AND NOT EXISTS (SELECT 1 FROM fairgate_lines AS done WHERE done.file IN"
    " (%s, %s) AND done.n = fairgate_lines.n)"
)


def begin_file(database: Database, tenant: str, file: StoredFile, limits: BatchesConfig) -> str:
    """Make room for a file, whose lines come next. Else: why there is none."""
    with database.transaction() as step:
        [(files, size)] = step.ask(_SIZE, (tenant,))
        if files >= limits.files_max:
            return f"you keep {files} files, and no more may be; delete some"
        if size + file.bytes > limits.stored_bytes_max:
            return f"your files would take more than {limits.stored_bytes_max} bytes together; delete some"
        step.do(_ADD_FILE, (file.id, tenant, *file[1:], 0))
    return ""


def add_lines(database: Database, file: str, rows: Iterable[tuple[int, bytes]], *, is_last: bool) -> None:
    with database.transaction() as step:
        step.do_each(_ADD_LINE, [(file, *row) for row in rows])
        step.do("UPDATE fairgate_files SET is_whole = %s WHERE id = %s", (int(is_last), file))


def files(database: Database, tenant: str, which: str, values: Sequence[object]) -> list[StoredFile]:
    """Files of a tenant, as `which` says in SQL."""
    all_of_them = (
        "SELECT id, purpose, filename, bytes, made_s FROM fairgate_files WHERE tenant = %s AND is_whole = 1 AND "
    )
    with database.transaction(writes=False) as step:
        return [StoredFile(*row) for row in step.ask(all_of_them + which, (tenant, *values))]


def delete_file(database: Database, tenant: str, file: str) -> str:
    """Forget it. Else: which batch still needs it."""
    needed = f"SELECT id FROM fairgate_batches WHERE tenant = %s AND input = %s AND {_LIVE}"
    with database.transaction() as step:
        for [batch] in step.ask(needed, (tenant, file)):
            return str(batch)
        _forget_file(step, file)
    return ""


def _forget_file(step: Transaction, file: str) -> None:
    step.do("DELETE FROM fairgate_lines WHERE file = %s", (file,))
    step.do("DELETE FROM fairgate_files WHERE id = %s", (file,))


def page(database: Database, file: str, after: int, less: Sequence[str] = ()) -> list[tuple[int, bytes]]:
    """The next lines behind this one, about `PAGE_BYTES` of them. `less`: two files; blank lines, and lines that one of
    the files has, too, are left out."""
    which = "FROM fairgate_lines WHERE file = %s AND n > %s" + (_OPEN if less else "")
    with database.transaction(writes=False) as step:
        last, left = after, PAGE_BYTES
        for n, size in step.ask(f"SELECT n, length(line) {which} ORDER BY n LIMIT 256", (file, after, *less)):
            if left > 0:
                last, left = n, left - size
        lines = step.ask(f"SELECT n, line {which} AND n <= %s ORDER BY n", (file, after, *less, last))
    return [(n, bytes(line)) for n, line in lines]


def add_batch(database: Database, tenant: str, entry: dict[str, Any], caller: str, batches_max: int) -> bool:
    """False: there is no room, since none of the tenant's has ended."""
    oldest = f"(SELECT MIN(id) FROM fairgate_batches WHERE tenant = %s AND NOT {_LIVE})"
    with database.transaction() as step:
        [(kept,)] = step.ask("SELECT COUNT(*) FROM fairgate_batches WHERE tenant = %s", (tenant,))
        if kept >= batches_max and not step.do("DELETE FROM fairgate_batches WHERE id = " + oldest, (tenant,)):
            return False
        values = (entry["id"], tenant, entry["input_file_id"], entry["status"], "", 0, 0, 0, json.dumps(entry), caller)
        step.do("INSERT INTO fairgate_batches VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)", values)
    return True


def batches(database: Database, tenant: str, which: str, values: Sequence[object]) -> list[dict[str, Any]]:
    """Batches of a tenant, as `which` says in SQL."""
    with database.transaction(writes=False) as step:
        return [_shown(*row) for row in step.ask(f"{_BATCH} tenant = %s AND {which}", (tenant, *values))]


def _shown(entry: str, completed: int, failed: int, *_: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(entry)
    found["request_counts"] |= {"completed": completed, "failed": failed}
    return found


def cancel(database: Database, tenant: str, batch: str, now_s: int) -> None:
    """Have it end, if it has not."""
    live = "UPDATE fairgate_batches SET lease_s = lease_s WHERE tenant = %s AND id = %s AND status <> 'cancelling' AND "
    with database.transaction() as step:
        if step.do(live + _LIVE, (tenant, batch)):
            _change(step, batch, "cancelling", cancelling_at=now_s)


def claim(database: Database, owner: str, now_s: int) -> dict[str, str]:
    """Renew what this owner has claimed, and claim what nobody has: `DRIVEN_MAX` of a tenant, and what is to end. Its
    batches and their status."""
    claimed: dict[str, str] = {}
    overdue = id_of("batch_", now_s - WINDOW_S)
    take = "UPDATE fairgate_batches SET owner = %s, lease_s = %s WHERE id = %s AND (owner = %s OR lease_s < %s)"
    with database.transaction() as step:
        live = step.ask(f"SELECT id, tenant, status, owner, lease_s FROM fairgate_batches WHERE {_LIVE} ORDER BY id")
        driven = Counter(tenant for _, tenant, _, _, lease_s in live if lease_s >= now_s)
        for batch, tenant, status, by, lease_s in live:
            may_take = driven[tenant] < DRIVEN_MAX or status == "cancelling" or batch < overdue
            if (by == owner or may_take) and step.do(take, (owner, now_s + LEASE_S, batch, owner, now_s)):
                claimed[batch] = status
                driven[tenant] += lease_s < now_s
    return claimed


def release(database: Database, owner: str) -> None:
    """Others may go on with its batches at once."""
    with database.transaction() as step:
        step.do("UPDATE fairgate_batches SET owner = '', lease_s = 0 WHERE owner = %s", (owner,))


def driven(database: Database, batch: str) -> tuple[dict[str, Any], str, int]:
    """A batch, who made it, and how many bytes its tenant keeps."""
    with database.transaction(writes=False) as step:
        [row] = step.ask(f"{_BATCH} id = %s AND {_LIVE}", (batch,))
        [(_, kept_bytes)] = step.ask(_SIZE, row[4:])
        return _shown(*row), row[3], int(kept_bytes)


def write(
    database: Database, batch: str, owner: str, now_s: int, results: Sequence[Result], counts: UsageCounts
) -> list[Result]:
    """Note what came of these lines, and what was used for them, unless that was done before. Gives what is new."""
    output, errors = files_of(batch)
    with database.transaction() as step:
        if not _is_owner(step, batch, owner, now_s):
            return []
        done = [one for one in results if step.do(_ADD_LINE, (errors if one.is_error else output, one.n, one.line)) > 0]
        counts.take()  # what is left of a transaction that failed
        for record in [one.record for one in done if one.record is not None]:
            counts.ended(record)
        add_sums(step, counts.take())
        failed = sum(one.is_error for one in done)
        added = "UPDATE fairgate_batches SET completed = completed + %s, failed = failed + %s WHERE id = %s"
        step.do(added, (len(done) - failed, failed, batch))
    return done


def begin(database: Database, batch: str, owner: str, now_s: int, total: int, faults: list[dict[str, Any]]) -> None:
    """Its file was read: the batch goes on with so many requests, or has failed, by its faults."""
    counts = {"total": total, "completed": 0, "failed": 0}
    errors, status = ({"object": "list", "data": faults}, "failed") if faults else (None, "in_progress")
    with database.transaction() as step:
        if _is_owner(step, batch, owner, now_s):
            _change(step, batch, status, errors=errors, request_counts=counts, **{f"{status}_at": now_s})


def end(database: Database, batch: str, owner: str, now_s: int, tenant: str, status: str) -> None:
    """The batch has this status from now on; its tenant has its files."""
    sums = "SELECT COUNT(*), COALESCE(SUM(length(line)), 0) FROM fairgate_lines WHERE file = %s"
    ids: dict[str, str | None] = {}
    with database.transaction() as step:
        if not _is_owner(step, batch, owner, now_s):
            return
        for name, file in zip(("output", "error"), files_of(batch), strict=True):
            [(lines, size)] = step.ask(sums, (file,))
            if lines:
                step.do(_ADD_FILE, (file, tenant, "batch_output", f"{batch}_{name}.jsonl", int(size), now_s, 1))
            ids[f"{name}_file_id"] = file if lines else None
        _change(step, batch, status, **ids, finalizing_at=now_s, **{f"{status}_at": now_s})


def _is_owner(step: Transaction, batch: str, owner: str, now_s: int) -> bool:
    """Is the claim still its own? Then it stays its own until the transaction ends."""
    mine = f"UPDATE fairgate_batches SET lease_s = %s WHERE id = %s AND owner = %s AND {_LIVE}"
    return step.do(mine, (now_s + LEASE_S, batch, owner)) > 0


def _change(step: Transaction, batch: str, status: str, **fields: Any) -> None:
    [(entry,)] = step.ask("SELECT entry FROM fairgate_batches WHERE id = %s", (batch,))
    changed = json.dumps(json.loads(entry) | fields | {"status": status})
    step.do("UPDATE fairgate_batches SET status = %s, entry = %s WHERE id = %s", (status, changed, batch))


def forget(database: Database, now_s: int, keep_days: int) -> None:
    """Some of what is too old, or never came whole."""
    kept_s = now_s - keep_days * DAY_S
    old = (
        "SELECT id FROM fairgate_files WHERE (made_s < %s OR (is_whole = 0 AND made_s < %s)) AND NOT EXISTS (SELECT"
        f" 1 FROM fairgate_batches WHERE input = fairgate_files.id AND {_LIVE}) LIMIT {FORGOTTEN_AT_ONCE}"
    )
    with database.transaction() as step:
        step.do(f"DELETE FROM fairgate_batches WHERE id < %s AND NOT {_LIVE}", (id_of("batch_", kept_s),))
        for [file] in step.ask(old, (kept_s, now_s - ARRIVES_S)):
            _forget_file(step, file)
