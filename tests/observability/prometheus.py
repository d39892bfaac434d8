"""A real Prometheus that scrapes gateways by the configuration of deploy/, and what a test asks of it."""

# The files below are small.
# ruff: noqa: ASYNC230, ASYNC240

from __future__ import annotations

import asyncio
import math
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.gateway.live import Live
from tests.ports import free_port
from tests.waiting import WAIT_S

DEPLOYED = Path(__file__).parents[2] / "deploy/prometheus"
SCRAPE_S = 0.2

Samples = list[tuple[dict[str, str], float]]
"""Labels and value of each series that a query finds."""


def program(name: str) -> str:
    """Where it is; the test is skipped without it."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name}: it comes with Debian's package prometheus")
    return found


class Prometheus:
    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url = url
        self._http = http

    async def query(self, expression: str) -> Samples:
        """What it finds now; numbers only. A query that is no query fails the test."""
        async with self._http.get(f"{self._url}/api/v1/query", params={"query": expression}) as response:
            answer = await response.json()
        assert answer["status"] == "success", (expression, answer)
        found = [(each["metric"], float(each["value"][1])) for each in answer["data"]["result"]]
        return [(labels, value) for labels, value in found if math.isfinite(value)]

    async def finds(self, expression: str, is_it: Callable[[Samples], bool] = bool) -> Samples:
        """What it finds, once it is that."""
        found: Samples = []
        try:
            async with asyncio.timeout(WAIT_S):
                while not is_it(found := await self.query(expression)):  # noqa: ASYNC110
                    await asyncio.sleep(SCRAPE_S / 2)
        except TimeoutError:
            pytest.fail(f"{expression}\nfinds {found}")
        return found


def configuration(lives: Sequence[Live]) -> dict[str, Any]:
    """That of deploy/, but for where the gateways are, the token, and how often they are asked."""
    config: dict[str, Any] = yaml.safe_load((DEPLOYED / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    del job["dns_sd_configs"], job["authorization"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{live.gateway.admin_port}" for live in lives]}]
    every = {"scrape_interval": f"{SCRAPE_S * 1000:.0f}ms", "scrape_timeout": f"{SCRAPE_S * 1000:.0f}ms"}
    config["global"] |= every
    config["rule_files"] = [str(DEPLOYED / "rules.yml")]
    return config


@asynccontextmanager
async def scraping(*lives: Live) -> AsyncIterator[Prometheus]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="fairgate-prometheus-") as folder:
        config = Path(folder, "prometheus.yml")
        config.write_text(yaml.safe_dump(configuration(lives)))
        options = {"config.file": config, "storage.tsdb.path": folder, "web.listen-address": f"127.0.0.1:{port}"}
        with Path(folder, "log").open("wb") as log:
            server = await asyncio.create_subprocess_exec(
                program("prometheus"), *(f"--{name}={value}" for name, value in options.items()), stdout=log, stderr=log
            )
        try:
            async with aiohttp.ClientSession() as http:
                url = f"http://127.0.0.1:{port}"
                await _ready(http, url, server, Path(folder, "log"))
                yield Prometheus(url, http)
        finally:
            if server.returncode is None:
                server.kill()
            await server.wait()


async def _ready(http: aiohttp.ClientSession, url: str, server: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(WAIT_S):
        while server.returncode is None:
            try:
                async with http.get(f"{url}/-/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)
    pytest.fail(f"prometheus does not start: {log.read_text()[-2000:]}")
