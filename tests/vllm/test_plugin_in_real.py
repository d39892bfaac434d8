"""The plug-in inside a real vLLM, installed as the wheel that is built here, without its dependencies."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from backends.vllm_plugin import steps
from tests.gateway.live import Starter, until
from tests.vllm.conftest import SERVE, serving

ROOT = Path(__file__).parents[2]
KEY = "secret"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "the time of the day", "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def with_plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a vLLM with the plug-in and an API key."""
    directory = tmp_path_factory.mktemp("plugin")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", directory]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = directory.glob("fairgate-*.whl")
    zipfile.ZipFile(wheel).extractall(directory / "site")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = directory / "vllm.log"
    environment = {**os.environ, "PYTHONPATH": str(directory / "site"), "VLLM_PLUGINS": "fairgate"}
    with serving([SERVE, str(port), "--api-key", KEY], environment, port, log) as base:
        yield base


def backend(url: str) -> dict[str, Any]:
    return {"pools": [{"name": "pool", "backends": [{"url": url, "api_key": KEY}]}]}


async def test_the_feed_is_guarded_by_the_api_key(with_plugin: str) -> None:
    async with aiohttp.ClientSession() as http:
        async with http.get(with_plugin + steps.PATH) as response:
            assert response.status == 401


async def test_each_step_is_told_and_the_sum_is_the_page_s(with_plugin: str) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.get(with_plugin + steps.PATH) as feed:
            said = [json.loads(await feed.content.readline())]
            asking = [asyncio.ensure_future(asked(http, with_plugin, 200)) for _ in range(6)]
            while not all(one.done() for one in asking) or said[-1]["ranks"][0]["running"]:
                said.append(json.loads(await feed.content.readline()))
    ranks = [one["ranks"][0] for one in said]
    assert max(rank["running"] for rank in ranks) == 6
    assert min(rank["free_blocks"] for rank in ranks) < 255 - 6 * 200 // 32
    assert (ranks[-1]["free_blocks"], ranks[-1]["total_blocks"], ranks[-1]["max_num_seqs"]) == (255, 255, 32)
    assert [one["seq"] for one in said] == sorted({one["seq"] for one in said})
    assert len({one["start"] for one in said}) == 1


async def asked(http: aiohttp.ClientSession, url: str, tokens: int) -> None:
    async with http.post(url + "/v1/completions", json={**BODY, "max_tokens": tokens}) as response:
        assert response.status == 200
        await response.read()


async def test_the_gateway_goes_by_the_steps(with_plugin: str, tmp_path: Path) -> None:
    async with Starter(tmp_path)(**backend(with_plugin)) as live:
        [engine] = live.gateway.pools[0].backends.values()
        await until(lambda: engine.read_by == "steps")
        for _ in range(3):
            asking = [live.ask("/v1/completions", {**BODY, "max_tokens": 100}, key=f"k{n % 3}") for n in range(60)]
            answers = await asyncio.gather(*asking)
            assert {answer.status for answer in answers} == {200}
            assert engine.read_by == "steps", "no page contradicts them under load"
        assert live.holds_nothing()
