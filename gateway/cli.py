"""The command `fairgate`. What a command needs is imported when it runs, so that help comes at once."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from gateway.app import Gateway
    from gateway.config.model import Config

__all__ = ["main"]

BAD_CONFIG = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fairgate")
def main() -> None:
    """Fair serving of large language models: a gateway in front of vLLM and other OpenAI-compatible engines.

    \b
    fairgate serve --backend http://localhost:8000      in front of one engine, no file needed
    fairgate serve -c config.yaml                       tenants, weights and pools from a file
    """


@main.command()
@click.option(
    "-c", "--config", "config_path", type=click.Path(path_type=Path), help="YAML file; see config.example.yaml."
)
@click.option("--backend", "backends", multiple=True, help="URL of an engine; repeat for several. Needs no file.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on (with --backend).")
@click.option("--port", default=8080, show_default=True, help="Port to listen on (with --backend).")
@click.option("--admin-port", default=9090, show_default=True, help="Port of the admin listener (with --backend).")
def serve(config_path: Path | None, backends: tuple[str, ...], host: str, port: int, admin_port: int) -> None:
    """Run the gateway.

    \b
    fairgate serve --backend http://localhost:8000 --port 8080
    fairgate serve -c config.yaml
    """
    from gateway.config.load import ConfigError, config_for_backends

    if (config_path is None) == (not backends):
        raise click.UsageError("give either -c FILE or at least one --backend URL (try: fairgate serve --help)")
    try:
        if config_path is not None:
            config = _load(config_path)
        else:
            config = config_for_backends(list(backends), host, port, admin_port)
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(BAD_CONFIG)
    _run(lambda: _serve(config))


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8000, show_default=True, help="0 takes a free one.")
@click.option("--profile", default="demo", show_default=True, help="Which engine and GPU to imitate.")
@click.option("--model", "models", multiple=True, default=("simulated",), show_default=True, help="Served model name.")
@click.option("--max-num-queued-reqs", type=int, default=None, help="Refuse with 503 above so many, as vLLM does.")
def sim(host: str, port: int, profile: str, models: tuple[str, ...], max_num_queued_reqs: int | None) -> None:
    """Run a simulated vLLM: real batching, KV cache, preemption and metrics, invented text.

    \b
    fairgate sim --port 8000 --profile h100-llama3-8b
    """
    from backends.simulated.profiles import UnknownProfileError
    from backends.simulated.server import run

    try:
        _run(lambda: run(host, port, profile, models, max_num_queued_reqs=max_num_queued_reqs))
    except UnknownProfileError as error:
        raise click.BadParameter(str(error), param_hint="--profile") from error


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
def check(file: Path) -> None:
    """Check a config file; lists every fault with its place and exits with 2 if there is one.

    \b
    fairgate check config.yaml
    """
    from gateway.config.load import ConfigError

    try:
        config = _load(file)
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(BAD_CONFIG)
    backends = sum(len(pool.backends) for pool in config.pools)
    click.echo(f"{file}: ok: {len(config.tenants)} tenants, {len(config.pools)} pools, {backends} backends")


@main.command()
def schema() -> None:
    """Print the JSON schema of the config file, for editors."""
    from gateway.config.model import json_schema

    click.echo(json_schema(), nl=False)


@main.group()
def keys() -> None:
    """Make API keys, and the hashes that go into the config."""


@keys.command()
def create() -> None:
    """Make a new key. The key is for the tenant, the hash is for the config file."""
    from gateway.config.model import hash_key, new_key

    key = new_key()
    click.echo(f"key:  {key}\nhash: {hash_key(key)}")


@keys.command(name="hash")
def hash_() -> None:
    """Hash a key read from standard input (so that it stays out of the shell's history)."""
    from gateway.config.model import hash_key

    key = click.prompt("key", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.readline().strip()
    if not key:
        raise click.UsageError("no key on standard input")
    click.echo(hash_key(key))


@main.command()
@click.option("--url", default="http://127.0.0.1:9090/ready", show_default=True, help="Admin listener.")
def healthcheck(url: str) -> None:
    """Exit with 0 if the gateway is ready, 1 if not (for containers)."""
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=3) as answer:
            click.echo(answer.read().decode())
    except urllib.error.HTTPError as error:
        click.echo(error.read().decode(), err=True)
        sys.exit(1)
    except OSError as error:
        click.echo(f"{url}: {error}", err=True)
        sys.exit(1)


def _load(path: Path) -> Config:
    from gateway.config.load import load_config

    return load_config(path)


def _run(coroutine: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run on uvloop where there is one."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(coroutine())
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        click.echo(f"fairgate: {error}", err=True)
        sys.exit(1)


async def _serve(config: Config) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends at once."""
    import logging
    import signal

    from gateway.app import Gateway

    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO, stream=sys.stderr)
    gateway = Gateway(config)
    stop, now = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (now if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    try:
        await gateway.start()
        _announce(gateway)
        await stop.wait()
        click.echo(f"fairgate: draining for at most {config.drain_s:g} s; a second signal ends at once", err=True)
    finally:
        draining = asyncio.ensure_future(gateway.stop(config.drain_s))
        hurried = asyncio.ensure_future(now.wait())
        await asyncio.wait({draining, hurried}, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not draining.done():
            draining.cancel()
            await gateway.stop(0.0)


def _announce(gateway: Gateway) -> None:
    """Say where it is and how to try it."""
    host, _ = gateway.config.listen_address
    admin_host, _ = gateway.config.admin_address
    url = f"http://{'127.0.0.1' if host in ('', '0.0.0.0') else host}:{gateway.port}"
    lines = [f"fairgate: serving on {url}, admin on http://{admin_host}:{gateway.admin_port} (/ready, /metrics)"]
    for pool in gateway.pools:
        models = ", ".join(pool.models()) or "(not known yet)"
        lines.append(f"  pool {pool.name}: {len(pool.backends)} backends, policy {pool.policy_name}, models: {models}")
    if gateway.config.open_access:
        lines.append("  open access: any key is accepted, each distinct key is its own tenant of equal weight")
    lines += [f"  not ready: {fault}" for fault in gateway.not_ready()]
    if gateway.minted_keys:
        lines.append("  keys for this run only, for tenants that have none in the config:")
        lines += [f"    {minted.tenant:<12} {minted.key}" for minted in gateway.minted_keys]
        lines += _examples(url, gateway.minted_keys[0].key, next(iter(gateway.pools[0].models()), "MODEL"))
    click.echo("\n".join(lines), err=True)


def _examples(url: str, key: str, model: str) -> list[str]:
    def body(stream: str) -> str:
        return f'{{"model":"{model}",{stream}"max_tokens":20,"messages":[{{"role":"user","content":"Hello"}}]}}'

    curl = f"curl {url}/v1/chat/completions -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json'"
    python = (
        f"from openai import OpenAI; c = OpenAI(base_url='{url}/v1', api_key='{key}').chat.completions; "
        f"a = c.create(model='{model}', max_tokens=20, messages=[{{'role': 'user', 'content': 'Hello'}}]); "
        "print(a.choices[0].message.content)"
    )
    streaming = '"stream":true,'
    return [
        "  try it:",
        f"    {curl} -d '{body('')}'",
        f"    {curl} -N -d '{body(streaming)}'",
        f'    .venv/bin/python -c "{python}"',
    ]


if __name__ == "__main__":
    main()
