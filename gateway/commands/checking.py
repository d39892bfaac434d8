"""What would fail at the start, though the config is valid? Its files and packages are tried on this machine."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from math import ceil
from pathlib import Path

import aiohttp

from gateway.config.load import Finding
from gateway.config.memory_bounds import memory_max_for
from gateway.config.model import Config
from gateway.config.section import filled
from gateway.pool.backend import Backend
from gateway.pool.pool import estimator_of
from gateway.pool.shared import limited, quotas_of
from policies.limits.quotas import DAY_S, Quota


def findings(config: Config) -> Iterator[Finding]:
    """Yield faults, and warnings of settings that are seldom meant. Leaves no file behind, and uses no network."""
    for p, pool in enumerate(config.pools):
        try:
            estimator_of(pool)
        except ValueError as error:
            yield Finding(("pools", p, "tokenizer"), str(error))
    if config.access_log not in ("stdout", "off") and (why := _not_writable(Path(config.access_log))):
        yield Finding(("access_log",), f"cannot be written: {why}")
    usage = config.usage
    if usage is not None and usage.is_server and find_spec("psycopg") is None:
        yield Finding(("usage",), "needs psycopg: pip install 'fairgate[postgresql]'")
    sqlite = None if usage is None or usage.is_server else usage.url.get_secret_value()
    for field, file in (("state_file", config.state_file), ("usage", sqlite)):
        if file is None:
            continue
        if why := _not_writable(Path(file), is_replaced=True):
            yield Finding((field,), f"cannot be written: {why}")
        elif not Path(file).absolute().parent.exists():
            text = f"there is no directory {Path(file).parent}: it is made at the start"
            yield Finding((field,), text, is_warning=True)
    if usage is not None and config.state.redis_url is None:
        needed_days = ceil(quotas_of(config).longest.window.longest_s / DAY_S)
        if usage.keep_days < needed_days:
            text = f"limits of a month go on after a restart from what is kept: keep {needed_days} days"
            yield Finding(("usage", "keep_days"), text, is_warning=True)
    served = {model for pool in config.pools for model in pool.models}
    for name, section in [("every tenant", config.quota), *limited(config).items()]:
        costs = [filled(Quota, one).cost_per_month for one in (section, *section.per_model.values())]
        if any(costs) and (usage is None or not usage.prices):
            text = f"no model has a price, so cost_per_month of {name.strip()} is never reached: set usage.prices"
            yield Finding(("quota",), text, is_warning=True)
        unknown = [model for model in section.per_model if model not in served]
        if unknown and all(pool.models for pool in config.pools):
            text = f"no pool serves {unknown[0]!r}, which a quota of {name.strip()} limits: write the engines' name"
            yield Finding(("pools",), text, is_warning=True)
    yield from _expired(config, time.time())
    counted, most = quotas_of(config).counted([tenant.name for tenant in config.tenants]), config.bounds.size("quotas")
    if counted > most:
        enough = memory_max_for("quotas", counted)
        text = f"limits count {counted} tenants, groups, keys, users and models, and there is room for {most}: what "
        text += f"the others did is forgotten, so that their limits let more through; {enough} has room"
        yield Finding(("memory_max",), text, is_warning=True)
    if config.tracing is not None and find_spec("opentelemetry") is None:
        yield Finding(("tracing",), "needs OpenTelemetry: pip install 'fairgate[opentelemetry]'")
    if config.jwt and find_spec("jwt") is None:
        yield Finding(("jwt",), "needs PyJWT: pip install 'fairgate[jwt]'")
    if config.admin_warning:
        yield Finding(("admin",), config.admin_warning, is_warning=True)


def _expired(config: Config, unix_s: float) -> Iterator[Finding]:
    for t, tenant in enumerate(config.tenants):
        for k, key in enumerate(tenant.keys):
            if key.expires_s <= unix_s:
                text = f"the key has expired ({key.expires}): remove it, or give it another day"
                yield Finding(("tenants", t, "keys", k, "expires"), text, is_warning=True)


def _not_writable(path: Path, *, is_replaced: bool = False) -> str:
    """Return why this file cannot be appended to, or with `is_replaced`, why it cannot be replaced; "" if it can.

    Missing directories of a file that is replaced are made at the start.
    """
    if path.is_dir():
        return "it is a directory"
    if path.exists() and not is_replaced:
        return "" if os.access(path, os.W_OK) else os.strerror(errno.EACCES)
    directory = next(one for one in path.absolute().parents if one.exists()) if is_replaced else path.parent
    if not directory.exists():
        return f"there is no directory {directory}"
    try:
        with tempfile.TemporaryFile(dir=directory):
            return ""
    except OSError as error:
        return f"no file can be made in {directory} ({error.strerror})"


async def probed(config: Config) -> tuple[list[str], bool]:
    """Ask every engine once, as the gateway does at its start. Return a line for each, and whether all answered.

    A simulated engine inside the gateway's own process does not run yet, and is not asked.
    """
    configured = [(pool.name, each) for pool in config.pools for each in pool.backends if not each.simulated]
    async with aiohttp.ClientSession() as session:
        backends = [(pool, Backend(each, each.url, config)) for pool, each in configured]
        await asyncio.gather(*(backend.check(backend.control_client(session)) for _, backend in backends))
        lines = [f"pool {pool}: {backend.name}: {_description(backend)}" for pool, backend in backends]
        await asyncio.gather(*(backend.close() for _, backend in backends))
    return lines, all(backend.health.healthy for _, backend in backends)


def _description(backend: Backend) -> str:
    if not backend.health.healthy:
        return backend.health.reason
    return f"{backend.adapter.description()}; serves {', '.join(sorted(backend.models)) or 'no model'}"
