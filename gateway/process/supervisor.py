"""The supervisor of several processes behind one port. It binds, starts, restarts and ends them, and decides nothing
else.

Every worker is a complete gateway with its own listening socket on the port; the kernel spreads connections among them
(SO_REUSEPORT). One more process, the hub, serves the sync rounds by which workers are replicas of each other, and the
operator (`gateway.process.hub`). The supervisor opens the sockets and keeps them open, so connections that arrive
during a restart wait for the new process.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gateway.config.changes import changes, needs_restart
from gateway.config.load import ConfigError, Fault
from gateway.config.model import Config
from gateway.config.sections.keys import KeyConfig, hash_key
from gateway.http.sockets import listener, listening
from gateway.keys.identity import Keyring
from gateway.process import systemd
from gateway.storage.hub.run_directory import RunDirectory, WorkerSlot

RESTART_S = 0.1
RESTART_S_MAX = 10.0
LONG_LIFE_S = 60.0
"""Lifetime after which a worker is restarted at once, as if it had never failed."""
KILL_AFTER_S = 10.0
CANNOT_SERVE = (1, 2)
"""Exit statuses of a worker that could not listen or use its Redis. No other worker could, so all end."""
CRASHED = 70
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}

Serve = Callable[[Config, "Child"], None]


@dataclass(eq=False)
class Child:
    """A child process that the supervisor restarts when it ends. The sockets and the pipe outlive each process."""

    name: str
    serve: Serve
    worker_slot: WorkerSlot
    listeners: Sequence[socket.socket]
    liveness_pipe: int
    """Pipe that closes when the supervisor ends for any reason."""
    lives: int = 0
    """Number of processes so far, the present one included."""
    pid: int = 0
    started_s: float = 0.0
    due_s: float = 0.0
    pause_s: float = 0.0


def share_of(config: Config, index: int) -> Config:
    """Return the configuration of one worker, with its part of the machine: bounds of the queue and of connections.

    Engines, limits and interactions are shared by sync rounds. Learned state is shared; the first worker keeps the
    file.
    """
    count = config.workers
    limits = config.limits
    own = {
        name: max(1, bound // count)
        for name in ("queue_requests_max", "connections_max", "client_connections_max")
        if (bound := getattr(limits, name)) is not None
    }
    return config.model_copy(
        update={"state_file": config.state_file if index == 0 else None, "limits": limits.model_copy(update=own)}
    )


def with_keys(config: Config) -> tuple[Config, dict[str, str]]:
    """Return the configuration with a key for every tenant, minted once, so that all workers have the same keys; and
    the minted keys by tenant."""
    minted = Keyring(config.tenants, open_access=config.open_access, mints=not config.issues_keys).held.minted
    return _with_keys(config, {tenant: (KeyConfig(hash=hash_key(key)),) for tenant, key in minted.items()}), minted


def with_known_keys(config: Config, before: Config) -> Config:
    """Return a new configuration with the keys minted at the start for the old one. Raise ConfigError if another key
    would have to be minted, which the workers would not share."""
    if config.issues_keys:
        return config
    config = _with_keys(config, {tenant.name: tenant.keys for tenant in before.tenants})
    missing = [tenant.name for tenant in config.tenants if not tenant.keys]
    if missing:
        what = f"{missing[0]} has no key, and one that is made now would be known to one worker only"
        raise ConfigError([Fault("config", 0, 0, "tenants", f"{what}: make one, with `fairgate keys create`")])
    return config


def _with_keys(config: Config, keys: Mapping[str, tuple[KeyConfig, ...]]) -> Config:
    """Return the configuration with these keys of tenants that have none."""
    tenants = [
        tenant if tenant.keys else tenant.model_copy(update={"keys": keys.get(tenant.name, ())})
        for tenant in config.tenants
    ]
    return config.model_copy(update={"tenants": tuple(tenants)})


def supervise(
    config: Config,
    serve: Serve,
    serve_hub: Serve,
    announce: Callable[[int, int], None],
    load: Callable[[], Config] | None = None,
) -> int:
    """Run a hub and `config.workers` processes of `serve` until SIGTERM or SIGINT. Return the exit status.

    Supervision also ends when a child exits with a status of `CANNOT_SERVE`, which is then returned.

    SIGHUP is passed on. A process that starts later gets the latest config of `load`, unless that needs a restart of
    all.

    Must be called before any thread or event loop starts, since it forks. Raise OSError if an address is taken.
    `announce` gets two ports: the clients' and the operator's.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    inherited = systemd.inherited_listeners()
    listeners = _of_workers(inherited.get(systemd.CLIENTS), config)
    with listening("the admin listener", config.admin_address, "admin", "--admin-port"):
        admin = inherited.get(systemd.OPERATOR) or _listeners(*config.admin_address, 1)[0]
    run_directory = RunDirectory.made(config.workers)
    try:
        announce(int(listeners[0][0].getsockname()[1]), int(admin.getsockname()[1]))
        systemd.notify("READY=1")  # clients can connect; each worker accepts as soon as it serves
        liveness_pipe, held = os.pipe()
        of_hub = (open_unix_listener(run_directory.exchange), admin)
        hub = Child("the hub", serve_hub, WorkerSlot(-1, run_directory), of_hub, liveness_pipe)
        workers = [
            Child(f"worker {index}", serve, WorkerSlot(index, run_directory), own, liveness_pipe)
            for index, own in enumerate(listeners)
        ]
        return _supervised(config, hub, workers, held, load)
    finally:
        run_directory.end()


