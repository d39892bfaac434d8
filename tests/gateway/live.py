"""A whole gateway in this process, as production composes it, and what a test asks of it."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

import policies.request
from backends.simulated.engine_profiles import EngineProfile
from gateway.config.model import Config
from gateway.config.sections.keys import open_name
from gateway.http.server import HttpServer
from gateway.pool.engine_addresses import Resolver, resolve
from gateway.process.gateway import Gateway
from gateway.storage.hub.run_directory import WorkerSlot
from policies.admission.engine import AdmissionEngine
from policies.request import Request, ServiceTokens
from tests.faulty_engine import Faults, FaultyEngine
from tests.waiting import WAIT_S, until

MODEL = "simulated"
CHAT = "/v1/chat/completions"
LEAK_S = 60.0
"""What is still held of a request so long after its client has left is lost."""

SMALL = EngineProfile(
    name="small",
    block_size=16,
    num_gpu_blocks=1025,
    max_model_len=4096,
    max_num_seqs=8,
    max_num_batched_tokens=2048,
    base_s=1e-3,
    per_prefill_token_s=1e-6,
    per_seq_s=1e-5,
    per_context_token_s=0.0,
)
"""Eight sequences, about a millisecond per step."""


def chat(content: str = "Hello", **fields: Any) -> dict[str, Any]:
    """The body of a chat request."""
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def long_chat(content: str = "Hello", **fields: Any) -> dict[str, Any]:
    """One that streams for seconds, unless somebody ends it."""
    return chat(content, stream=True, max_tokens=4000, ignore_eos=True, **fields)


def events(body: bytes) -> list[Any]:
    """The JSON of the events of a stream, `[DONE]` as it is."""
    found = []
    for event in body.split(b"\n\n"):
        data = b"".join(line.removeprefix(b"data: ") for line in event.split(b"\n") if line.startswith(b"data: "))
        if data:
            found.append("[DONE]" if data == b"[DONE]" else json.loads(data))
    return found


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @classmethod
    async def of(cls, response: aiohttp.ClientResponse) -> Answer:
        """Header names in lower case."""
        headers = {name.lower(): value for name, value in response.headers.items()}
        return cls(response.status, headers, await response.read())

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json["error"]
        return found


@dataclass
class Live:
    """A running gateway."""

    gateway: Gateway
    http: aiohttp.ClientSession
    log: Path
    watched: dict[str, ServiceTokens] = field(default_factory=dict)
    """By request, the service its flow was last charged with, as far as that can be watched."""

    @property
    def charged(self) -> dict[str, ServiceTokens]:
        """The same, for a test that is about it."""
        if COMPILED:
            pytest.skip("what compiled code charges cannot be watched from outside")
        return self.watched

    @property
    def url(self) -> str:
        return f"{'http' if self.gateway.config.tls is None else 'https'}://127.0.0.1:{self.gateway.port}"

    @property
    def server(self) -> HttpServer:
        """What the listener for clients holds."""
        assert self.gateway._server is not None
        return self.gateway._server

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.admin_port}"

    @property
    def engine(self) -> AdmissionEngine:
        return self.gateway.pools[0].dispatcher.engine

    def post(self, path: str, body: Any = None, *, key: str | None = "k", **headers: str) -> Any:
        """A request context of aiohttp; header names are given with _ for -."""
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            fields["authorization"] = f"Bearer {key}"
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        if data is not None:
            fields.setdefault("content-type", "application/json")
        return self.http.post(self.url + path, data=data, headers=fields)

    async def ask(self, path: str, body: Any = None, *, key: str | None = "k", **headers: str) -> Answer:
        """POST and read the whole answer."""
        async with self.post(path, body, key=key, **headers) as response:
            return await Answer.of(response)

    async def get(self, path: str, *, key: str | None = "k", admin: bool = False) -> Answer:
        url = self.admin_url if admin else self.url
        headers = {"authorization": f"Bearer {key}"} if key is not None else {}
        async with self.http.get(url + path, headers=headers) as response:
            return await Answer.of(response)

    async def metrics(self) -> dict[tuple[str, ...], float]:
        """Every sample by its name and label values (in the order of the label names)."""
        token = self.gateway.config.admin_token
        key = None if token is None else token.get_secret_value()
        page = (await self.get("/metrics", key=key, admin=True)).body.decode()
        return {
            (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if not sample.name.endswith("_created")
        }

    async def lines(self, count: int) -> list[dict[str, Any]]:
        """The access log, once it has so many lines."""
        await until(lambda: self.log.read_bytes().count(b"\n") >= count)
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def has_response(self, id: str = "r1", key: str = "k", tenant: str = "") -> None:
        """Let the first engine have a response of this tenant, or of this key where any is taken."""
        tenant = tenant or open_name(sha256(key.encode()).digest())
        engine = next(iter(self.gateway.pools[0].backends))
        self.gateway.responses.note((tenant, id, MODEL, MODEL, engine), time.monotonic())

    def holds_nothing(self) -> bool:
        """Is every queue empty, and every ledger as it was before the first request?"""
        return all(
            engine.queued == engine.queued_bytes == engine.dispatched == len(pool.dispatcher) == 0
            and not any(ledger.sequences or ledger.starting or ledger.leases for ledger in engine.backends.values())
            for pool in self.gateway.pools
            for engine in [pool.dispatcher.engine]
        )

    def watch_charges(self) -> None:
        """Only where the gateway is not compiled: what is compiled cannot be patched."""
        if COMPILED:
            return
        for pool in self.gateway.pools:
            policy = pool.dispatcher.engine.policy
            charge = policy.charge

            def noted(
                request: Request, service: ServiceTokens, now: float, *, final: bool, charge: Any = charge
            ) -> None:
                self.watched[request.id] = service
                charge(request, service, now, final=final)

            policy.charge = noted  # type: ignore[method-assign]


COMPILED = not policies.request.__file__.endswith(".py")


class Starter:
    """Makes gateways whose logs go to `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._serial = 0

    def config(self, *urls: str, **fields: Any) -> Config:
        """One pool with these backends, any key accepted, free ports; `fields` go over it."""
        self._serial += 1
        data = {
            "listen": "127.0.0.1:0",
            "admin": "127.0.0.1:0",
            "access_log": str(self.directory / f"access-{self._serial}.log"),
            "open_access": "tenants" not in fields,
            "pools": [{"name": "pool", "backends": [{"url": url} for url in urls]}],
            **fields,
        }
        return Config.model_validate(data)

    @asynccontextmanager
    async def __call__(
        self,
        *urls: str,
        trusting: ssl.SSLContext | None = None,
        worker_slot: WorkerSlot | None = None,
        load: Callable[[], Config] | None = None,
        resolver: Resolver = resolve,
        **fields: Any,
    ) -> AsyncIterator[Live]:
        """Run it until the end of the block. Nothing may be left of any request then.

        `trusting`: how its client speaks TLS. `worker_slot`: its place beside other workers. `load`: what a reload
        reads. `resolver`: looks up the addresses of names.
        """
        config = self.config(*urls, **fields)
        gateway = Gateway(config, worker_slot=worker_slot, load=load, resolver=resolver)
        connector = aiohttp.TCPConnector(limit=0, ssl=trusting or True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=WAIT_S)) as http:
            live = Live(gateway, http, Path(config.access_log))
            try:
                await gateway.start()
                if urls:  # the machine stood still for seconds: that is no engine out of service
                    await until(lambda: "no answer within" not in str(gateway.not_ready()))
                live.watch_charges()
                yield live
                await http.close()  # so that whoever still waits has left
                if config.usage is None:  # else a batch may be amid its lines
                    async with asyncio.timeout(LEAK_S):
                        await until(live.holds_nothing)
            finally:
                async with asyncio.timeout(WAIT_S):  # a connection that was lost sight of would hold it for ever
                    await gateway.stop(0)


@asynccontextmanager
async def simulated(
    profile: EngineProfile = SMALL,
    *,
    models: tuple[str, ...] = (MODEL,),
    time_scale: float = 1.0,
    port: int = 0,
    **options: Any,
) -> AsyncIterator[Simulated]:
    """A simulated vLLM on a free port, or on this one."""
    faults = Faults()
    server = FaultyEngine(profile, model_names=models, time_scale=time_scale, faults=faults, **options)
    port = await server.start("127.0.0.1", port)
    try:
        yield Simulated(server, faults, port)
    finally:
        await server.stop()


@dataclass
class Simulated:
    server: FaultyEngine
    faults: Faults
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def is_idle(self) -> bool:
        gauges = self.server.gauges
        return (gauges.running, gauges.waiting, gauges.kv_blocks) == (0, 0, 0)
