"""Reloads of one gateway under load, from random valid and broken files.

Three tenants keep streams open through one fairgate before three simulated engines, while its file is written anew
again and again: other weights, policies and their settings, limits, backends added, removed and drained, tenants that
come and go, files that are no config, and settings that need a restart. Counted are replies that are not whole. The
service of each tenant (prompt tokens plus twice the output tokens, by the client's count) is compared with what its
weight was due at the time: between two changes of weights, its share of what all three received.
"""

import asyncio
import contextlib
import os
import random
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from backends.simulated.engine_profiles import EngineProfile
from backends.simulated.simulated_server import SimulatedServer
from bench.load import Client, Reply, Request
from bench.stack import PROXY_START_S, process, wait_ready
from gateway.config.sections.keys import hash_key
from tests.ports import free_port

TENANTS = ("alice", "bob", "carol")
ENGINES = 3
MODEL = "simulated"
WORDS_IN, TOKENS_OUT, OUTPUT_COST = 20, 40, 2
ENGINE = EngineProfile(
    name="bench-reload",
    block_size=16,
    num_gpu_blocks=20_000,
    max_model_len=4096,
    max_num_seqs=8,
    max_num_batched_tokens=8192,
    base_s=20e-3,
    per_prefill_token_s=1e-6,
    per_seq_s=1e-5,
    per_context_token_s=0.0,
)
"""Eight sequences at 50 steps a second: the machine is to have time for all of it."""
RAMP_S = 2.0
WEIGHTS = (1, 2, 3, 4)
POLICIES: tuple[Any, ...] = (
    "fairserve",
    "vtc",
    "wsc",
    "rr",
    {"name": "fairserve", "window_tokens": 100},
    {"name": "vtc", "window_tokens": 50},
    {"name": "rr", "quantum": 200},
    {"name": "dlpm", "quantum": 500},
)
BROKEN = (
    "pools: [",
    "pools: []\n",
    "\x00",
    "",
)


class Files:
    """The files that are written, one after another, and what the gateway is to make of each."""

    def __init__(self, path: Path, base: dict[str, Any], urls: list[str], seed: int) -> None:
        self.path = path
        self.random = random.Random(seed)
        self.urls = urls
        self.good = base
        self.weights = dict.fromkeys(TENANTS, 1)
        self.write(base)

    def write(self, fields: dict[str, Any]) -> None:
        self._put(yaml.safe_dump(fields))

    def _put(self, text: str) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self.path)

    def next(self) -> bool:
        """Write the next one. True: it is good, and `good` and `weights` are what it says."""
        chance = self.random
        kind = chance.random()
        if kind < 0.2:
            self._put(chance.choice(BROKEN))
            return False
        if kind < 0.4:
            wrong = chance.choice(
                (
                    {"policy": "vtx"},
                    {"drain_s": -1},
                    {"tenants": []},
                    {"listen": "127.0.0.1:1"},
                    {"workers": 2},
                    {"access_log": "/no/such/directory/log"},
                    {"pools": [{**self.good["pools"][0], "tokenizer": "/no/such.json"}]},
                )
            )
            self.write({**self.good, **wrong})
            return False
        self.good = self._changed()
        self.write(self.good)
        return True

    def _changed(self) -> dict[str, Any]:
        chance, good = self.random, dict(self.good)
        what = chance.choice(("weights", "weights", "policy", "backends", "backends", "limits", "tenants", "nothing"))
        if what == "weights":
            self.weights = {name: chance.choice(WEIGHTS) for name in TENANTS}
            good["tenants"] = tenants(self.weights)
        elif what == "policy":
            good["policy"] = chance.choice(POLICIES)
        elif what == "backends":
            urls = chance.sample(self.urls, chance.randrange(1, ENGINES + 1))
            good["pools"] = pools(urls, max_num_seqs=chance.choice((8, 6, None)))
        elif what == "limits":
            good["limits"] = {"upstream_silence_s": chance.choice((500, 600)), "attempts_max": chance.choice((3, 9))}
            good["overload"] = {"enter": chance.choice((0.9, 0.95))}
            good["quota"] = chance.choice(({}, {"concurrent": 10_000}, {"tokens_per_day": 10**9}))
            good["interactions"] = {"idle_s": chance.choice(("auto", 60, 90))}
        elif what == "tenants":
            extra = chance.sample(("dave", "erin", "frank"), chance.randrange(3))
            good["tenants"] = [*tenants(self.weights), *({"name": name, "weight": 2} for name in extra)]
        return good


