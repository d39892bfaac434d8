"""The command `fairgate`. Imports that a command needs are made when it runs, so that help comes at once."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from gateway import BUILD, __version__
from gateway.commands.admin import AdminRequestError, admin_of, asks_admin, drain, reload, resume
from gateway.commands.common import BAD_INPUT, CommandError, config_option, counted
from gateway.commands.explaining import explain
from gateway.commands.key_commands import keys
from gateway.commands.replaying import replay
from gateway.commands.serving import allow_files, run, serve_one, supervise
from gateway.commands.top import top
from gateway.commands.usage_command import usage


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fairgate", message=f"%(prog)s %(version)s, {BUILD}")
def main() -> None:
    """Fair serving of large language models: a gateway in front of vLLM and other OpenAI-compatible engines.

    \b
    fairgate serve --backend http://localhost:8000      in front of one engine, no file needed
    fairgate serve -c config.yaml                       tenants, weights and pools from a file
    """


def _host(context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    from gateway.config.checks import split_address

    if text is not None and not split_address(f"[{text}]:0" if ":" in text else f"{text}:0")[0]:
        raise click.BadParameter("should be an address or a name without a port, such as 0.0.0.0 or ::1")
    return text


def _parse_workers(context: click.Context, option: click.Parameter, text: str | None) -> int | str | None:
    if text is None or text == "auto":
        return text
    found: int = click.IntRange(1, 256)(text, option, context)
    return found


@main.command()
@config_option("YAML file; see config.example.yaml.", "config_path")
@click.option("--backend", "backends", multiple=True, help="URL of an engine, in place of a file; repeat for several.")
@click.option("--host", callback=_host, help="Address to listen on.  [default: the file's, or 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on.  [default: the file's, or 8080]")
@click.option(
    "--admin-port", type=click.IntRange(0, 65535), help="Port of the admin listener.  [default: the file's, or 8190]"
)
@click.option(
    "--workers",
    callback=_parse_workers,
    metavar="INTEGER|auto",
    help="Processes that share the port; auto: one for each core.  [default: the file's, or 1]",
)
@click.option(
    "--access-log",
    help="Destination of request lines: stdout, off, or a file.  [default: the file's, or stdout; with --backend on a "
    "terminal off]",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Lowest level of messages on standard error.  [default: the file's, or info]",
)
def serve(config_path: Path | None, backends: tuple[str, ...], **options: Any) -> None:
    """Run the gateway. An option overrides the file.

    \b
    fairgate serve --backend http://localhost:8000 --port 8080
    fairgate serve -c config.yaml
    """
    from gateway.config.load import ConfigError, config_for_backends, load_config

    if (config_path is None) == (not backends):
        raise click.UsageError("give either -c FILE or at least one --backend URL (try: fairgate serve --help)")
    if backends and options["access_log"] is None and sys.stdout.isatty():
        options["access_log"] = "off"  # Request lines would scroll the examples at the start out of sight.
    try:
        load = None
        if config_path is not None:
            load = partial(load_config, config_path.absolute(), **options)
            config = load_config(config_path, **options)
        else:
            config = config_for_backends([*backends], **options)
    except ConfigError as error:
        raise CommandError(str(error)) from None
    if config.admin_warning:
        click.echo(f"fairgate: warning: admin {config.admin_warning}", err=True)
    allow_files()
    if config.workers > 1:
        supervise(config, load)
    else:
        run(lambda: serve_one(config, load))


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, help="Port to listen on; 0: a free one.")
@click.option("--profile", default="demo", show_default=True, help="Engine and GPU to imitate.")
@click.option("--model", "models", multiple=True, default=("simulated",), show_default=True, help="Served model name.")
def sim(host: str, port: int, profile: str, models: tuple[str, ...]) -> None:
    """Run a simulated vLLM: real batching, KV cache, preemption and metrics, invented text.

    \b
    fairgate sim --port 8000 --profile h100-llama3-8b
    """
    from backends.simulated.engine_profiles import UnknownProfileError
    from backends.simulated.simulated_server import run as run_engine

    try:
        run(lambda: run_engine(host, port, profile, models))
    except UnknownProfileError as error:
        raise click.BadParameter(str(error), param_hint="--profile") from error


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--shares", is_flag=True, help="Print the tree of groups and tenants, with the part of each if all ask for more."
)
@click.option("--probe", is_flag=True, help="Ask the engines, too; print the kind of each, and what it cannot tell.")
def check(file: Path, shares: bool, probe: bool) -> None:
    """Check a config file and the files that it names. List every fault with its place, and exit with 2 if there is
    one. A warning is no fault.

    \b
    fairgate check config.yaml
    fairgate check config.yaml --probe      exits with 1 if an engine does not answer
    """
    from gateway.commands.checking import findings
    from gateway.config.load import ConfigError, check_config

    try:
        config, found = check_config(file, findings)
    except ConfigError as error:
        raise CommandError(str(error)) from None
    for fault in found:
        click.echo(str(fault), err=True)
    if not all(fault.is_warning for fault in found):
        sys.exit(BAD_INPUT)
    counts = {"tenant": len(config.tenants), "pool": len(config.pools)}
    counts |= {"backend": sum(len(pool.backends) for pool in config.pools), "worker": config.workers}
    if shares:
        from gateway.pool.parts import tree_lines

        for line in tree_lines(config):
            click.echo(line)
    said = [counted(count, noun) for noun, count in counts.items() if noun != "worker" or count > 1]
    click.echo(f"{file}: ok: {', '.join(said)}")
    if probe:
        from gateway.commands.checking import probed

        lines, all_answered = asyncio.run(probed(config))
        click.echo("\n".join(lines))
        sys.exit(0 if all_answered else 1)


@main.command()
def schema() -> None:
    """Print the JSON schema of the config file, for editors."""
    from gateway.config.model import json_schema

    click.echo(json_schema(), nl=False)


main.add_command(keys)
for command in (explain, usage, replay, reload, drain, resume, top):
    main.add_command(command)


@main.command()
@asks_admin
def healthcheck(path: Path | None, admin: str | None) -> None:
    """Exit with 0 if the gateway and all its workers are ready, else with 1 (for containers)."""
    import json

    try:
        click.echo(json.dumps(admin_of(path, admin).ask("/ready")))
    except AdminRequestError as error:
        raise CommandError(error.message, 1) from None  # Docker knows no other number.


if __name__ == "__main__":
    main(prog_name="fairgate")
