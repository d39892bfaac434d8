"""How is one engine spoken to, and how is it?"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import aiohttp

from backends.addresses import session_at
from backends.base import Adapter
from backends.errors import ConnectFailed, UpstreamError
from backends.health import HealthState, ModelCard, fetch_models, probe
from backends.openai import OpenAiAdapter
from backends.steps import StepFeed
from backends.upstream import UpstreamPool
from backends.vllm import VllmAdapter
from gateway.config.model import BackendConfig, Config

__all__ = ["AGAIN_S_MIN", "PROBE_INTERVAL_S", "Backend", "terms_of"]

logger = logging.getLogger("fairgate")

PROBE_INTERVAL_S = 2.0
MODELS_INTERVAL_S = 30.0
AGAIN_S_MIN = 1.0
MODELS_MAX = 1000
ADAPTERS: dict[str, Callable[[], Adapter]] = {"vllm": VllmAdapter, "openai": OpenAiAdapter}


class Backend:
    """One engine: where it is, how to speak to it, how it is. One that is configured otherwise is another one."""

    def __init__(self, config: BackendConfig, url: str, limits: Config) -> None:
        """`url`: where it is; that of a simulated one is known only once it was started."""
        self.name = config.name or url
        self.url = url
        self.terms = terms_of(config, limits)
        self.drained = False
        """An operator wants nothing new to go there."""
        self.leaving = False
        """It is no longer configured, and ends what it runs."""
        self.adapter: Adapter = ADAPTERS[config.engine]()
        self.hears_steps = config.steps
        self.api_key = config.api_key.get_secret_value() if config.api_key is not None else None
        self.health = HealthState()
        self.models: dict[str, ModelCard] = {}
        self.tls = config.tls.context() if config.tls is not None else None
        self._session = session_at(config.address) if config.address is not None else None
        self.upstream = UpstreamPool(
            self.name,
            url,
            tls=self.tls,
            address=config.address,
            connect_timeout_s=limits.limits.upstream_connect_s,
            silence_s=limits.limits.upstream_silence_s,
        )
        authorization = f"authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        self._head_end = b"host: " + self.upstream.host_header + b"\r\n" + authorization.encode() + b"\r\n"
        self._path = urlsplit(url).path.encode()
        self.on_health: Callable[[Backend], None] | None = None
        self._asked_models_s = float("-inf")
        self.feed: StepFeed | None = None
        """What it says after each step. None: it is not asked for that."""

    @property
    def in_service(self) -> bool:
        """May requests go there?"""
        return self.health.healthy and not self.drained and not self.leaving

    @property
    def again_s(self) -> float:
        """In how long may it be in service at the earliest, by its probes? At least a second."""
        return max(AGAIN_S_MIN, self.health.probes_missing * PROBE_INTERVAL_S)

    @property
    def why_not(self) -> str:
        """Why may none go there?"""
        if self.leaving:
            return "no longer in the config; it ends what it runs"
        return "drained" if self.drained else self.health.reason

    @property
    def read_by(self) -> str:
        """How is it known what it holds?"""
        if self.feed is not None and not self.feed.why:
            return "steps"
        return "metrics" if self.adapter.metrics_paths else "answers"

    def head(self, begun: bytes) -> bytes:
        """The head of a request to this engine, of which the lines that are the same for every engine are there."""
        if self._path:
            begun = begun.replace(b" /", b" " + self._path + b"/", 1)
        return begun + self._head_end

    def session(self, usual: aiohttp.ClientSession) -> aiohttp.ClientSession:
        """Through what is it asked how it is? `usual`: where it is at no certain address of its name."""
        return self._session or usual

    async def close(self) -> None:
        """Nothing is sent there any more."""
        await self.upstream.close()
        if self._session is not None:
            await self._session.close()

    def broke(self, error: UpstreamError) -> None:
        """A request to it failed: passive health."""
        now = time.monotonic()
        with self._noticing():
            if isinstance(error, ConnectFailed):
                self.health.connect_failed(str(error), now)
            else:
                self.health.stream_broken(str(error), now)

    async def check(self, session: aiohttp.ClientSession) -> None:
        """Ask it whether it is well, and what it serves."""
        session = self.session(session)
        problem = await probe(session, self.url + self.adapter.health_path, api_key=self.api_key, tls=self.tls)
        now = time.monotonic()
        with self._noticing():
            self.health.probed(problem, now)
        if problem is None and now - self._asked_models_s >= MODELS_INTERVAL_S:
            try:
                cards = await fetch_models(session, self.url, self.api_key, tls=self.tls)
            except UpstreamError as error:
                logger.warning("backend %s did not say which models it serves: %s", self.name, error)
                return
            self.models = {card.id: card for card in cards[:MODELS_MAX]}
            self._asked_models_s = now

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """Tell the pool if its health turns."""
        before = self.health.healthy
        yield
        if self.health.healthy != before and self.on_health is not None:
            self.on_health(self)


def terms_of(config: BackendConfig, gateway: Config) -> tuple[object, ...]:
    """On what terms is it spoken to? A backend with other terms is reached by other connections."""
    limits = gateway.limits
    where = (config.url, config.address, config.engine, config.api_key, config.tls, config.steps)
    return (*where, limits.upstream_connect_s, limits.upstream_silence_s)
