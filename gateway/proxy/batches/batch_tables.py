"""The tables of files and batches, in the usage database, so that a result and its usage are written in one
transaction.

A file is its lines. The result of line n of the input is line n of the output file or of the error file; a line in
neither file is still to be run. A batch is driven by the gateway whose claim (`owner`, `lease_s`) has not run out, and
that gateway's writes count only while it has the claim.

All that a tenant stores is a file with its bytes, from before its first line is written. A running batch has its two
files from the beginning, with room for a line for each request without an answer, so it can always end.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from gateway.config.sections.services import BatchesConfig
from gateway.proxy.batches.batch_objects import DAY_S, WINDOW_S, LineChecker, LineResult, StoredFile, files_of, id_of
from gateway.storage.store_errors import StoreUnavailable
from gateway.usage.counts import UsageCounts
from gateway.usage.database import Database, Transaction
from gateway.usage.written import add_sums

LEASE_S: Final = 10
"""Time after its renewal at which a claim runs out."""
DRIVEN_MAX: Final = 4
"""Batches of one tenant that run at once; the rest wait, the oldest first."""
PAGE_BYTES: Final = 1 << 16
"""Bytes read or written in one turn of a tenant."""
PAGE_LINES: Final = 256
ARRIVES_S: Final = 600
"""Age at which an incomplete file is forgotten: its gateway was killed, or its deletion failed."""
FORGOTTEN_AT_ONCE: Final = 10

_LIVE = "status IN ('validating', 'in_progress', 'cancelling')"
_COLUMNS = "id, purpose, filename, bytes, made_s, expires_s"
_ADD_FILE = (
    f"INSERT INTO fairgate_files ({_COLUMNS}, tenant, is_whole) VALUES (%s, %s, %s, %s, %s, %s, %s, %s) "
    "ON CONFLICT (id) DO "
)
_END_FILE = (
    f"{_ADD_FILE} UPDATE SET bytes = excluded.bytes, made_s = excluded.made_s, expires_s = excluded.expires_s, "
    "is_whole = excluded.is_whole"
)
_ADD_LINE = "INSERT INTO fairgate_lines VALUES (%s, %s, %s) ON CONFLICT (file, n) DO NOTHING"
_NOTED = "SELECT file, line FROM fairgate_lines WHERE file IN (%s, %s) AND n = %s"
_SIZE = "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM fairgate_files WHERE tenant = %s AND id NOT IN (%s, %s)"
_BATCH = "SELECT entry, completed, failed, caller FROM fairgate_batches WHERE"
_NEXT = "FROM fairgate_lines WHERE file = %s AND n > %s"
_OPEN = (
    f"{_NEXT} AND NOT EXISTS (SELECT 1 FROM fairgate_lines AS done WHERE done.file IN (%s, %s) AND"
    " done.n = fairgate_lines.n)"
)


class DrivenBatch(NamedTuple):
    """A batch, its tenant, and the gateway that drives it."""

    batch: str
    tenant: str
    owner: str


def _no_room(
    step: Transaction, tenant: str, limits: BatchesConfig, files: int, size: int, less: tuple[str, str] = ("", "")
) -> str:
    """Return why the tenant has no room for these files and bytes, beside the two files `less`; empty if it has room.
    The answer holds until the transaction ends."""
    step.lock(tenant)
    [(kept, kept_bytes)] = step.ask(_SIZE, (tenant, *less))
    if kept + files > limits.files_max:
        return f"you keep {kept} files, results of batches included, and {limits.files_max} may be; delete some"
    if kept_bytes + size > limits.stored_bytes_max:
        return f"your files would take more than {limits.stored_bytes_max} bytes together; delete some"
    return ""


def begin_file(database: Database, tenant: str, file: StoredFile, limits: BatchesConfig) -> str:
    """Reserve room for a file, whose lines come next. Return why there is none, empty if there is room."""
    with database.transaction() as step:
        why = _no_room(step, tenant, limits, 1, file.bytes)
        if not why:
            step.do(_ADD_FILE + "NOTHING", (*file, tenant, 0))
    return why


def add_lines(database: Database, file: str, rows: Iterable[tuple[int, bytes]], *, is_last: bool) -> None:
    with database.transaction() as step:
        step.do_each(_ADD_LINE, [(file, *row) for row in rows])
        if not step.do("UPDATE fairgate_files SET is_whole = %s WHERE id = %s", (int(is_last), file)):
            raise StoreUnavailable("the file took too long to arrive and was forgotten; send it again")


def files(database: Database, tenant: str, now_s: int, which: str, values: Sequence[object]) -> list[StoredFile]:
    """Return a tenant's files that match the SQL condition `which`."""
    present = "tenant = %s AND is_whole = 1 AND (expires_s = 0 OR expires_s > %s)"
    with database.transaction(writes=False) as step:
        found = step.ask(f"SELECT {_COLUMNS} FROM fairgate_files WHERE {present} AND {which}", (tenant, now_s, *values))
    return [StoredFile(*row) for row in found]