def tenants(weights: dict[str, int]) -> list[dict[str, Any]]:
    return [{"name": name, "weight": weight, "keys": [hash_key(key(name))]} for name, weight in weights.items()]


def key(tenant: str) -> str:
    return f"bench-key-of-{tenant}-0123456789"


def pools(urls: list[str], **fields: Any) -> list[dict[str, Any]]:
    known = {name: value for name, value in fields.items() if value is not None}
    return [{"name": "pool", "models": [MODEL], "backends": [{"url": url, **known} for url in urls]}]


class Tenant:
    """One tenant's clients, each with one stream at a time, and what they have received."""

    def __init__(self, url: str, name: str, clients: int, seed: int) -> None:
        self.client = Client(url)
        self.client.rng = random.Random(seed)  # nobody's prompts are another one's
        self.request = Request(WORDS_IN, TOKENS_OUT, key=key(name), usage=True, model=MODEL)
        self.settled = 0
        self.replies = 0
        self.failures: Counter[str] = Counter()
        self._prompt_tokens = WORDS_IN
        self._stopping = False
        self._tasks = [asyncio.create_task(self._keep_sending()) for _ in range(clients)]

    async def _keep_sending(self) -> None:
        while not self._stopping:
            reply = await self.client.send(self.request)
            self.replies += 1
            if reply.ok:
                self._prompt_tokens = reply.prompt_tokens or self._prompt_tokens
                self.settled += self._prompt_tokens + OUTPUT_COST * TOKENS_OUT
            else:
                self.failures[reply.failure] += 1
                await asyncio.sleep(reply.again_after_s)

    def service(self) -> int:
        """So far, the streams under way included."""
        under_way = [connection.reply for connection in self.client.busy]
        return self.settled + sum(self._under_way(reply) for reply in under_way if reply is not None)

    def _under_way(self, reply: Reply) -> int:
        if not reply.events:
            return 0
        return self._prompt_tokens + OUTPUT_COST * min(reply.events - 1, TOKENS_OUT)

    async def stop(self) -> None:
        """Let the last ones end."""
        self._stopping = True
        await asyncio.wait(self._tasks)
        self.client.close()


class Shares:
    """What each tenant was due by its weight at the time, and what it got."""

    def __init__(self, tenants: dict[str, Tenant]) -> None:
        self._tenants = tenants
        self._seen = self._now()
        self._begun = dict(self._seen)
        self.due = dict.fromkeys(tenants, 0.0)

    def _now(self) -> dict[str, int]:
        return {name: tenant.service() for name, tenant in self._tenants.items()}

    def until_now(self, weights: dict[str, int]) -> None:
        """These were the weights since this was last asked."""
        now = self._now()
        got = sum(now.values()) - sum(self._seen.values())
        for name, weight in weights.items():
            self.due[name] += got * weight / sum(weights.values())
        self._seen = now

    def got(self) -> dict[str, int]:
        return {name: self._seen[name] - self._begun[name] for name in self._tenants}


@contextlib.asynccontextmanager
async def engines() -> AsyncIterator[list[str]]:
    """In this process: they cost little, and what they send is what is counted."""
    servers = [SimulatedServer(ENGINE, model_names=(MODEL,)) for _ in range(ENGINES)]
    try:
        yield [f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}" for server in servers]
    finally:
        for server in servers:
            await server.stop()


