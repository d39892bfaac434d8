"""How do several processes serve one port? A supervisor that decides nothing: it binds, starts, restarts and ends them.

Every worker is a whole gateway with a listening socket of its own on the same port, among which the kernel spreads
connections evenly (SO_REUSEPORT). The sockets are opened here and stay open here: what arrives while a worker is
replaced waits for its successor. Workers share nothing, so each owns an equal part of every engine and of every limit.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from gateway.config.changes import changes, needs_restart
from gateway.config.load import ConfigError, Fault
from gateway.config.model import Config, KeyConfig, hash_key
from gateway.config.policy import PolicyConfig, policy_settings
from gateway.http.sockets import listening
from gateway.request.identity import Keyring, MintedKey

__all__ = ["Worker", "share_of", "supervise", "with_keys", "with_known_keys"]

BACKLOG = 1024
RESTART_S = 0.1
RESTART_S_MAX = 10.0
LONG_LIFE_S = 60.0
"""A worker that lived so long is started again at once, as if it had never failed."""
KILL_AFTER_S = 10.0
CANNOT_SERVE = (1, 2)
"""Exit statuses of a worker that could not listen, or whose Redis may not be used: no other could, so all end."""
CRASHED = 70
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}

Serve = Callable[[Config, "Worker"], None]


class Worker:
    """One place among the workers, held by one process after another: its number, its socket and its lifeline."""

    def __init__(self, index: int, listener: socket.socket, lifeline: int) -> None:
        self.index = index
        self.listener = listener
        self.lifeline = lifeline
        """A pipe that ends when the supervisor does, in whatever way."""
        self.pid = 0
        self.started_s = 0.0
        self.due_s = 0.0
        self.pause_s = 0.0


def share_of(config: Config, index: int) -> Config:
    """The configuration of one worker: its own admin port and state file, and its part of whatever is counted.

    Of the engines, that is the configured slots; what they say of themselves is divided by the ledger. Workers that
    share their state are replicas: they divide only what one machine has, the bounds of the queue and of connections.
    """
    count = config.workers
    limits = config.limits
    own = {
        name: max(1, bound // count)
        for name in ("queue_requests_max", "queue_bytes_max", "connections_max", "client_connections_max")
        if (bound := getattr(limits, name)) is not None
    }
    own["queue_bytes_max"] = max(own["queue_bytes_max"], limits.body_bytes_max)
    host, _, port = config.admin.rpartition(":")
    config = config.model_copy(
        update={
            "admin": f"{host}:{int(port) + index if int(port) else 0}",
            "state_file": None if config.state_file is None else f"{config.state_file}.{index}",
            "limits": limits.model_copy(update=own),
        }
    )
    return config if config.state.redis_url is not None else _part_of(config, count)


def _part_of(config: Config, count: int) -> Config:
    """One of so many equal parts of every engine and every limit."""

    def part(number: int | None) -> int | None:
        return None if number is None else max(1, number // count)

    def parts(section: Any, *names: str) -> Any:
        found = {name: part(value) for name in names if isinstance(value := getattr(section, name), int)}
        return section.model_copy(update=found)

    def quota(section: Any) -> Any:
        return parts(section, "requests_per_minute", "tokens_per_minute", "concurrent", "tokens_per_day")

    def policy(section: PolicyConfig) -> PolicyConfig:
        # What is not set is the policy's own default, and is divided as well.
        known = policy_settings(section.name).get("requests_per_minute")
        if known is None:
            return section
        whole = section.settings().get("requests_per_minute", known.default)
        return section.model_copy(update={"requests_per_minute": part(whole)})

    pools = [
        pool.model_copy(
            update={
                "backends": tuple(parts(backend, "max_num_seqs") for backend in pool.backends),
                "capacity": parts(pool.capacity, "max_concurrency"),
            }
        )
        for pool in config.pools
    ]
    throttle = {
        name: parts(getattr(config.throttle, name), "starts", "requests", "tokens")
        for name in ("user", "app_user", "app")
    }
    tenants = [
        tenant if tenant.quota is None else tenant.model_copy(update={"quota": quota(tenant.quota)})
        for tenant in config.tenants
    ]
    return config.model_copy(
        update={
            "policy": policy(config.policy),
            "pools": tuple(pools),
            "quota": quota(config.quota),
            "throttle": config.throttle.model_copy(update=throttle),
            "tenants": tuple(tenants),
        }
    )


def with_keys(config: Config) -> tuple[Config, list[MintedKey]]:
    """The configuration with a key for every tenant: minted once, so that all workers know the same."""
    minted = Keyring(config.tenants, open_access=config.open_access, mints=not config.keys_are_shared).minted
    keys = {each.tenant: KeyConfig(hash=hash_key(each.key)) for each in minted}
    tenants = [
        tenant.model_copy(update={"keys": (keys[tenant.name],)}) if tenant.name in keys else tenant
        for tenant in config.tenants
    ]
    return config.model_copy(update={"tenants": tuple(tenants)}), minted


def with_known_keys(config: Config, before: Config) -> Config:
    """The configuration as it is now, with the keys that were minted at the start, by what it was then. ConfigError if
    a key would have to be minted: the workers would not know the same."""
    if config.keys_are_shared:
        return config
    known = {tenant.name: tenant.keys for tenant in before.tenants}
    tenants = [
        tenant if tenant.keys else tenant.model_copy(update={"keys": known.get(tenant.name, ())})
        for tenant in config.tenants
    ]
    missing = [tenant.name for tenant in tenants if not tenant.keys]
    if missing:
        what = f"{missing[0]} has no key, and one that is made now would be known to one worker only"
        raise ConfigError([Fault("config", 0, 0, "tenants", f"{what}: make one, with `fairgate keys create`")])
    return config.model_copy(update={"tenants": tuple(tenants)})


def supervise(
    config: Config,
    serve: Serve,
    announce: Callable[[int], None],
    say: Callable[[str], None],
    load: Callable[[], Config] | None = None,
) -> int:
    """Run `config.workers` processes of `serve` until SIGTERM or SIGINT; returns the exit status.

    SIGHUP is passed on. A worker that is started later gets what `load` said then, unless that needs a restart of all.

    Must be called before anything has started threads or an event loop, since it forks. OSError if the address is
    taken. `announce` gets the port.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    with listening("the listener for clients", config.listen_address, "listen", "--port"):
        listeners = _listeners(*config.listen_address, config.workers)
    announce(int(listeners[0].getsockname()[1]))
    lifeline, held = os.pipe()
    workers = [Worker(index, listener, lifeline) for index, listener in enumerate(listeners)]
    status, ending, kill_s = 0, False, float("inf")
    while True:
        now = time.monotonic()
        for worker in workers:
            if not worker.pid and not ending and now >= worker.due_s:
                _start(worker, workers, config, serve, held)
        if ending and not any(worker.pid for worker in workers):
            return status
        if now >= kill_s:
            _signal(workers, signal.SIGKILL)
            kill_s = float("inf")
        due_s = [worker.due_s for worker in workers if not worker.pid and not ending]
        received = signal.sigtimedwait(_SIGNALS, max(0.0, min([*due_s, kill_s, now + 3600.0]) - now))
        if received is not None and received.si_signo == signal.SIGHUP and not ending:
            config = _reloaded(config, load)
            _signal(workers, signal.SIGHUP)
        stopped = received is not None and received.si_signo in (signal.SIGTERM, signal.SIGINT)
        cannot_serve = _reap(workers, say, expected=ending)
        failed = 0 if ending else cannot_serve
        if stopped and not ending:
            say(f"draining for at most {config.drain_s:g} s; a second signal ends at once")
        if failed:
            status = failed
        if stopped or failed:
            ending = True
            for worker in workers:
                worker.listener.close()  # the last copy refuses connections; until then they would wait for nobody
            _signal(workers, signal.SIGTERM)
            kill_s = time.monotonic() + config.drain_s + KILL_AFTER_S


