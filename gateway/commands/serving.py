"""How does a gateway process run? Its event loop, signals, drain and workers, and its lines at the start."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from gateway import BUILD, __version__
from gateway.commands.common import BAD_INPUT, CommandError, counted, local_url

if TYPE_CHECKING:
    from gateway.config.model import Config
    from gateway.process.gateway import Gateway
    from gateway.process.stderr_log import StderrLog
    from gateway.process.supervisor import Child

    Load = Callable[[], Config]
    """Reader of the config; raises ConfigError."""

THREAD_TURN_S: Final = 0.0005
"""Seconds after which a computing thread (a reload, a page of metrics) yields to the event loop.

At CPython's 5 ms each read and write of a stream may wait that long: a reload of 10,000 tenants then holds up streams
for 30 ms, at this value for 3 ms.
"""
ENGINES_SHOWN: Final = 8
"""Limit on the engines of a pool in the lines at the start."""


def run(coroutine: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine, on uvloop. Exit with 1 or BAD_INPUT if it cannot serve."""
    import uvloop

    from gateway.pool.pools import CannotTakeOver
    from gateway.storage.store_errors import StoreRefused

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(coroutine())
    except KeyboardInterrupt:
        sys.exit(130)
    except (StoreRefused, CannotTakeOver, OSError) as error:
        click.echo(f"fairgate: {error}", err=True)
        # A supervisor tells from the worker's exit code whether the input was bad.
        sys.exit(1 if isinstance(error, OSError) else BAD_INPUT)


def allow_files() -> None:
    """Raise the limit on open files to the most that the system grants: every stream needs two sockets."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def supervise(config: Config, load: Load | None) -> None:
    """Serve with several processes, and exit with their status. `load` reads the config file again, if any."""
    # Shared modules are loaded once, before the fork, so that each worker starts within milliseconds.
    import gateway.process.gateway  # noqa: F401
    from gateway.process import hub
    from gateway.process.supervisor import share_of, supervise, with_keys, with_known_keys

    config, minted = with_keys(config)
    started = config
    again = None if load is None else lambda: with_known_keys(load(), started)

    def serve(config: Config, worker: Child) -> None:
        index = worker.worker_slot.index
        own = None if again is None else lambda: share_of(again(), index)
        run(lambda: serve_one(share_of(config, index), own, worker))

    def serve_hub(config: Config, child: Child) -> None:
        _log(config)
        run(lambda: hub.serve_hub(config, again, child))

    def announce(port: int, admin_port: int) -> None:
        lines = [*_start_lines(config, port, admin_port), *_missing_key_lines(config), *_for_this_run(minted)]
        click.echo("\n".join(lines), err=True)

    try:
        status = supervise(config, serve, serve_hub, announce, again)
    except OSError as error:
        raise CommandError(f"fairgate: {error}", 1) from None
    sys.exit(status)


def _log(config: Config) -> StderrLog:
    """Send this process's log to standard error."""
    import logging

    from gateway.process.stderr_log import StderrLog

    log = StderrLog()  # A reader that stops reading must not delay requests.
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=config.log_level.upper(), handlers=[log])
    return log


def _prepare_interpreter() -> None:
    """Keep the interpreter's own work from delaying streams.

    Objects of the start stay, and so do most that are learned later. A collection of the oldest generation scans all of
    these and stops every stream meanwhile, so it runs thousands of times less often than usual. The young generations
    are collected so often that a collection takes less than a millisecond.
    """
    import gc

    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 5, 100_000)
    sys.setswitchinterval(THREAD_TURN_S)