@contextlib.asynccontextmanager
async def gateway(folder: Path, urls: list[str], seed: int) -> AsyncIterator[tuple[str, str, Files, int, Path]]:
    """fairgate on a file that changes: its url, its admin listener, the file, its pid and its log."""
    port, admin_port, log = free_port(), free_port(), folder / "fairgate.log"
    base = {
        "listen": f"127.0.0.1:{port}",
        "admin": f"127.0.0.1:{admin_port}",
        "access_log": str(folder / "access.log"),
        "drain_s": 5,
        "pools": pools(urls, max_num_seqs=8),
        "tenants": tenants(dict.fromkeys(TENANTS, 1)),
    }
    files = Files(folder / "fairgate.yaml", base, urls, seed)
    command = [sys.executable, "-m", "gateway.commands.main", "serve", "-c", str(files.path)]
    with process(command, log) as child:
        admin = f"http://127.0.0.1:{admin_port}"
        await wait_ready(admin, "/ready", child, log, PROXY_START_S)
        yield f"http://127.0.0.1:{port}", admin, files, child.pid, log


async def ask(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with http.post(url) as response:
        answer: dict[str, Any] = await response.json()
        return answer


@contextlib.asynccontextmanager
async def _one_drained(http: aiohttp.ClientSession, admin: str, files: Files) -> AsyncIterator[None]:
    """Now and then one of several gets nothing meanwhile."""
    names = [backend["url"].removeprefix("http://") for backend in files.good["pools"][0]["backends"]]
    if len(names) < 2 or files.random.random() > 0.2:
        yield
        return
    await ask(http, f"{admin}/drain/{names[0]}")
    yield
    await ask(http, f"{admin}/resume/{names[0]}")


async def reload_under_load(reloads: int, every_s: float, clients: int, seed: int) -> dict[str, Any]:
    """Reload again and again; return the outcomes of reloads and requests, and each tenant's service."""
    outcomes: Counter[str] = Counter()
    surprises: list[str] = []
    with tempfile.TemporaryDirectory(prefix="fairgate-bench-") as name:
        folder = Path(name)
        async with engines() as urls, gateway(folder, urls, seed) as (url, admin, files, pid, log):
            own = {each: Tenant(url, each, clients, seed + n) for n, each in enumerate(TENANTS)}
            await asyncio.sleep(RAMP_S)
            shares, began_s = Shares(own), asyncio.get_running_loop().time()
            async with aiohttp.ClientSession() as http:
                for _ in range(reloads):
                    before = dict(files.weights)
                    is_good = files.next()
                    if files.random.random() < 0.1:
                        os.kill(pid, signal.SIGHUP)
                    answer = await ask(http, f"{admin}/reload")
                    shares.until_now(before)
                    outcomes[answer["outcome"]] += 1
                    if is_good is (answer["outcome"] == "refused"):
                        surprises += answer["why_not"] or [f"taken: {answer['changes']}"]
                    async with _one_drained(http, admin, files):
                        await asyncio.sleep(every_s)
                shares.until_now(files.weights)
            took_s = asyncio.get_running_loop().time() - began_s
            for tenant in own.values():
                await tenant.stop()
        said = log.read_text()
        lines = (folder / "access.log").read_text().splitlines()
    failures: Counter[str] = sum((tenant.failures for tenant in own.values()), Counter())
    got = shares.got()
    return {
        "reloads": dict(outcomes),
        "surprises": surprises,
        "took_s": took_s,
        "replies": sum(tenant.replies for tenant in own.values()),
        "failures": dict(failures),
        "lines": len(lines),
        "not_completed": len([line for line in lines if '"outcome":"completed"' not in line]),
        "faults": re.findall(r"^Traceback(?:.*\n)(?: .*\n)*(\S.*)$", said, re.M),
        "service": got,
        "due": shares.due,
        "off": {name: got[name] / shares.due[name] - 1 for name in own if shares.due[name]},
    }