def _reloaded(config: Config, load: Callable[[], Config] | None) -> Config:
    """What a worker is started with from now on. The workers say what is wrong with it."""
    if load is None:
        return config
    try:
        fresh = load()
    except ConfigError:
        return config
    return config if needs_restart(config, changes(config, fresh), fresh) else fresh


def _listeners(host: str, port: int, count: int) -> list[socket.socket]:
    """So many sockets on one port. OSError if another process listens there."""
    found_addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found_addresses[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Sockets that share a port join any that share it already: only one that does not finds out.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        address = probe.getsockname()
    found = []
    for _ in range(count):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        found.append(listener)
    return found


def _start(worker: Worker, workers: list[Worker], config: Config, serve: Serve, held: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    worker.started_s = time.monotonic()
    worker.pid = os.fork()
    if worker.pid:
        return
    status = CRASHED
    try:
        os.close(held)
        for other in workers:
            if other is not worker:
                other.listener.close()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it serves
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the supervisor passes on one
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        serve(config, worker)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else CRASHED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _reap(workers: list[Worker], say: Callable[[str], None], *, expected: bool) -> int:
    """Take note of those that ended, and when to start them again. The status of one that says that none can serve."""
    failed = 0
    for worker in workers:
        if not worker.pid:
            continue
        pid, wait_status = os.waitpid(worker.pid, os.WNOHANG)
        if not pid:
            continue
        worker.pid = 0
        now = time.monotonic()
        status = os.waitstatus_to_exitcode(wait_status)
        failed = failed or (status if status in CANNOT_SERVE else 0)
        if expected or failed:
            continue
        lived_long = now - worker.started_s >= LONG_LIFE_S
        worker.pause_s = 0.0 if lived_long else min(max(RESTART_S, 2 * worker.pause_s), RESTART_S_MAX)
        worker.due_s = now + worker.pause_s
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        say(f"worker {worker.index} {how}; started again in {worker.pause_s:g} s")
    return failed


def _signal(workers: list[Worker], number: signal.Signals) -> None:
    for worker in workers:
        if worker.pid:
            os.kill(worker.pid, number)