async def serve_one(config: Config, load: Load | None = None, worker: Child | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends the drain. A worker ends with its supervisor.

    SIGHUP reloads the config by `load`.
    """
    import signal

    from gateway.process import systemd
    from gateway.process.gateway import Gateway
    from gateway.telemetry.background import Tasks

    log = _log(config)
    if worker is None:
        inherited = systemd.inherited_listeners()
        clients = [inherited[systemd.CLIENTS]] if systemd.CLIENTS in inherited else []
        gateway = Gateway(config, clients, admin_listener=inherited.get(systemd.OPERATOR), load=load)
    else:
        gateway = Gateway(config, worker.listeners, load=load, worker_slot=worker.worker_slot)
    reloads = Tasks()
    stop, now = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (now if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM,) if worker is not None else (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    loop.add_signal_handler(signal.SIGHUP, lambda: reloads.start(_reload(gateway, log)))

    def orphaned(pipe: int) -> None:
        loop.remove_reader(pipe)
        signalled()

    try:
        await gateway.start()
        _prepare_interpreter()
        if worker is None:
            log.write_line(_announcement(gateway))
            systemd.notify("READY=1")
        else:
            loop.add_reader(worker.liveness_pipe, orphaned, worker.liveness_pipe)
            log.write_line(f"fairgate: {worker.name} serves (process {os.getpid()})")
        await stop.wait()
        if worker is None:
            systemd.notify("STOPPING=1")
            log.write_line(f"fairgate: draining for at most {gateway.config.drain_s:g} s; a second signal ends at once")
    finally:
        await reloads.stop()
        draining = asyncio.ensure_future(gateway.stop(gateway.config.drain_s))
        hurried = asyncio.ensure_future(now.wait())
        await asyncio.wait({draining, hurried}, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not draining.done():
            draining.cancel()
            await gateway.stop(0.0)


async def _reload(gateway: Gateway, log: StderrLog) -> None:
    """Reload the config, and print each newly minted key as at the start."""
    known = set(gateway.minted_keys)
    await gateway.reloading.run()
    if lines := _for_this_run({tenant: key for tenant, key in gateway.minted_keys.items() if tenant not in known}):
        log.write_line("\n".join(lines))


def _url(config: Config, port: int) -> str:
    """Return the gateway's URL for clients on this machine."""
    return local_url(config.listen_addresses[0][0], port, "http" if config.tls is None else "https")


def _start_lines(config: Config, port: int, admin_port: int) -> list[str]:
    """Return the first lines at the start: where the gateway serves, and its version."""
    workers, of_all = (f" with {config.workers} workers", " for all of them") if config.workers > 1 else ("", "")
    admin = local_url(config.admin_address[0], admin_port)
    return [
        f"fairgate: serving on {_url(config, port)}{workers}, admin on {admin}{of_all} (/ is a live page)",
        f"  version {__version__}, {BUILD}",
    ]


def _missing_key_lines(config: Config) -> list[str]:
    """Return a hint for tenants without a key in the config, if keys can be issued. No key is minted for such a tenant,
    since the tenant may have keys in the table, or its last key may have been revoked.
    """
    names = [tenant.name for tenant in config.tenants if not tenant.keys]
    if not config.issues_keys or not names:
        return []
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return [
        f"  without a key in the config: {', '.join(names[:5])}{more}",
        f"    fairgate keys create --tenant {names[0]} -c FILE   makes one that is taken at once",
    ]


def _for_this_run(minted: Mapping[str, str]) -> list[str]:
    keys = [f"    {tenant:<12} {key}" for tenant, key in minted.items()]
    return ["  keys for this run only, for tenants that have none in the config:", *keys] if keys else []


def _announcement(gateway: Gateway) -> str:
    """Return the lines at the start: the gateway's addresses, pools, faults and examples."""
    lines = _start_lines(gateway.config, gateway.port, gateway.admin_port)
    for pool in gateway.pools:
        models = ", ".join(pool.models()) or "(not known yet)"
        backends = counted(len(pool.backends), "backend")
        lines.append(f"  pool {pool.name}: {backends}, policy {pool.policy_name}, models: {models}")
        known = [each for each in pool.backends.values() if each.health.healthy]
        lines += [f"    backend {each.name} is {each.adapter.description()}" for each in known[:ENGINES_SHOWN]]
    if gateway.config.open_access:
        lines.append("  open access: any key is accepted, each distinct key is its own tenant of equal weight")
    if gateway.config.access_log not in ("stdout", "off"):
        lines.append(f"  one line for each request: {gateway.config.access_log}")
    elif gateway.config.access_log == "off" and sys.stdout.isatty():
        lines.append("  one line for each request: off; --access-log FILE or stdout writes them")
    lines += [f"  not ready: {fault}" for fault in gateway.not_ready()]
    if (state := gateway.store_state()) is not None:
        lines.append(f"  state: {state}")
    lines += _missing_key_lines(gateway.config)
    if gateway.minted_keys:
        lines += _for_this_run(gateway.minted_keys)
        url = _url(gateway.config, gateway.port)
        [key, *_] = gateway.minted_keys.values()
        lines += _examples(url, key, next(iter(gateway.pools[0].models()), "MODEL"))
    return "\n".join(lines)


def _examples(url: str, key: str, model: str) -> list[str]:
    body = f'{{"model":"{model}","stream":true,"max_tokens":20,"messages":[{{"role":"user","content":"Hello"}}]}}'
    curl = f"curl {url}/v1/chat/completions -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json'"
    python = (
        f"from openai import OpenAI; c = OpenAI(base_url='{url}/v1', api_key='{key}').chat.completions; "
        f"a = c.create(model='{model}', max_tokens=20, messages=[{{'role': 'user', 'content': 'Hello'}}]); "
        "print(a.choices[0].message.content)"
    )
    return [
        "  try it:",
        f"    {curl} -N -d '{body}'",
        "  in Python, after pip install openai:",
        f'    python -c "{python}"',
    ]