def hide_file(database: Database, tenant: str, file: str) -> str:
    """Hide a file before `delete_lines`. Return the batch that still needs it, in which case the file stays; empty if
    none."""
    needed = f"SELECT id FROM fairgate_batches WHERE tenant = %s AND input = %s AND {_LIVE}"
    with database.transaction() as step:
        for [batch] in step.ask(needed, (tenant, file)):
            return str(batch)
        step.do("UPDATE fairgate_files SET is_whole = 0 WHERE id = %s", (file,))
    return ""


def delete_lines(database: Database, file: str) -> bool:
    """Delete the first lines of a file, or an empty file itself. Return whether the file still exists."""
    with database.transaction() as step:
        last, size = _ahead(step, file, 0, ())
        step.do("DELETE FROM fairgate_lines WHERE file = %s AND n <= %s", (file, last))
        if not size:
            step.do("DELETE FROM fairgate_files WHERE id = %s", (file,))
    return size > 0


def ahead(database: Database, file: str, after: int, less: Sequence[str] = ()) -> tuple[int, int]:
    """Return the number of the last line of the next page, and the page's bytes: `PAGE_BYTES` at most, or one line.

    `less`: two files, whose lines are left out by number. No bytes: there are no more lines.
    """
    with database.transaction(writes=False) as step:
        return _ahead(step, file, after, less)


def _ahead(step: Transaction, file: str, after: int, less: Sequence[str]) -> tuple[int, int]:
    last, total = after, 0
    sizes = f"SELECT n, length(line) {_OPEN if less else _NEXT} ORDER BY n LIMIT {PAGE_LINES}"
    for n, size in step.ask(sizes, (file, after, *less)):
        if total and total + size > PAGE_BYTES:
            break
        last, total = n, total + size
    return last, total


def lines(database: Database, file: str, after: int, last: int, less: Sequence[str] = ()) -> list[tuple[int, bytes]]:
    """Return the lines after `after` up to `last`; `less` is that of `ahead`."""
    with database.transaction(writes=False) as step:
        asked = f"SELECT n, line {_OPEN if less else _NEXT} AND n <= %s ORDER BY n"
        found = step.ask(asked, (file, after, *less, last))
    return [(n, bytes(line)) for n, line in found]


def piece(database: Database, file: str, after: int, last: int, begin: int) -> bytes:
    """Return parts of the lines after `after` up to `last`: `PAGE_BYTES` of each at most, from its byte `begin`."""
    asked = f"SELECT substr(line, %s, %s) {_NEXT} AND n <= %s ORDER BY n"
    with database.transaction(writes=False) as step:
        return b"".join([bytes(found) for [found] in step.ask(asked, (begin + 1, PAGE_BYTES, file, after, last))])


def add_batch(database: Database, tenant: str, entry: dict[str, Any], caller: str, batches_max: int) -> bool:
    """Add a batch, in place of the tenant's oldest ended one if there is no room. Return False if none has ended."""
    oldest = f"(SELECT MIN(id) FROM fairgate_batches WHERE tenant = %s AND NOT {_LIVE})"
    with database.transaction() as step:
        [(kept,)] = step.ask("SELECT COUNT(*) FROM fairgate_batches WHERE tenant = %s", (tenant,))
        if kept >= batches_max and not step.do("DELETE FROM fairgate_batches WHERE id = " + oldest, (tenant,)):
            return False
        values = (entry["id"], tenant, entry["input_file_id"], entry["status"], "", 0, 0, 0, json.dumps(entry), caller)
        step.do("INSERT INTO fairgate_batches VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)", values)
    return True