def _supervised(config: Config, hub: Child, workers: list[Child], held: int, load: Callable[[], Config] | None) -> int:
    """Supervise until the end. Return the exit status."""
    children = [hub, *workers]
    status, ending, kill_s = 0, False, float("inf")
    while True:
        now = time.monotonic()
        for child in children:
            # The hub outlives the last worker: workers return their grants to it.
            if not child.pid and now >= child.due_s and (not ending or child is hub):
                _start(child, children, config, held)
        if ending and not any(worker.pid for worker in workers):
            _signal([hub], signal.SIGKILL)  # it keeps nothing that could be lost
            return status
        if now >= kill_s:
            _signal(workers, signal.SIGKILL)
            kill_s = float("inf")
        due_s = [child.due_s for child in children if not child.pid and (not ending or child is hub)]
        received = signal.sigtimedwait(_SIGNALS, max(0.0, min([*due_s, kill_s, now + 3600.0]) - now))
        if received is not None and received.si_signo == signal.SIGHUP and not ending:
            config = reloaded(config, load)
            _signal(children, signal.SIGHUP)
        stopped = received is not None and received.si_signo in (signal.SIGTERM, signal.SIGINT)
        failed = _reap(children, expected=ending)
        if stopped and not ending:
            systemd.notify("STOPPING=1")
            _log(f"draining for at most {config.drain_s:g} s; a second signal ends at once")
        if stopped or failed:
            status = failed or status
            ending = True
            for worker in workers:
                for listener in worker.listeners:
                    listener.close()  # an open copy would take connections that no worker accepts any more
            _signal(workers, signal.SIGTERM)
            kill_s = time.monotonic() + config.drain_s + KILL_AFTER_S


def reloaded(config: Config, load: Callable[[], Config] | None) -> Config:
    """Return the config for new processes. The workers report its faults."""
    if load is None:
        return config
    try:
        fresh = load()
    except ConfigError:
        return config
    return config if needs_restart(config, changes(config, fresh), fresh) else fresh


def open_unix_listener(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(path)
    made.listen(socket.SOMAXCONN)
    return made


def _of_workers(inherited: socket.socket | None, config: Config) -> list[tuple[socket.socket, ...]]:
    """Return the listening sockets of each worker, one for each address. All workers share an inherited socket."""
    if inherited is not None:
        return [(inherited.dup(),) for _ in range(config.workers)]
    of_addresses = []
    for address in config.listen_addresses:
        with listening("the listener for clients", address, "listen", "--port"):
            of_addresses.append(_listeners(*address, config.workers))
    return [*zip(*of_addresses, strict=True)]


def _listeners(host: str, port: int, count: int) -> list[socket.socket]:
    """Return `count` sockets on one port. Raise OSError if another process listens there."""
    flags = socket.AI_PASSIVE
    family, _, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=flags)[0]
    only = listener(family, address)
    if count == 1:
        return [only]
    # Sockets that share a port join any existing group. Only a socket that does not share detects another process.
    with only:
        address = only.getsockname()
    return [listener(family, address, is_shared=True) for _ in range(count)]


def _start(child: Child, children: list[Child], config: Config, held: int) -> None:
    """Fork a process for a child's slot. In the new process, serve and exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    child.started_s = time.monotonic()
    child.lives += 1
    child.pid = os.fork()
    if child.pid:
        return
    status = CRASHED
    try:
        os.close(held)
        for other in children:
            if other is not child:
                for listener in other.listeners:
                    listener.close()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the process serves
        # Ctrl-C reaches the whole group; the supervisor passes on one signal.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        child.serve(config, child)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else CRASHED
    except BaseException:  # no fork goes on with what its parent would do next
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _reap(children: list[Child], *, expected: bool) -> int:
    """Record the workers that ended and schedule their restarts. Return the exit status of a worker that could not
    serve."""
    failed = 0
    for child in children:
        if not child.pid:
            continue
        pid, wait_status = os.waitpid(child.pid, os.WNOHANG)
        if not pid:
            continue
        child.pid = 0
        now = time.monotonic()
        status = os.waitstatus_to_exitcode(wait_status)
        failed = failed or (status if status in CANNOT_SERVE and not expected else 0)
        if expected or failed:
            continue
        lived_long = now - child.started_s >= LONG_LIFE_S
        child.pause_s = 0.0 if lived_long else min(max(RESTART_S, 2 * child.pause_s), RESTART_S_MAX)
        child.due_s = now + child.pause_s
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        _log(f"{child.name} {how}; started again in {child.pause_s:g} s")
    return failed


def _signal(children: list[Child], number: signal.Signals) -> None:
    for child in children:
        if child.pid:
            os.kill(child.pid, number)


def _log(text: str) -> None:
    print(f"fairgate: {text}", file=sys.stderr, flush=True)
