"""The command `fairgate explain`: why did requests wait? The gateway or its access log answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from gateway.commands.admin import AdminRequestError, admin_of, asks_admin
from gateway.commands.common import CommandError, loaded
from gateway.commands.replaying import readable

if TYPE_CHECKING:
    from gateway.telemetry.log_line import LogLine
    from gateway.usage.usage_report import UsageQuery


@click.command()
@click.argument("request_id", required=False)
@asks_admin
@click.option(
    "--log",
    "logs",
    multiple=True,
    help="The access log, with its rotated files; -: standard input.  [default: the file's]",
)
@click.option("--tenant", help="Explain the waits of this tenant's requests.")
@click.option("--user", help="With --tenant: only this user, by the name that requests give.")
@click.option("--since", default="24h", show_default=True, help="30m, 24h, 7d, today, 8:00, a day, or a time; by UTC.")
@click.option("--until", help="End, written like --since.  [default: now]")
@click.option("--json", "as_json", is_flag=True, help="Print all numbers.")
def explain(
    request_id: str | None, path: Path | None, admin: str | None, logs: tuple[str, ...], tenant: str | None,
    user: str | None, since: str, until: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Explain why a request was dispatched, refused or kept waiting. REQUEST_ID is the x-request-id of its answer, or
    the client's own.

    \b
    fairgate explain req_0123456789abcdef -c config.yaml
    fairgate explain --tenant chat --since 8:00 --until 10:00 -c config.yaml
    kubectl logs deploy/fairgate | fairgate explain --tenant chat --log -

    The gateway knows its last decisions; the access log has older ones. Exits with 1 if neither knows.
    """
    from gateway.usage.usage_report import InvalidUsageQuery, UsageQuery
    from simulation.traces.lines import TraceError

    if (request_id is None) == (tenant is None):
        raise click.UsageError("give either the id of a request, or --tenant NAME")
    try:
        query = UsageQuery(since, until, ["tenant"], datetime.now(UTC))
        with ExitStack() as stack:
            if request_id is not None:
                text, numbers = _explain_request(request_id, path, admin, _files(path, logs, stack), asks=not logs)
            else:
                assert tenant is not None
                text, numbers = _explain_tenant(tenant, user, query, _files(path, logs, stack))
    except (InvalidUsageQuery, TraceError, OSError) as error:
        raise CommandError(f"fairgate: {error}") from None
    click.echo(json.dumps(numbers, indent=2) if as_json else text)


def _files(path: Path | None, logs: Sequence[str], stack: ExitStack) -> list[Path]:
    """Return the access log and its rotated files. Raise OSError if a given one cannot be read."""
    if not logs:
        log = loaded(path).access_log if path is not None else "off"
        return [] if log in ("stdout", "off") else _list_rotated(log)
    return list(dict.fromkeys(one for log in logs for one in _list_rotated(log) or [readable(log, stack)]))


def _list_rotated(log: str) -> list[Path]:
    return sorted(one for one in Path(log).parent.glob(f"{escape(Path(log).name)}*") if one.is_file())


def _explain_request(
    request_id: str, path: Path | None, admin: str | None, files: Sequence[Path], *, asks: bool
) -> tuple[str, Any]:
    """Return the explanation in words and as numbers. Raise AdminRequestError or TraceError."""
    from gateway.telemetry.logged import LogExcerpt

    admin_error, status = "", 404
    if asks:
        try:
            answer = admin_of(path, admin).ask(f"/explain/{quote(request_id, safe='')}")
            return answer["sentence"], answer
        except AdminRequestError as error:
            if error.status not in (0, 404):
                raise
            status = error.status
            admin_error = "no decision on it is remembered; " if status else f"{error.text}; "
    logged = LogExcerpt(
        files, lambda line: request_id in (line.request_id, line.client_request_id), has=request_id, is_last=True
    )
    if not logged.lines:
        log = "it is not in the log" if files else "no log is known"
        raise AdminRequestError(f"{request_id}: {admin_error}{log}", status)
    return logged.sentence(), logged.numbers()


def _explain_tenant(tenant: str, user: str | None, query: UsageQuery, files: Sequence[Path]) -> tuple[str, Any]:
    """Return the explanation in words and as numbers. Raise AdminRequestError or TraceError."""
    from gateway.telemetry.access_log import hidden
    from gateway.telemetry.logged import LogExcerpt, arrived_s

    if not files:
        raise click.UsageError("which access log? Give --log FILE, or -c FILE that has an `access_log`")
    since_s, until_s = query.since.timestamp(), query.until.timestamp()

    def is_asked(line: LogLine) -> bool:
        is_theirs = line.tenant == tenant and (user is None or line.user == hidden(user))
        return is_theirs and since_s <= arrived_s(line) < until_s

    logged = LogExcerpt([one for one in files if one.stat().st_mtime >= since_s], is_asked)
    if not logged.lines:
        whose = tenant if user is None else f"{user} of {tenant}"
        raise AdminRequestError(f"no request of {whose} came {query.describe()}", 404)
    return "\n".join(logged.summary()) if len(logged.lines) > 1 else logged.sentence(), logged.numbers()