def batches(database: Database, tenant: str, which: str, values: Sequence[object]) -> list[dict[str, Any]]:
    """Return a tenant's batches that match the SQL condition `which`."""
    with database.transaction(writes=False) as step:
        return [_shown(*row) for row in step.ask(f"{_BATCH} tenant = %s AND {which}", (tenant, *values))]


def _shown(entry: str, completed: int, failed: int, *_: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(entry)
    found["request_counts"] |= {"completed": completed, "failed": failed}
    return found


def cancel(database: Database, tenant: str, batch: str, now_s: int) -> None:
    """Cancel a batch that has not ended."""
    live = "UPDATE fairgate_batches SET lease_s = lease_s WHERE tenant = %s AND id = %s AND status <> 'cancelling' AND "
    with database.transaction() as step:
        if step.do(live + _LIVE, (tenant, batch)):
            _change(step, batch, "cancelling", cancelling_at=now_s)


def claim(database: Database, owner: str, now_s: int) -> dict[str, tuple[str, str]]:
    """Renew this owner's claims, and claim free batches: up to `DRIVEN_MAX` of a tenant, and those that are cancelled
    or overdue. Return the owner's batches with their tenants and status."""
    claimed: dict[str, tuple[str, str]] = {}
    overdue = id_of("batch_", now_s - WINDOW_S)
    take = "UPDATE fairgate_batches SET owner = %s, lease_s = %s WHERE id = %s AND (owner = %s OR lease_s < %s)"
    with database.transaction() as step:
        live = step.ask(f"SELECT id, tenant, status, owner, lease_s FROM fairgate_batches WHERE {_LIVE} ORDER BY id")
        driven = Counter(tenant for _, tenant, _, _, lease_s in live if lease_s >= now_s)
        for batch, tenant, status, by, lease_s in live:
            may_take = driven[tenant] < DRIVEN_MAX or status == "cancelling" or batch < overdue
            if (by == owner or may_take) and step.do(take, (owner, now_s + LEASE_S, batch, owner, now_s)):
                claimed[batch] = tenant, status
                driven[tenant] += lease_s < now_s
    return claimed


def release(database: Database, owner: str) -> None:
    """Release all claims of this owner."""
    with database.transaction() as step:
        step.do("UPDATE fairgate_batches SET owner = '', lease_s = 0 WHERE owner = %s", (owner,))


def driven(database: Database, batch: str) -> tuple[dict[str, Any], str]:
    """Return a batch and its author."""
    with database.transaction(writes=False) as step:
        [row] = step.ask(f"{_BATCH} id = %s AND {_LIVE}", (batch,))
    return _shown(*row), row[3]


def write(
    database: Database, of: DrivenBatch, now_s: int, results: Sequence[LineResult], counts: UsageCounts, bytes_max: int
) -> list[LineResult]:
    """Store results of lines and their usage, each line once. Return the results that are stored, by this call or by
    an earlier one: after a fault the caller writes the results again. Only the batch's owner adds new results."""
    output, errors = files_of(of.batch)
    grown = "UPDATE fairgate_files SET bytes = bytes + %s WHERE id = %s"
    with database.transaction() as step:
        is_owner = _is_owner(step, of, now_s)
        step.lock(of.tenant)
        [(_, kept)] = step.ask(_SIZE, (of.tenant, "", ""))
        noted: list[LineResult] = []
        failed = completed = 0
        counts.take()  # drops the counts of a failed transaction
        for one in results:
            if before := step.ask(_NOTED, (output, errors, one.n)):
                [(file, line)] = before
                if bytes(line) in (one.line, one.instead):
                    noted.append(one._replace(is_error=file == errors))
                continue
            if not is_owner:
                continue
            if one.instead and kept + len(one.line) > bytes_max:
                one = one._replace(line=one.instead, is_error=True, instead=b"")
            file = errors if one.is_error else output
            step.do(_ADD_LINE, (file, one.n, one.line))
            failed, completed = failed + one.is_error, completed + (not one.is_error)
            if one.record is not None:
                counts.ended(one.record)
            if one.instead:
                kept += len(one.line)
                step.do(grown, (len(one.line), file))
            noted.append(one)
        add_sums(step, counts.take())
        added = "UPDATE fairgate_batches SET completed = completed + %s, failed = failed + %s WHERE id = %s"
        step.do(added, (completed, failed, of.batch))
    return noted


def begin(database: Database, of: DrivenBatch, now_s: int, checks: LineChecker, limits: BatchesConfig) -> bool:
    """Begin a batch whose file was checked. The batch fails if there are faults, or no room for its results. Return
    whether it runs."""
    results, faults, size = files_of(of.batch), checks.faults, checks.unanswered_bytes
    with database.transaction() as step:
        if not _is_owner(step, of, now_s):
            return False
        if not faults and (why := _no_room(step, of.tenant, limits, len(results), size, results)):
            checks.fault(None, "no_room", why, None)
        for file, room in zip(results, (0, size), strict=True) if not faults else ():
            step.do(_ADD_FILE + "NOTHING", (file, "batch_output", "", room, now_s, 0, of.tenant, 0))
        counts = {"total": 0 if faults else checks.total, "completed": 0, "failed": 0}
        errors, status = ({"object": "list", "data": faults}, "failed") if faults else (None, "in_progress")
        _change(step, of.batch, status, errors=errors, request_counts=counts, **{f"{status}_at": now_s})
    return not faults


def end(database: Database, of: DrivenBatch, now_s: int, status: str) -> None:
    """Give the batch its last status, and its files to its tenant."""
    sums = "SELECT COUNT(*), COALESCE(SUM(length(line)), 0) FROM fairgate_lines WHERE file = %s"
    ids: dict[str, str | None] = {}
    with database.transaction() as step:
        if not _is_owner(step, of, now_s):
            return
        [(entry,)] = step.ask("SELECT entry FROM fairgate_batches WHERE id = %s", (of.batch,))
        expiry = json.loads(entry).get("output_expires_after")
        expires_s = now_s + expiry["seconds"] if expiry else 0
        for name, file in zip(("output", "error"), files_of(of.batch), strict=True):
            [(lines, size)] = step.ask(sums, (file,))
            if lines:
                shown = StoredFile(file, "batch_output", f"{of.batch}_{name}.jsonl", int(size), now_s, expires_s)
                step.do(_END_FILE, (*shown, of.tenant, 1))
            else:
                step.do("DELETE FROM fairgate_files WHERE id = %s", (file,))
            ids[f"{name}_file_id"] = file if lines else None
        _change(step, of.batch, status, **ids, finalizing_at=now_s, **{f"{status}_at": now_s})


def _is_owner(step: Transaction, of: DrivenBatch, now_s: int) -> bool:
    """Return whether the owner still has the claim. If so the claim is renewed, and stays until the transaction
    ends."""
    mine = f"UPDATE fairgate_batches SET lease_s = %s WHERE id = %s AND owner = %s AND {_LIVE}"
    return step.do(mine, (now_s + LEASE_S, of.batch, of.owner)) > 0


def _change(step: Transaction, batch: str, status: str, **fields: Any) -> None:
    """Replace the status and these fields of a batch."""
    [(entry,)] = step.ask("SELECT entry FROM fairgate_batches WHERE id = %s", (batch,))
    changed = json.dumps(json.loads(entry) | fields | {"status": status})
    step.do("UPDATE fairgate_batches SET status = %s, entry = %s WHERE id = %s", (status, changed, batch))


def forget(database: Database, now_s: int, keep_days: int) -> list[tuple[str, str]]:
    """Delete old batches. Return some files to delete, with their tenants: old, expired or incomplete ones that no
    running batch needs."""
    kept_s = now_s - keep_days * DAY_S
    old = (
        "SELECT tenant, id FROM fairgate_files WHERE (made_s < %s OR (is_whole = 0 AND made_s < %s) OR (expires_s > 0"
        " AND expires_s <= %s)) AND NOT EXISTS (SELECT 1 FROM fairgate_batches WHERE (input = fairgate_files.id OR"
        f" fairgate_files.id IN ('file-' || substr(fairgate_batches.id, 7) || 'o', 'file-' || substr("
        f"fairgate_batches.id, 7) || 'e')) AND {_LIVE}) LIMIT {FORGOTTEN_AT_ONCE}"
    )
    with database.transaction() as step:
        step.do(f"DELETE FROM fairgate_batches WHERE id < %s AND NOT {_LIVE}", (id_of("batch_", kept_s),))
        return [(str(tenant), str(file)) for tenant, file in step.ask(old, (kept_s, now_s - ARRIVES_S, now_s))]
