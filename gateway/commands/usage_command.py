"""The command `fairgate usage`: who used how much? It reads the database itself, so it needs no running gateway."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import click

from gateway.commands.common import BAD_INPUT, CommandError, config_option, loaded


@click.command()
@config_option("The gateway's file, which has `usage:`.", required=True)
@click.option("--since", default="24h", show_default=True, help="24h, 7d, today, a day, or a time; by UTC.")
@click.option("--until", help="End, written like --since.  [default: now]")
@click.option(
    "--by",
    default="tenant",
    show_default=True,
    help="Rows: hour, day, month, group, tenant, key, app, user, model; with commas.",
)
@click.option("--user", help="Only this user, by the name that requests give.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as /usage does.")
def usage(path: Path, since: str, until: str | None, by: str, user: str | None, as_json: bool) -> None:
    """Print requests, tokens and time in the queue, in whole hours.

    \b
    fairgate usage -c config.yaml --since today
    fairgate usage -c config.yaml --since 7d --by day,tenant,model --json
    fairgate usage -c config.yaml --since 2027-01-01 --by group,month
    fairgate usage -c config.yaml --by tenant,key

    A tenant counts in each group around it. Users are shown by a hash of their names, as in the access log.
    """
    from datetime import UTC, datetime

    from gateway.storage.store_errors import StoreError, StoreUnavailable
    from gateway.usage.database import Database
    from gateway.usage.usage_report import InvalidUsageQuery, UsageQuery, read

    config = loaded(path)
    if config.usage is None:
        raise CommandError(f"fairgate: {path} has no `usage:`, so nothing was counted")
    try:
        query = UsageQuery(since, until, by.split(",") if by else [], datetime.now(UTC))
        with closing(Database(config.usage, makes=False)) as database:
            report = read(database, query, config.usage.prices, around=config.around, user=user)
            click.echo(report.as_json() if as_json else report.as_table(), nl=False)
    except (StoreError, InvalidUsageQuery) as error:
        raise CommandError(f"fairgate: {error}", 1 if isinstance(error, StoreUnavailable) else BAD_INPUT) from None
